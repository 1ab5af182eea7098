"""gpurun from Python and from notebooks: `gpurun.submit`, `gpurun.map`, `gpurun.job`.

The same core as the command line. `packing` makes a folder that any image with Python can run from a function,
`job` is a future for a job, `asking` submits. What comes back is read by `results`.
"""

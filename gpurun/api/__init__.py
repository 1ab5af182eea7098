"""Use gpurun from Python and from notebooks: `gpurun.submit`, `gpurun.map`, `gpurun.job`.

This API and the command line share the same core. `packing` turns a function into a workdir that runs in any image with
Python, `asking` submits it, `job` is its future, and `results` reads what it returned.
"""

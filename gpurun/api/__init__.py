"""Use gpurun from Python and from notebooks: `gpurun.submit`, `gpurun.map`, `gpurun.job`.

This API and the command line share the same core. `asking` turns a function into a workdir that runs in any image
with Python, and submits it; `job` is its future, and reads what it returned.
"""

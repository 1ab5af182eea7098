"""TensorBoard on the head, for jobs and sweeps.

`shown` chooses the output files to show, and keeps a folder with links to them. `guard` checks the token. `server` is
the only module that imports TensorBoard, which is an extra.
"""

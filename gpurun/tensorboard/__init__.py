"""TensorBoard on the head, for jobs and sweeps.

`shown` says which files of whose outputs are shown and keeps a folder with links to them, `guard` lets in who knows the
token, `server` is the one file that imports TensorBoard, which is an extra.
"""

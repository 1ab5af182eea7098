"""Choose the launcher of a job whose command and recipe name none, by what its program says. Pure.

`programs` finds the program in a command, `sources` what a Python file uses, `choice` the launcher. The files
themselves are read by `gpurun.head.reading`.
"""

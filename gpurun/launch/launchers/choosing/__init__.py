"""Choose the launcher of a job whose command and recipe name none, by what its program says. Pure.

`programs` finds the program in a command, `profilers` looks through what profiles or debugs it, `sources` says what a
Python file uses, and `choice` chooses the launcher. The files themselves are read by `gpurun.head.reading`.
"""

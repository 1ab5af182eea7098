"""Read the command lines that people type: wrappers, then a launcher with its flags. Pure.

flags       a launcher's flags, and what gpurun does with each
table       the launchers that gpurun knows; one entry adds the next
wrappers    the programs that may stand in front of a launcher
line        a command, read
"""

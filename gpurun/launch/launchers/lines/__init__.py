"""Read the command lines that people type: wrappers, then a launcher with its flags. Pure.

flags       a launcher's flags, and what gpurun does with each
table       the launchers that gpurun knows; one entry adds the next
wrappers    the programs that may stand in front of a launcher
instead     what to write instead of a launcher that gpurun cannot start
line        a command, read
shell       a shell's text as simple commands
script      the launchers in such a text: on how many hosts, how many processes
batch       the lines of a script that are for Slurm
"""

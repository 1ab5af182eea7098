"""Turn a placed job into one frozen plan of argvs, files and settings. Pure.

plan                 begin here: everything that gpurun will do on every host
launchers            each launcher as one value, in a table
rank                 the script that starts each rank
container, jobssh    a host's container, and the job's own sshd
fabric               settings for RoCE, InfiniBand and TCP
output               what the launcher prints
"""

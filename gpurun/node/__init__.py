"""Code that runs on a GPU host: needs the standard library and pynvml only, is sent over SSH, and is not installed.

Packages, each may import those below it (a contract in pyproject.toml):

data        data sets on this host
job, images a job's part here: claims, container, ranks, outputs, fence; images of this host's Docker
probe       what this host is, as one JSON document
gpus, nvml, docker, transfer
            who holds a GPU; Docker's API; content-addressed content on its way
folder      folders that other programs may change at any moment
agent       the agent that serves the head, and what every operation uses: its call, frames, processes
"""

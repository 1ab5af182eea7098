"""Docker images and code: find what hosts lack, send it from host to host, verify it.

plan, ship       an image: what is missing where, and sending it
code, workdir    a job's code, recorded at submit and sent to its hosts
tree, ignore     a folder as one value: digests, modes, links
store, export…   layers on the head, and how they come out of its Docker
relay, chain, lane, seats, pulls
                 a transfer through chains of hosts, also of data sets
slow, trial, packing
                 slow hosts, and whether compression pays
census           what gpurun has put on hosts, and its removal
"""

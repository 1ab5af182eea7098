"""Ownership of GPUs: lease files, locks, passes, draining.

occupancy            who holds which GPU of which machine: all decisions read it
lease, store         a lease as a value and as a file
allocate, allocator  a pass under the allocator lock: read a view, decide, commit
view, look, cluster  what passes and commands read
members              changes of a lease while its job runs
refusals, waiters, asking, draining
                     refused claims, who starts granted jobs, other users' gangs, drained hosts
"""

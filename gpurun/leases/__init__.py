"""Ownership of GPUs: lease files, locks, passes, draining.

occupancy            who holds which GPU of which machine: all decisions read it
lease, store         a lease as a value and as a file, under the allocator lock
allocate             a pass: read a view, decide, commit; changes of a lease while its job runs
look                 what passes and commands read
draining             drained hosts
"""

"""Is the hardware what the inventory says, and will a gang run on it? Probing, checks, pre-flight, benchmarks.

Checks are pure functions from what probes found to findings; only `survey`, `mesh` and `watch` talk to hosts.
"""

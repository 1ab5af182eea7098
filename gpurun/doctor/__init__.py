"""Check whether the hardware matches the inventory and a gang can run: probes, checks, pre-flight, benchmarks.

Checks are pure functions from probes' results to findings; only `survey`, `mesh` and `watch` talk to hosts.
"""

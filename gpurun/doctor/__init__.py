"""Check whether the hardware matches the inventory and a gang can run: probes, checks, pre-flight, benchmarks.

Checks are pure functions from probes' results to findings; only `survey` and `gang_checks` talk to hosts.
"""

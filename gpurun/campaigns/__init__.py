"""Scaling campaigns: run one recipe at several sizes, one job after the other, and report the results.

`plan`, `rates` and `curve` are pure. `store` keeps a campaign's files, `carry` runs its jobs, `report` writes the
report.
"""

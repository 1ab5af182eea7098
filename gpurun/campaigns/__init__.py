"""Scaling campaigns: one recipe run at several sizes, one job after the other, and what came of it.

`plan`, `rates` and `curve` are pure. `store` keeps a campaign's files, `carry` runs its jobs, `report` writes it down.
"""

"""Read what a pass decides on. Commands that only show the cluster need this, not the scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.inventory.load import load
from gpurun.inventory.model import Inventory
from gpurun.jobs.live import LiveJob
from gpurun.jobs.store import JobStore
from gpurun.leases.known import known_hosts
from gpurun.leases.lease import Holdings, Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.leases.view import View
from gpurun.leases.waiters import waiter_lives
from gpurun.scheduler.gangs import NOBODY
from gpurun.state import data_sites
from gpurun.state.cordons import read_cordons
from gpurun.state.machines import read_machines

OnProblem = Callable[[GpurunError], None]


def look(
    home: Path, *, now_s: float, on_problem: OnProblem = lambda _: None, despite_damage: bool = False,
    knower: int | None = None,
) -> View:  # fmt: skip
    """Read everything that a pass needs for its decisions.

    Args:
        knower: the uid of the user whose knowledge of machines counts; None = this user.
        despite_damage: report damaged leases instead of raising; then GPUs that seem free may not be free.

    Raises:
        StateError: a lease is damaged, so gpurun cannot know which GPUs are free; or the cordons are damaged.
    """
    leases = LeaseStore(home)
    holdings = leases.read_all()
    if not despite_damage:
        refuse_while_damaged(holdings)
    for error in holdings.damaged:
        on_problem(error)
    canonical, store = cache(os.path.realpath), JobStore(home)
    jobs = store.live_jobs(on_problem)
    may_hold = list(store.live_ids(but=jobs))  # a job whose record is damaged may be past the queue
    for name, job in jobs.items():
        path = canonical(job.record.inventory)
        if path != job.record.inventory:
            jobs[name] = at_inventory(job, path)
        if job.record.state.holds_gpus:
            may_hold.append(name)
    found = (*holdings.leases, *leases.removed({*may_hold}.difference(lease.name for lease in holdings.leases)))
    all_leases = tuple(_at_canonical(lease, canonical(lease.inventory)) for lease in found)
    machines = read_machines(home, os.getuid() if knower is None else knower)
    occupancy = Occupancy(all_leases, lambda inventory: known_hosts(inventory, machines) if machines else {})
    for overlap in occupancy.overlaps:
        on_problem(overlap)
    lives = cache(lambda uid: waiter_lives(home, uid))
    needs_data = any(job.wants is not None and job.wants.data_digests for job in jobs.values())
    holders = data_sites.holders() if needs_data else NOBODY
    return View(
        jobs, all_leases, occupancy, read_cordons(home), os.getuid(), lives, now_s, holdings.damaged, holders, machines
    )


def refuse_while_damaged(holdings: Holdings) -> None:
    """Raise the first damage found: while a lease is unreadable, no GPU counts as free."""
    for error in holdings.damaged:
        raise StateError(
            f"gpurun grants no GPUs while a lease, the file that reserves a job's GPUs, is damaged: {error.message}",
            where=error.where, hint=error.hint,
        )  # fmt: skip


def loaded(path: str, on_problem: OnProblem) -> Inventory | None:
    """Return the inventory at a path; None if it cannot be used."""
    try:
        return load(Path(path))
    except BadInput as error:
        on_problem(error)
        return None


def at_inventory(job: LiveJob, inventory: str) -> LiveJob:
    """Return the job with the canonical path of its inventory: jobs of older versions may have another path."""
    return LiveJob(job.record.but(inventory=inventory), job.wants, job.request)


def _at_canonical(lease: Lease, inventory: str) -> Lease:
    return lease if lease.inventory == inventory else replace(lease, inventory=inventory)

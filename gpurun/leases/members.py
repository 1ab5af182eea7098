"""Changes of a lease while its job runs: each step replaces one lease file by another.

Ports move while the job starts. Hosts join and leave an elastic gang. A joining host is `apart` until its container
runs, a leaving host until it has been fenced. So a new supervisor knows every host that it must fence.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from gpurun import faults
from gpurun.errors import StateError
from gpurun.inventory.model import Inventory
from gpurun.leases.allocate import SSH_PORTS, free_ports, snapshot
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.known import ids_of
from gpurun.leases.lease import Lease, machines_of, places_of
from gpurun.leases.look import look
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.scheduler.gangs import gang_of
from gpurun.scheduler.growth import growth, regrown
from gpurun.scheduler.model import Placement
from gpurun.state import audit

Held = tuple[Lease, LeaseLock]
"""A lease and its lock."""


def put_apart(home: Path, held: Held, hosts: Collection[str]) -> Held:
    """Let hosts leave the gang. Their GPUs stay leased until the hosts are fenced."""
    lease, _ = held
    return _change(home, held, replace(lease, apart=tuple(dict.fromkeys((*lease.apart, *hosts)))))


def take_in(home: Path, held: Held, hosts: Collection[str]) -> Held:
    """Let ready hosts join the gang."""
    lease, _ = held
    apart = tuple(host for host in lease.apart if host not in hosts)
    return _change(home, held, replace(lease, apart=apart, joins=(*lease.joins, *hosts)))


def let_go(home: Path, held: Held, hosts: Collection[str]) -> Held:
    """Free the GPUs of hosts that were apart and have been fenced."""
    lease, _ = held
    grants = tuple(grant for grant in lease.grants if grant.host not in hosts)
    apart = tuple(host for host in lease.apart if host not in hosts)
    return _change(home, held, replace(lease, grants=grants, apart=apart))


def grow(home: Path, held: Held, inventory: Inventory, *, now_s: float) -> tuple[Held, tuple[str, ...]]:
    """Lease more GPUs for a gang that has fewer than it wants, if there are some that no job waits for.

    Returns:
        The lease, with the hosts of these GPUs apart; and those hosts.

    Raises:
        StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
    """
    lease, lock = held
    with allocator_lock(home, patience_s=None):
        view = look(home, now_s=now_s)
        job = view.jobs.get(lease.job)
        if job is None or job.wants is None:  # its files are damaged
            return held, ()
        gang = gang_of(job.record, job.wants)
        more = growth(snapshot(view, inventory), gang, Placement(lease.generation, lease.racks, lease.grants))
        if more is None:
            return held, ()
        changed = replace(
            lease, grants=(*lease.grants, *more.grants), racks=tuple(dict.fromkeys((*lease.racks, *more.racks))),
            apart=(*lease.apart, *more.hosts), machines={**lease.machines, **machines_of(inventory, more.grants)},
            places={**lease.places, **places_of(inventory, more.grants)},
            ids={**lease.ids, **ids_of(inventory, more.grants, view.machines)},
        )  # fmt: skip
        held = changed, LeaseStore(home).grow(lock, changed, view.occupancy)
    audit.note(home, "grow", job=lease.job, hosts=list(more.hosts))
    return held, more.hosts


def larger(home: Path, lease: Lease, inventory: Inventory, *, now_s: float) -> Placement | None:
    """Return the placement that the gang would get if it stopped and started again, if that is larger. Changes nothing.

    Includes hosts on which it failed before: a pass uses them only if the gang needs them.

    Raises:
        StateError: a lease is damaged, so gpurun cannot know which GPUs are free.
    """
    view = look(home, now_s=now_s)
    job = view.jobs.get(lease.job)
    if job is None or job.wants is None:  # its files are damaged
        return None
    gang = gang_of(job.record, job.wants).but(avoid=())
    return regrown(snapshot(view, inventory), gang, Placement(lease.generation, lease.racks, lease.grants))


def move_ports(home: Path, held: Held) -> Held:
    """Give a job other ports, because another program listens on its own.

    Chooses them at random, because another head's jobs use neighbouring ports.

    Raises:
        StateError: all ports for jobs are in use.
    """
    lease, lock = held
    with allocator_lock(home, patience_s=None):
        store, count = LeaseStore(home), len(lease.ports)
        taken = {port for other in store.read_all().leases for port in other.ports}
        begin = random.randrange(SSH_PORTS.start, SSH_PORTS.stop - count)  # noqa: S311 (not a secret)
        first = free_ports(taken, count, begin=begin) or free_ports(taken, count)
        if first is None:
            raise StateError("all ports that gpurun uses for jobs are in use", job=lease.job)
        changed = replace(lease, ssh_port=first)
        return changed, store.change(lock, changed)


def _change(home: Path, held: Held, changed: Lease) -> Held:
    faults.point()
    with allocator_lock(home, patience_s=None):
        return changed, LeaseStore(home).change(held[1], changed)

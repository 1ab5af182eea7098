"""Check a lease before gpurun adopts it: its inventory says how to reach hosts, so a forged lease could run commands.

Every member of a shared state directory can create names in ``leases/``. A member can move a file there that another
user owns and whose content the member chose. So gpurun adopts a lease only if its owner chose the inventory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gpurun.errors import StateError
from gpurun.jobs.record import JobRecord
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseStore
from gpurun.state.trusted import not_only_root_s


def check_lease(home: Path, lease: Lease) -> None:
    """Refuse a lease that its owner may not have written.

    The record of the lease's job must name the same owner and the same inventory: by the path that the person gave or
    as the inventory of one of its grants, because the path may have been a link that has changed since. A lost lease
    may outlive its job's record, or exist because another job was refused the GPUs. Then any job of its owner must name
    the inventory. Root's lost leases can be of any user's job, if only root can change the inventory.

    Raises:
        StateError: the lease may be forged, or its job is gone or damaged.
    """
    if _is_root_s(lease):
        return
    store = JobStore(home)
    try:
        record = store.get(lease.job).record()
    except StateError:
        if not lease.lost:
            raise
        if is_chosen(store, lease.inventory, lease.owner_uid):
            return
        raise _forged(home, lease, "no job of the lease's owner uses this inventory") from None
    if record.owner_uid != lease.owner_uid:
        raise _forged(home, lease, f"the lease's job belongs to {record.owner}")
    if not _same(record, lease.inventory) and not (lease.lost and is_chosen(store, lease.inventory, lease.owner_uid)):
        raise _forged(home, lease, f"the lease's job was submitted with {record.inventory}")


def forged_leases(home: Path) -> Iterable[StateError]:
    """Yield the errors of `check_lease` for leases without a supervisor. Their GPUs stay leased.

    Only a lease's owner can hold its lock. So if a process of the owner holds the lock, the owner wrote the lease.
    """
    leases = LeaseStore(home)
    for lease in leases.read_all().leases:
        path = _path(home, lease)
        try:
            check_lease(home, lease)
        except StateError as error:
            if path.exists() and not leases.is_alive(path.name.removesuffix(".json")):
                error.where = str(path)
                yield error


def _is_root_s(lease: Lease) -> bool:
    """Return whether root made a lost lease to fence another user's hosts: root's file, and only root can change its
    inventory.
    """
    return lease.owner_uid == 0 and lease.lost and not_only_root_s(Path(lease.inventory)) is None


def is_chosen(store: JobStore, inventory: str, uid: int) -> bool:
    """Return whether a user has submitted a job with this inventory."""
    return any(record.owner_uid == uid and _same(record, inventory) for record in store.records(lambda _: None))


def _same(record: JobRecord, inventory: str) -> bool:
    return inventory in record.granted_from or os.path.realpath(record.inventory) == os.path.realpath(inventory)


def _path(home: Path, lease: Lease) -> Path:
    """Return the file of a lease. An interrupted step leaves a lost lease under its job's name."""
    leases = LeaseStore(home)
    path = leases.path(lease.name)
    return (path if path.exists() else leases.path(lease.job)).plain


def _forged(home: Path, lease: Lease, why: str) -> StateError:
    return StateError(
        "the lease, a file that reserves GPUs for a job, may be forged, so gpurun does not act on the lease. "
        f"The lease names the inventory {lease.inventory!r}, but {why}",
        where=str(_path(home, lease)), hint="`gpurun recover` shows what you can do with this lease",
    )  # fmt: skip

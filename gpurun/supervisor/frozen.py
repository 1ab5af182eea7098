"""The gang's hosts, as the inventory last described them while it was valid.

A gang runs for weeks, and people edit its inventory meanwhile: a merge conflict, a missing file. That must neither end
the gang nor keep its GPUs. So a supervisor stores the part of the inventory that its gang needs in the job's folder. A
later supervisor that cannot load the inventory uses this copy.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.inventory.load import load
from gpurun.inventory.model import Inventory
from gpurun.jobs.folder import JobFolder
from gpurun.leases.lease import Lease, as_granted
from gpurun.state import durable
from gpurun.state.path import StatePath

OTHERS = 3
"""Hosts outside the gang that are kept too: they tell whether the head is cut off, or the gang's hosts are."""


@dataclass(frozen=True)
class FrozenCluster:
    """The content of ``cluster.json`` in a job's folder."""

    inventory: Inventory


def cluster_of(folder: JobFolder, lease: Lease) -> tuple[Inventory, BadInput | None]:
    """Return the inventory of a lease, with its hosts as they were at the grant; and the problem of the file, if any.

    Raises:
        StateUnavailable: the file cannot be loaded, and there is no usable copy. That ends no gang.
    """
    try:
        inventory = load(Path(lease.inventory))
    except BadInput as error:
        frozen = _stored(folder)
        if frozen is None or any(grant.host not in frozen.by_name for grant in lease.grants):
            raise StateUnavailable(
                f"the job's inventory cannot be loaded: {error.message}", where=error.where, job=lease.job,
                hint="correct the inventory; then any gpurun command continues the job",
            ) from error  # fmt: skip
        return as_granted(frozen, lease), error
    return as_granted(inventory, lease), None


def cluster_now(lease: Lease) -> Inventory:
    """Return the inventory of a lease as its file is now, with the gang's hosts as they were at the grant.

    Raises:
        BadInput: it cannot be loaded.
    """
    return as_granted(load(Path(lease.inventory)), lease)


def last_known(folder: JobFolder) -> Inventory:
    """Return the hosts of an ended job, as they were when it last ran.

    Raises:
        StateError: no supervisor stored them.
    """
    frozen = _stored(folder)
    if frozen is None:
        raise StateError("gpurun has no record of the job's hosts", where=str(_path(folder)), job=folder.id)
    return frozen


def freeze(folder: JobFolder, inventory: Inventory, lease: Lease) -> None:
    """Store the part of the inventory that the gang needs. Ignores a full disk, so that the gang continues."""
    mine = {grant.host: inventory.by_name[grant.host] for grant in lease.grants}
    others = islice((host for host in inventory.hosts if host.name not in mine), OTHERS)
    part = replace(inventory, hosts=(*mine.values(), *others), racks=(), pools=())
    if part != _stored(folder):
        with suppress(FileNotFoundError, StateError):
            durable.write_record(_path(folder), FrozenCluster(part))


def _stored(folder: JobFolder) -> Inventory | None:
    with suppress(FileNotFoundError, StateError):
        return durable.read_record(_path(folder), FrozenCluster).inventory
    return None


def _path(folder: JobFolder) -> StatePath:
    return folder.path / "cluster.json"

"""Hosts that a running job relies on: what of them may not be changed under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from gpurun.errors import StateError
from gpurun.inventory.model import Inventory

RELIED_ON = ("gpus", "generation", "user", "address", "port", "fabric_address")


JobsByHost = Mapping[str, Sequence[str]]
"""The jobs, by id, that have a lease on a host; hosts without one are left out."""


class LeaseView(Protocol):
    """Who holds GPUs, as far as editing the inventory has to know."""

    def frozen(self) -> AbstractContextManager[JobsByHost]:
        """Who holds what; as long as the context is open, nobody is given more.

        Raises StateError if that cannot be known: then nothing that jobs may rely on is changed.
        """


class NoLeases:
    """Nobody holds anything."""

    def frozen(self) -> AbstractContextManager[JobsByHost]:
        """See LeaseView."""
        return nullcontext({})


@contextmanager
def protected(before: Inventory | None, after: Inventory, leases: LeaseView) -> Iterator[None]:
    """While open, `before` may be replaced by `after`: no job relies on what differs, and none can begin to.

    Args:
        before: None = what was there cannot be read, so that nothing is known but who has leases.
    Raises StateError, naming the host and its jobs, if a leased host is gone or is not what its jobs rely on.
    """
    if before is not None and _relied_on(before) == _relied_on(after):
        yield
        return
    with leases.frozen() as jobs_by_host:
        for name, jobs in jobs_by_host.items():
            if before is not None and name not in before.by_name:
                continue  # leased by another inventory of the same state directory
            changed = _changed(before, after, name)
            if changed:
                raise StateError(
                    f"{' and '.join(jobs)} runs there, so {changed} must stay as it is",
                    host=name,
                    hint=f"gpurun inventory drain {name}, and again once its jobs have moved away",
                )
        yield


def _relied_on(inventory: Inventory) -> object:
    hosts = [(host.name, *(getattr(host, field) for field in RELIED_ON), host.fabric) for host in inventory.hosts]
    return sorted(hosts, key=lambda host: host[0]), inventory.fabrics, inventory.ssh_config


def _changed(before: Inventory | None, after: Inventory, name: str) -> str:
    """What of a host that jobs rely on is not the same, as a person would say it; empty if nothing."""
    new = after.by_name.get(name)
    if new is None or before is None:
        return "the host" if new is None else ""
    old = before.by_name[name]
    for field in RELIED_ON:
        if getattr(old, field) != getattr(new, field):
            return field
    if before.fabric_of(old) != after.fabric_of(new):
        return "its fabric"
    if before.ssh_config != after.ssh_config:
        return "ssh_config"
    return ""

"""Hosts that a running job relies on: what of them may not be changed under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from gpurun.errors import StateError
from gpurun.inventory.model import Inventory

RELIED_ON = ("gpus", "generation", "user", "address", "port", "fabric_address", "docker_host", "folder")


JobsByMachine = Mapping[str, Sequence[str]]
"""`gpurun.inventory.model.Host.machine` → ids of the jobs that hold GPUs there."""


class LeaseView(Protocol):
    """Who holds GPUs, as far as editing the inventory has to know."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
        """Who holds what; as long as the context is open, nobody is given more.

        Raises StateError if that cannot be known: then nothing that jobs may rely on is changed.
        """


class NoLeases:
    """Nobody holds anything."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
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
    with leases.frozen() as jobs_by_machine:
        if before is None:
            _refuse_loss(jobs_by_machine, after)
        else:
            _refuse_change(jobs_by_machine, before, after)
        yield


def _refuse_change(jobs_by_machine: JobsByMachine, before: Inventory, after: Inventory) -> None:
    for host in before.hosts:
        changed = _changed(before, after, host.name) if host.machine in jobs_by_machine else ""
        if changed:
            raise StateError(
                f"{' and '.join(jobs_by_machine[host.machine])} runs there, so {changed} must stay as it is",
                host=host.name,
                hint=f"gpurun inventory drain {host.name} --wait, then try again",
            )


def _refuse_loss(jobs_by_machine: JobsByMachine, after: Inventory) -> None:
    """What was there cannot be read: at least every machine that jobs hold must be in what replaces it."""
    there = {host.machine for host in after.hosts}
    for machine, jobs in jobs_by_machine.items():
        if machine not in there:
            raise StateError(
                f"{' and '.join(jobs)} runs on {machine}, which this inventory would not have", where=after.source,
                hint="cancel these jobs first, or correct the file by hand; `gpurun inventory validate` checks it",
            )  # fmt: skip


def _relied_on(inventory: Inventory) -> object:
    hosts = [(host.name, *(getattr(host, field) for field in RELIED_ON), host.fabric) for host in inventory.hosts]
    return sorted(hosts, key=lambda host: host[0]), inventory.fabrics, inventory.ssh_config


def _changed(before: Inventory, after: Inventory, name: str) -> str:
    """What of a host that jobs rely on is not the same, as a person would say it; empty if nothing."""
    new = after.by_name.get(name)
    if new is None:
        return "the host"
    old = before.by_name[name]
    for field in RELIED_ON:
        if getattr(old, field) != getattr(new, field):
            return field
    if before.fabric_of(old) != after.fabric_of(new):
        return "its fabric"
    if before.ssh_config != after.ssh_config:
        return "ssh_config"
    return ""

"""Protect the settings of hosts on which running jobs depend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from gpurun.errors import StateError
from gpurun.inventory.model import Inventory
from gpurun.quantities.counts import plural

RELIED_ON = ("gpus", "generation", "user", "address", "port", "fabric_address", "docker_host", "folder")


JobsByMachine = Mapping[str, Sequence[str]]
"""`gpurun.inventory.model.Host.machine` → ids of the jobs that hold GPUs there."""


class LeaseView(Protocol):
    """The jobs that hold GPUs, as far as an edit of the inventory needs them."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
        """Return the jobs of each machine; while the context is open, no job gets more GPUs.

        Raises StateError if the jobs are unknown. Then gpurun refuses every change on which a job may depend.
        """


class NoLeases:
    """No job holds GPUs."""

    def frozen(self) -> AbstractContextManager[JobsByMachine]:
        """See LeaseView."""
        return nullcontext({})


@contextmanager
def protected(before: Inventory | None, after: Inventory, leases: LeaseView) -> Iterator[None]:
    """While the context is open, the caller may replace `before` by `after`: no job depends on the difference.

    Args:
        before: None = the old file is unreadable, so that only the leases are known.
    Raises StateError, with the host and its jobs, if a leased host is missing or a setting that its jobs need changes.
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
                f"you cannot {changed} now: {_running(jobs_by_machine[host.machine])} on the host",
                host=host.name,
                hint=f"run `gpurun inventory drain {host.name} --wait`, then repeat the change",
            )


def _refuse_loss(jobs_by_machine: JobsByMachine, after: Inventory) -> None:
    """Check a replacement of an unreadable inventory: it must contain at least every machine that jobs hold."""
    there = {host.machine for host in after.hosts}
    for machine, jobs in jobs_by_machine.items():
        if machine not in there:
            raise StateError(
                f"{_running(jobs)} on {machine}, but the new inventory does not contain the host", where=after.source,
                hint="cancel the jobs first, or correct the file by hand; `gpurun inventory validate` checks the file",
            )  # fmt: skip


def _running(jobs: Sequence[str]) -> str:
    return f"{' and '.join(jobs)} {plural(len(jobs), 'runs', 'run')}"


def _relied_on(inventory: Inventory) -> object:
    hosts = [(host.name, *(getattr(host, field) for field in RELIED_ON), host.fabric) for host in inventory.hosts]
    return sorted(hosts, key=lambda host: host[0]), inventory.fabrics, inventory.ssh_config


def _changed(before: Inventory, after: Inventory, name: str) -> str:
    """Return the first change on which jobs of a host depend, in words; an empty string if there is none."""
    new = after.by_name.get(name)
    if new is None:
        return "remove the host"
    old = before.by_name[name]
    for field in RELIED_ON:
        if getattr(old, field) != getattr(new, field):
            return f"change {field}"
    if before.fabric_of(old) != after.fabric_of(new):
        return "change the fabric"
    if before.ssh_config != after.ssh_config:
        return "change ssh_config"
    return ""

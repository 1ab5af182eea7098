"""A cluster: an inventory together with its state. Commands use it to select hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.inventory.load import load
from gpurun.inventory.locate import find
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.record import GpuHolder, HostRefusal
from gpurun.leases.refusals import active
from gpurun.leases.view import View
from gpurun.state.cordons import Cordon, read_cordons
from gpurun.state.home import home

if TYPE_CHECKING:
    from gpurun.scheduler.drain import Departure


@dataclass(frozen=True)
class HostRow:
    """A host and its free GPUs.

    Attributes:
        free: GPUs without a holder, also of a cordoned host; 0 while holders are unknown.
        state: ``ok``, ``cordoned``, ``draining``, ``drained`` (no job holds its GPUs any more), ``lost``, or
            ``unknown`` while a lease is damaged.
        foreign: others that hold GPUs here: the host recently refused the GPUs to a job of this user.
        shown: the state for people, such as ``draining: 1 gang leaves``.
    """

    host: Host
    free: int
    state: str
    foreign: tuple[GpuHolder, ...] = ()
    shown: str = ""


@dataclass(frozen=True)
class Cluster:
    """An inventory with its cordons, its leases, and host sets. Reads state when it is needed.

    Attributes:
        home: the state directory.
    """

    inventory: Inventory
    home: Path

    @cached_property
    def cordons(self) -> Mapping[str, Cordon]:
        """Return the reasons why hosts get no new gangs. Raises StateError if the file is damaged."""
        return read_cordons(self.home)

    def rows(self, view: View) -> list[HostRow]:
        """Return each host's row for people. While a lease is damaged, no GPU counts as free."""
        refused: dict[str, list[HostRefusal]] = {}
        for job in view.jobs.values():
            if job.record.inventory == self.inventory.source:
                for refusal in active([job.record], view.uid, view.now_s):
                    refused.setdefault(refusal.host, []).append(refusal)
        leaving = self.departures(view)
        return [self._row(host, view, refused.get(host.name, ()), leaving) for host in self.inventory.hosts]

    def departures(self, view: View, hosts: Collection[str] | None = None) -> tuple[Departure, ...]:
        """Return the fates of the gangs on those of these hosts (all if None) that are drained."""
        if not self.groups["draining"]:
            return ()
        from gpurun.leases.draining import departures_of  # noqa: PLC0415
        from gpurun.leases.look import loaded  # noqa: PLC0415 (the whole scheduler, and rarely needed)

        found = departures_of(view, lambda path: loaded(path, lambda _: None))
        return tuple(each for each in found if hosts is None or not set(hosts).isdisjoint(each.hosts))

    def _row(self, host: Host, view: View, refused: Sequence[HostRefusal], leaving: Sequence[Departure]) -> HostRow:
        held = {gpu for gpu in view.occupancy.on(host) if gpu < host.gpus}
        held.update(gpu for refusal in refused for gpu in refusal.holder.gpus if gpu < host.gpus)
        cordon = self.cordons.get(host.name)
        state: str = cordon.state if cordon is not None else "unknown" if view.damaged else "ok"
        shown = state
        if state == "draining":
            from gpurun.scheduler.drain import host_state  # noqa: PLC0415

            shown = host_state(host.name, leaving, is_empty=not held and not view.damaged)
            state = "drained" if shown == "drained" else state
        free, foreign = 0 if view.damaged else host.gpus - len(held), tuple(refusal.holder for refusal in refused)
        return HostRow(host, free, state, foreign, shown)

    @property
    def groups(self) -> Mapping[str, list[str]]:
        """Return the groups ``@cordoned`` (every host that gets no new gangs), ``@draining`` and ``@lost`` (parts of
        it).
        """
        groups: dict[str, list[str]] = {"cordoned": list(self.cordons), "draining": [], "lost": []}
        for host, cordon in self.cordons.items():
            if cordon.state != "cordoned":
                groups[cordon.state].append(host)
        return groups

    def choose(self, selection: str | None) -> tuple[Host, ...]:
        """Return the selected hosts; all hosts if there is no selection.

        Raises:
            BadInput: the selection is not a host set, or names a host or group that does not exist.
        """
        if selection is None:
            return self.inventory.hosts
        from gpurun.inventory.hostset import select  # noqa: PLC0415 (ClusterShell takes long to import)

        groups = self.groups if "@" in selection else {}
        return tuple(self.inventory.by_name[name] for name in select(self.inventory, selection, groups))


def open_cluster(explicit: str | None, environ: Mapping[str, str]) -> Cluster:
    """Return the cluster of a command: the inventory that ``--inventory`` or the environment names, and its state.

    Raises:
        BadInput: there is no such inventory, or it has errors.
    """
    return Cluster(load(find(explicit, environ)), home(environ))

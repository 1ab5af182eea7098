"""A cluster: an inventory together with its state. Commands use it to select hosts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.inventory.load import load
from gpurun.inventory.locate import find
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.record import GpuHolder, HostRefusal
from gpurun.leases.known import known_hosts, lease_hosts
from gpurun.leases.refusals import active
from gpurun.leases.view import View
from gpurun.state.cordons import Cordon, cordons_on, read_cordons
from gpurun.state.home import home
from gpurun.state.known_as import KnownAs, KnownMachines
from gpurun.state.machines import Machine, Out, outs_of, read_machines

if TYPE_CHECKING:
    from gpurun.scheduler.drain import Departure


@dataclass(frozen=True)
class HostRow:
    """A host and its free GPUs.

    Attributes:
        free: GPUs without a holder, also of a cordoned host; 0 while holders are unknown, and on a host that is out.
        state: ``ok``, ``cordoned``, ``draining``, ``drained`` (no job holds its GPUs any more), ``lost``, ``out`` (a
            check of this user's found it broken), or ``unknown`` while a lease is damaged.
        foreign: others that hold GPUs here: the host recently refused the GPUs to a job of this user.
        shown: the state for people, such as ``draining: 1 gang leaves``.
        out: why the last check found the host broken, also if its state is another.
        seen_s: when this user's processes last looked at it, seconds since the epoch; None = never.
        held: GPUs with a holder.
    """

    host: Host
    free: int
    state: str
    foreign: tuple[GpuHolder, ...] = ()
    shown: str = ""
    out: Out | None = None
    seen_s: float | None = None
    held: int = 0


@dataclass(frozen=True)
class Cluster:
    """An inventory with its cordons, its leases, and host sets. Reads state when it is needed.

    Attributes:
        home: the state directory.
    """

    inventory: Inventory
    home: Path

    @cached_property
    def machines(self) -> Mapping[str, Machine]:
        """Return what this user knows of machines, by `gpurun.inventory.model.Host.machine`."""
        return read_machines(self.home, os.getuid())

    @cached_property
    def known(self) -> Mapping[str, KnownAs]:
        """Return host → by what its machine is known."""
        return known_hosts(self.inventory, self.machines)

    @cached_property
    def cordons(self) -> Mapping[str, Cordon]:
        """Return host → why it gets no new gangs. Raises StateError if the file is damaged."""
        return cordons_on(read_cordons(self.home), self.known.values())

    @cached_property
    def outs(self) -> Mapping[str, Out]:
        """Return host → why it is out, for this user."""
        outs = outs_of(self.machines)
        return {host.name: outs[host.machine] for host in self.inventory.hosts if host.machine in outs} if outs else {}

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
        here = [self._named_here(each, view) for each in found]
        return tuple(each for each in here if each.hosts and (hosts is None or not set(hosts).isdisjoint(each.hosts)))

    def _named_here(self, departure: Departure, view: View) -> Departure:
        """Return the fate with the hosts as this inventory names them: the gang may be of another inventory."""
        ours = KnownMachines(self.known.items())
        names = dict[str, None]()
        for lease in view.leases:
            if lease.job == departure.gang:
                theirs = [each for each in lease_hosts(lease) if each.host in departure.hosts]
                by_name = lease.inventory == self.inventory.source
                names.update(dict.fromkeys(host for each in theirs for host in ours.same(each, by_name=by_name)))
        return replace(departure, hosts=tuple(names))

    def _row(self, host: Host, view: View, refused: Sequence[HostRefusal], leaving: Sequence[Departure]) -> HostRow:
        held = {gpu for gpu in view.occupancy.on(host, self.known[host.name]) if gpu < host.gpus}
        held.update(gpu for refusal in refused for gpu in refusal.holder.gpus if gpu < host.gpus)
        cordon = self.cordons.get(host.name)
        seen, out = self.machines.get(host.machine), self.outs.get(host.name)
        state: str = cordon.state if cordon is not None else "unknown" if view.damaged else "out" if out else "ok"
        shown = state
        if state == "draining":
            from gpurun.scheduler.drain import host_state  # noqa: PLC0415

            shown = host_state(host.name, leaving, is_empty=not held and not view.damaged)
            state = "drained" if shown == "drained" else state
        shown += ", out" if out and state not in ("out", "unknown") else ""
        free, foreign = 0 if view.damaged or out else host.gpus - len(held), tuple(each.holder for each in refused)
        return HostRow(host, free, state, foreign, shown, out, None if seen is None else seen.seen_s, len(held))

    @property
    def groups(self) -> Mapping[str, list[str]]:
        """Return the groups ``@cordoned`` (people or health checks keep gangs off it), ``@draining`` and ``@lost``
        (parts of it), and ``@out``.
        """
        groups: dict[str, list[str]] = {
            "cordoned": list(self.cordons), "draining": [], "lost": [], "out": list(self.outs)
        }  # fmt: skip
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

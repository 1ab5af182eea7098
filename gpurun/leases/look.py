"""Read what a pass decides on, who starts jobs, and the cluster that commands show, without the scheduler."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.inventory.model import Host, Inventory
from gpurun.inventory.read import find_inventory, load_inventory
from gpurun.jobs.record import GpuHolder, HostRefusal
from gpurun.jobs.store import JobStore, LiveJob
from gpurun.leases.lease import Holdings, Lease, active
from gpurun.leases.occupancy import Occupancy, View, known_machines, lease_hosts
from gpurun.leases.store import LeaseStore
from gpurun.scheduler.model import NOBODY
from gpurun.state import caches, durable, locks
from gpurun.state.hosts import Cordon, Cordons, KnownAs, KnownMachines, Machine, Machines, Out, cordons_on, outs_of
from gpurun.state.paths import StatePath, home, state_error

if TYPE_CHECKING:
    from gpurun.scheduler.explain import Departure


# Whether a user's waiter lives. The waiter is the process that starts the jobs that passes grant to that user.


MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class WaiterLocks:
    """The locks that show which users' waiters live."""

    home: Path

    def lives(self, uid: int) -> bool:
        """Return whether that user has a live waiter."""
        for path in self._logs(uid):
            try:
                descriptor = path.open_file(os.O_RDONLY)
            except (FileNotFoundError, StateError):
                continue
            try:
                if _is_of(descriptor, uid) and locks.is_held(descriptor):
                    return True
            finally:
                os.close(descriptor)
        return False

    def take(self) -> tuple[int, StatePath] | None:
        """Take the lock that shows that this user's waiter lives; None if another waiter holds it.

        Returns:
            The descriptor that holds the lock, and the waiter's log.

        Raises:
            StateError: the log cannot be created.
        """
        if self.lives(os.getuid()):
            return None
        durable.make_folder(self._folder())
        first, another = self._folder() / f"{os.getuid()}.log", f"{os.getuid()}.{secrets.token_hex(8)}.log"
        for path in (first, *self._logs(os.getuid()), self._folder() / another):
            try:
                descriptor = path.open_file(os.O_RDWR | os.O_CREAT)
            except (FileNotFoundError, StateError):
                if path.name == another:
                    raise
                continue  # another user's, or no file
            try:
                is_taken = _is_of(descriptor, os.getuid()) and locks.try_take(descriptor)
                lives = not is_taken and locks.is_held(descriptor)
            except OSError as error:
                os.close(descriptor)
                raise state_error(error, path, "locked") from error
            if is_taken:
                with suppress(OSError):  # it stays long
                    if os.fstat(descriptor).st_size > MAX_LOG_BYTES:
                        os.ftruncate(descriptor, 0)
                return descriptor, path
            os.close(descriptor)
            if lives:
                return None
        return None

    def _folder(self) -> StatePath:
        return StatePath(self.home) / "waiters"

    def _logs(self, uid: int) -> Iterator[StatePath]:
        """Yield the files with the user's number in their name, regardless of their owner."""
        try:
            names = self._folder().names()
        except FileNotFoundError:
            return
        for name in sorted(names):
            if name.startswith(f"{uid}."):
                yield self._folder() / name


def _is_of(descriptor: int, uid: int) -> bool:
    """Return whether a file is the user's, and no other user can write it and so lock it."""
    found = os.fstat(descriptor)
    return found.st_uid == uid and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
    machines = Machines(home).read(os.getuid() if knower is None else knower)
    occupancy = Occupancy(all_leases, lambda inventory: known_machines(inventory, machines) if machines else {})
    for overlap in occupancy.overlaps:
        on_problem(overlap)
    lives = cache(lambda uid: WaiterLocks(home).lives(uid))
    needs_data = any(job.wants is not None and job.wants.data_digests for job in jobs.values())
    holders = caches.holders() if needs_data else NOBODY
    return View(
        jobs,
        all_leases,
        occupancy,
        Cordons(home).read(),
        os.getuid(),
        lives,
        now_s,
        holdings.damaged,
        holders,
        machines,
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
        return load_inventory(Path(path))
    except BadInput as error:
        on_problem(error)
        return None


def at_inventory(job: LiveJob, inventory: str) -> LiveJob:
    """Return the job with the canonical path of its inventory: jobs of older versions may have another path."""
    return LiveJob(job.record.but(inventory=inventory), job.wants, job.request)


def _at_canonical(lease: Lease, inventory: str) -> Lease:
    return lease if lease.inventory == inventory else replace(lease, inventory=inventory)


# A cluster: an inventory together with its state. Commands use it to select hosts.


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
        return Machines(self.home).read(os.getuid())

    @cached_property
    def known(self) -> Mapping[str, KnownAs]:
        """Return host → by what its machine is known."""
        return known_machines(self.inventory, self.machines)

    @cached_property
    def cordons(self) -> Mapping[str, Cordon]:
        """Return host → why it gets no new gangs. Raises StateError if the file is damaged."""
        return cordons_on(Cordons(self.home).read(), self.known.values())

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
            from gpurun.scheduler.explain import host_state  # noqa: PLC0415

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
    return Cluster(load_inventory(find_inventory(explicit, environ)), home(environ))

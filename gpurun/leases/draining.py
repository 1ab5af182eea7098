"""Drained hosts: which gangs a pass asks to leave, and how a supervisor learns about a drain.

`gpurun.scheduler.explain` decides, and is pure. For each gang of its user that must move, a pass writes a request into
the job's folder, as for a preemption, and withdraws it when the drain ends. Supervisors read the cordons themselves,
and run a pass when one of their hosts is drained. So a drain needs no waiting process, and works for every user's
gangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from gpurun.errors import StateError
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.store import LiveJob
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import View, lease_hosts
from gpurun.scheduler.explain import Departure, Tenant, departures
from gpurun.scheduler.model import gang_of
from gpurun.state.hosts import Cordon, Cordons, cordons_on
from gpurun.state.paths import StatePath

LOOK_S = 1.0
AGAIN_S = 60.0
"""So often a supervisor on a draining host has it decided again: other hosts may have become free of their cordons."""

Load = Callable[[str], Inventory | None]


def departures_of(view: View, load: Load) -> tuple[Departure, ...]:
    """Return the fate of every gang on a draining host, whatever inventory it belongs to.

    Args:
        load: returns the inventory of a canonical path; None if it cannot be used.
    """
    if not any(cordon.state == "draining" for cordon in view.cordons.values()):
        return ()
    by_inventory: dict[str, list[tuple[Lease, dict[str, Cordon]]]] = {}
    for lease in view.leases:
        if drained := _drained(view, lease):
            by_inventory.setdefault(lease.inventory, []).append((lease, drained))
    found: list[Departure] = []
    for path, leases in by_inventory.items():
        inventory, tenants, until_s = load(path), [], dict[str, float | None]()
        for lease, drained in leases:
            job, hosts = view.jobs.get(lease.job), tuple(drained)
            if why := _unknown(lease, job, inventory):
                found.append(Departure(lease.job, hosts, "waits", why))
            elif job is not None:
                tenants.append(_tenant(lease, job, hosts))
                until_s.update({host: cordon.until_s for host, cordon in drained.items()})
        if inventory is not None:
            unusable = {*view.unusable(inventory), *until_s}
            found += departures(inventory, unusable, until_s, tenants, view.now_s)
    return tuple(found)


def _drained(view: View, lease: Lease) -> dict[str, Cordon]:
    """Return those hosts of a lease that are drained, with their drains."""
    return {host: cordon for host, cordon in view.cordons_of(lease).items() if cordon.state == "draining"}


def wanted_request(departure: Departure, view: View) -> CancelRequest | None:
    """Return the request that a pass makes because of a drain; None if none."""
    drained: dict[str, Cordon] = {}
    for lease in view.leases:
        if lease.job == departure.gang:
            drained.update(_drained(view, lease))
    said = "; ".join(_who_drains(host, drained[host]) for host in departure.hosts)
    if departure.fate == "moves":
        return CancelRequest("preempt", "drain", view.now_s, said, departure.hosts)
    if departure.fate == "ends":
        return CancelRequest("cancel", "drain", view.now_s, f"{said}; {departure.why}", departure.hosts)
    return None


def _who_drains(host: str, cordon: Cordon) -> str:
    return f"{cordon.by} drains {host}" + (f" ({cordon.reason})" if cordon.reason else "")


def is_drain_over(job: LiveJob, wanted: CancelRequest | None) -> bool:
    """Return whether the job has a drain's request that no drain needs any more, and that was not carried out yet."""
    asked = job.request
    if asked is None or not asked.drain or job.record.state in (State.STOPPING, State.QUEUED):
        return False
    return wanted is None or wanted.kind != asked.kind


def _unknown(lease: Lease, job: LiveJob | None, inventory: Inventory | None) -> str:
    """Return why gpurun can decide nothing about a lease; "" if it can."""
    if lease.lost:
        return "the job's GPUs are lost until a fence, the check that the job left nothing on its hosts, succeeds"
    if job is None or job.wants is None:
        return "the job's files are damaged"
    return "" if inventory is not None else "the job's inventory cannot be used"


def _tenant(lease: Lease, job: LiveJob, hosts: tuple[str, ...]) -> Tenant:
    assert job.wants is not None
    record, request = job.record, job.request
    return Tenant(
        gang_of(record, job.wants), lease.members, hosts, begun=record.reached == "containers",
        stopping=record.state is State.STOPPING or (request is not None and not request.drain),
    )  # fmt: skip


class DrainWatch:
    """Whether hosts of a gang are drained, as its supervisor sees it. Quick enough to call repeatedly.

    Args:
        lease: gives the gang's present lease.
    """

    def __init__(self, home: Path, lease: Callable[[], Lease]) -> None:
        self._home, self._lease = home, lease
        self._next_s = 0.0
        self._stamp: object = None
        self._cordons: Mapping[str, Cordon] = {}
        self._decided: object = None
        self._decide_next_s = 0.0

    def hosts(self, hosts: Iterable[str]) -> list[str]:
        """Return those of these hosts of the gang that are drained."""
        drained = self._drained()
        return [host for host in hosts if host in drained]

    def _drained(self) -> dict[str, Cordon]:
        self._look()
        if not self._cordons:
            return {}
        found = cordons_on(self._cordons, lease_hosts(self._lease()))
        return {host: cordon for host, cordon in found.items() if cordon.state == "draining"}

    def is_due(self, hosts: Collection[str], now_s: float, *, asked: bool = False) -> bool:
        """Return True if a pass should decide again: a drain is new, its deadline has come, or the last pass is long
        ago.

        Args:
            now_s: the head's clock, seconds since the epoch.
            asked: the job has a request of a drain. A new supervisor does not know whether it is still valid.
        """
        drained = {host: cordon for host, cordon in self._drained().items() if host in hosts}
        over = [host for host, cordon in drained.items() if cordon.until_s is not None and now_s >= cordon.until_s]
        seen, monotonic_s = (drained, over), time.monotonic()
        if self._decided is None and not asked and not drained:
            return False
        if seen == self._decided and (not drained or monotonic_s < self._decide_next_s):
            return False
        self._decided, self._decide_next_s = seen, monotonic_s + AGAIN_S
        return True

    def _look(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        with suppress(StateError):  # damaged: what was known stays; every pass reports it
            stamp = _stamp(Cordons(self._home).file()), _stamp(Cordons(self._home).deadlines_file())
            if stamp != self._stamp:
                self._cordons, self._stamp = Cordons(self._home).read(), stamp


def _stamp(path: StatePath) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size

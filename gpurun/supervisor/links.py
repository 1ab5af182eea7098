"""The supervisor's agents on the hosts of its gang. Reconnects when a connection is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from gpurun import faults
from gpurun.errors import BadInput, HostFailure, HostUnreachable, StateError, StateUnavailable
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import load_inventory
from gpurun.jobs.folder import JobFolder
from gpurun.leases.lease import Lease, as_granted
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.route import Contact, target_of
from gpurun.state import durable
from gpurun.state.paths import StatePath

T = TypeVar("T")
CONNECT_S = 1.5
"""How long a host of a running gang may take to accept a connection. To start its agent it may take longer.

TCP asks again after 1 s, then after 3 s. A new attempt every 2.5 s asks a host every 1 to 1.5 s: it can be out of reach
for 8 s and is heard before it counts as lost.
"""


class FirstAnswers:
    """Records which hosts have ever answered. Any thread may report.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_s: dict[str, float] = {}
        self._answered_s: dict[str, float] = {}

    def asks(self, host: str) -> None:
        """Record a try to connect to a host, perhaps not the first."""
        self._asked_s.setdefault(host, self._clock())

    def answered(self, host: str) -> None:
        """Record that a host has accepted or refused a connection."""
        self._answered_s.setdefault(host, self._clock())

    @property
    def mute_since(self) -> Mapping[str, float]:
        """Return hosts that have never answered, and since when they are asked.

        The time starts with the first answer of any host, because before that the head may have been cut off.
        """
        answered_s = self._answered_s.copy()
        if not answered_s:
            return {}
        first_s = min(answered_s.values())
        return {host: max(at_s, first_s) for host, at_s in self._asked_s.copy().items() if host not in answered_s}


class Links:
    """Agents by host. Thread-safe: watchers of different hosts reconnect on their own."""

    def __init__(self, inventory: Inventory, hosts: Iterable[str]) -> None:
        self.targets = {name: target_of(inventory.by_name[name], inventory) for name in hosts}
        self.epilogs = {name: inventory.by_name[name].epilog for name in self.targets}
        self.fleet = Fleet({}, {})
        self._begun_s = time.monotonic()
        self._answers = FirstAnswers(time.monotonic)
        self._lock = threading.Lock()

    def add(self, hosts: Iterable[str], inventory: Inventory) -> None:
        """Allow connections to more hosts."""
        more = [inventory.by_name[name] for name in hosts]
        self.targets = {**self.targets, **{host.name: target_of(host, inventory) for host in more}}
        self.epilogs = {**self.epilogs, **{host.name: host.epilog for host in more}}

    def drop(self, hosts: Collection[str]) -> None:
        """Forget hosts."""
        self.targets = {name: target for name, target in self.targets.items() if name not in hosts}

    def open(
        self, hosts: Iterable[str] | None = None, *, timeout_s: float = 15.0, connect_s: float = math.inf
    ) -> Mapping[str, HostFailure]:
        """Connect to every host without a live agent; return the failures by host.

        Args:
            timeout_s: for one host, until its agent runs.
            connect_s: for one host, until it accepts a connection.
        """
        wanted = [name for name in (self.targets if hosts is None else hosts) if not self.is_open(name)]
        if not wanted:
            return {}
        faults.point()
        contact = Contact(connect_s, asks=self._answers.asks, answered=self._answers.answered)
        opened = Fleet.open([self.targets[name] for name in wanted], timeout_s=timeout_s, contact=contact)
        failures = dict(opened.failures)
        with self._lock:
            self.fleet.absorb(opened)
        return failures

    def is_open(self, host: str) -> bool:
        """Return True while the host's agent is known to answer."""
        agent = self.fleet.agents.get(host)
        return agent is not None and agent.alive

    def agent(self, host: str) -> Agent:
        """Return the host's agent. Raises HostUnreachable if there is none."""
        agent = self.fleet.agents.get(host)
        if agent is None:
            raise HostUnreachable("there is no connection to the host", host=host)
        return agent

    def silent_s(self, host: str) -> float:
        """Return seconds since the host's agent was last heard; since this object began, if never."""
        agent = self.fleet.agents.get(host)
        return time.monotonic() - (self._begun_s if agent is None else agent.last_heard_s)

    @property
    def mute_since(self) -> Mapping[str, float]:
        """Return hosts that have never answered, and since when they are asked, on the monotonic clock."""
        return self._answers.mute_since

    def each(self, call: Callable[[Agent], T], hosts: Iterable[str] | None = None) -> Results[T]:
        """Call `call` on the agents of `hosts` (all if None), concurrently."""
        faults.point()
        results = self.fleet.map(call, self.targets if hosts is None else hosts)
        faults.point()
        return results

    def cut(self, hosts: Iterable[str], why: str) -> None:
        """Close the agents of hosts, so that every wait for one fails immediately. `open` may open new ones."""
        agents = self.fleet.agents
        for host in hosts:
            if host in agents:
                agents[host].die(HostUnreachable(why, host=host))

    def close(self) -> None:
        """Close every connection. Processes on the hosts continue."""
        self.fleet.close()


# The gang's hosts, as the inventory last described them while it was valid.


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
        inventory = load_inventory(Path(lease.inventory))
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
    return as_granted(load_inventory(Path(lease.inventory)), lease)


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

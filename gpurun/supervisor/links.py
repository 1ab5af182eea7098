"""The supervisor's agents on the hosts of its gang, opened again when they are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from gpurun import faults
from gpurun.errors import HostFailure, HostUnreachable
from gpurun.inventory.model import Host, Inventory
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.target import Target

T = TypeVar("T")


def target_of(host: Host, inventory: Inventory) -> Target:
    """How to reach an inventory's host."""
    return Target(name=host.name, address=host.address, port=host.port, user=host.user, ssh_config=inventory.ssh_config)


class Links:
    """Agents by host. Thread-safe: watchers of different hosts reconnect on their own."""

    def __init__(self, inventory: Inventory, hosts: Iterable[str]) -> None:
        self.targets = {name: target_of(inventory.by_name[name], inventory) for name in hosts}
        self.fleet = Fleet({}, {})
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, hosts: Iterable[str], inventory: Inventory) -> None:
        """Let more hosts be reached."""
        self.targets = {**self.targets, **{name: target_of(inventory.by_name[name], inventory) for name in hosts}}

    def drop(self, hosts: Collection[str]) -> None:
        """Forget hosts."""
        self.targets = {name: target for name, target in self.targets.items() if name not in hosts}

    def open(self, hosts: Iterable[str] | None = None, *, timeout_s: float = 15.0) -> Mapping[str, HostFailure]:
        """Connect to every host that has no live agent; the failures, by host."""
        wanted = [name for name in (self.targets if hosts is None else hosts) if not self.is_open(name)]
        if not wanted:
            return {}
        faults.point()
        opened = Fleet.open([self.targets[name] for name in wanted], timeout_s=timeout_s)
        failures = dict(opened.failures)
        with self._lock:
            self.fleet.absorb(opened)
        return failures

    def is_open(self, host: str) -> bool:
        """True while the host's agent answers, as far as is known."""
        agent = self.fleet.agents.get(host)
        return agent is not None and agent.alive

    def agent(self, host: str) -> Agent:
        """The host's agent. Raises HostUnreachable if there is none."""
        agent = self.fleet.agents.get(host)
        if agent is None:
            raise HostUnreachable("there is no connection to it", host=host)
        return agent

    def silent_s(self, host: str) -> float:
        """Seconds since the host's agent was last heard of; since these links began, if there never was one."""
        agent = self.fleet.agents.get(host)
        return time.monotonic() - (self._begun_s if agent is None else agent.last_heard_s)

    def each(self, call: Callable[[Agent], T], hosts: Iterable[str] | None = None) -> Results[T]:
        """`call` on the agents of `hosts` (all if None), concurrently."""
        faults.point()
        results = self.fleet.map(call, self.targets if hosts is None else hosts)
        faults.point()
        return results

    def cut(self, hosts: Iterable[str], why: str) -> None:
        """Give up the agents of hosts: what waits for one fails at once. `open` may open others."""
        agents = self.fleet.agents
        for host in hosts:
            if host in agents:
                agents[host].die(HostUnreachable(why, host=host))

    def close(self) -> None:
        """Close every connection; what runs on the hosts goes on."""
        self.fleet.close()

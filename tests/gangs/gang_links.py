"""How a simulated supervisor reaches hosts: connections that break, that are silent, and that are opened again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gang_agents import AgentOf

from gpurun.errors import GpurunError, HostFailure, HostUnreachable
from gpurun.remote.fleet import Results
from gpurun.supervisor.links import FirstAnswers

if TYPE_CHECKING:
    from gang_head import Head

CALL_S = 0.05
STEP_S = 0.2
SYN_S = (1.0, 3.0, 7.0)
"""When a kernel asks again for a connection that nobody answers (Linux, tcp(7): doubled from 1 s)."""


class Link:
    """A connection as one supervisor has it."""

    def __init__(self, heard_s: float) -> None:
        self.state = "none"
        self.epoch = 0
        self.heard_s = heard_s
        self.next_s = 0.0
        self.waiting: list[tuple[float, str, object]] = []


class Links:
    """Stands for `gpurun.supervisor.links.Links`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._links: dict[str, Link] = {}
        self.epilogs: dict[str, tuple[str, ...]] = {}
        self.answers = FirstAnswers(lambda: head.world.now_s)
        self.epilogs: Mapping[str, tuple[str, ...]] = {}

    def of(self, host: str) -> Link:
        if host not in self._links:
            self._links[host] = Link(self._head.began_s)
        return self._links[host]

    def is_open(self, host: str) -> bool:
        return self.of(host).state in ("up", "silent")

    def silent_s(self, host: str) -> float:
        link = self.of(host)
        return 0.0 if link.state == "up" else self._head.world.now_s - link.heard_s

    @property
    def mute_since(self) -> Mapping[str, float]:
        return self.answers.mute_since

    def accepts(self, host: str) -> None:
        """The kernel of a host that is asked for a connection accepts it."""
        self.answers.answered(host)

    def open(
        self, hosts: Iterable[str] | None = None, *, timeout_s: float = 15.0, connect_s: float = math.inf
    ) -> Mapping[str, HostFailure]:
        """A host that is slow accepts the connection at once, and its agent starts later."""
        world, begun_s, at_s = self._head.world, self._head.world.now_s, 0.0
        wanted = [host for host in (self._head.hosts if hosts is None else hosts) if not self.is_open(host)]
        ready_s: dict[str, float] = {}
        for host in wanted:
            self.answers.asks(host)
        asked_s = [syn_s for syn_s in (STEP_S, *SYN_S) if syn_s < min(timeout_s, connect_s)]
        while at_s < timeout_s:
            left = [host for host in wanted if not self.is_open(host)]
            if not any(host in ready_s or at_s < connect_s for host in left):
                break
            at_s = min(round(at_s + STEP_S, 1), timeout_s)
            world.advance(begun_s + at_s)
            for host in (host for host in left if world.hosts[host].is_reachable):
                if at_s in asked_s and host not in ready_s:
                    self.accepts(host)
                    ready_s[host] = at_s + world.hosts[host].slow_s
                if at_s >= ready_s.get(host, math.inf):
                    self._head.connected(host)
        return {host: HostUnreachable("no route", host=host) for host in wanted if not self.is_open(host)}

    def agent(self, host: str) -> AgentOf:
        return AgentOf(self._head.world, self._head.world.hosts[host])

    def each(self, call: Callable[[Any], Any], hosts: Iterable[str] | None = None) -> Results[Any]:
        """Calls are quick, but on hosts that are silent: these take until that is noticed."""
        world, ok = self._head.world, {}
        failed: dict[str, GpurunError] = {}
        world.sleep(CALL_S)
        asked = list(self._head.hosts if hosts is None else hosts)
        while any(self.of(host).state == "silent" for host in asked):
            world.sleep(0.2)
        for host in asked:
            if not self.is_open(host) or not world.hosts[host].is_reachable:
                failed[host] = HostUnreachable("the session was lost", host=host)
            else:
                try:
                    ok[host] = call(self.agent(host))
                except GpurunError as error:
                    failed[host] = error
        return Results(ok, failed)

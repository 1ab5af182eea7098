"""Agents on many hosts: opened and called in parallel, with each host's failure as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

from gpurun.errors import GpurunError, HostFailure, HostUnreachable
from gpurun.remote.agent import DEAD_AFTER_S, PING_AFTER_S, Agent
from gpurun.remote.route import Contact, Target

T = TypeVar("T")
ANY_TIME = Contact()


@dataclass(frozen=True)
class Results(Generic[T]):
    """The answers and the failures of hosts, both in the order of the request."""

    ok: Mapping[str, T]
    failed: Mapping[str, GpurunError]

    def raise_first(self) -> Mapping[str, T]:
        """Return all answers, or raise the error of the first failed host."""
        for error in self.failed.values():
            raise error
        return self.ok


class Fleet:
    """Agents on many hosts. A context manager: its exit closes all agents.

    Attributes:
        agents: the agents of the hosts that answered.
        failures: the typed errors of the other hosts.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        failures: Mapping[str, HostFailure],
        *,
        limit: int = 64,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self.agents = dict(agents)
        self.failures = dict(failures)
        self._limit = limit
        self._dead_after_s = dead_after_s
        self._closed = Event()
        self._heartbeat: Thread | None = None
        self._watch_agents()

    @classmethod
    def open(
        cls, targets: Iterable[Target], *, limit: int = 64, timeout_s: float = 15.0,
        dead_after_s: float = DEAD_AFTER_S, contact: Contact = ANY_TIME,
    ) -> Fleet:  # fmt: skip
        """Open an agent on every target, at most `limit` at a time.

        Never raises for one host. A host that does not answer costs `timeout_s` once and delays no other host. So the
        whole call takes at most ``ceil(dead hosts / limit) * timeout_s`` longer than the hosts that answer need.

        Args:
            timeout_s: for one host, from its first packet to its running agent.
            dead_after_s: seconds of silence after which gpurun considers a host dead (all its calls raise
                HostUnreachable).
            contact: how long a host may take to accept a connection, and the callbacks that record the result.
        """
        from gpurun.remote.opening import open_agents  # noqa: PLC0415 - imports Paramiko only to connect to hosts

        agents, failures = open_agents(
            list(targets), limit=limit, timeout_s=timeout_s, ping_after_s=min(PING_AFTER_S, dead_after_s / 3),
            contact=contact,
        )  # fmt: skip
        return cls(agents, failures, limit=limit, dead_after_s=dead_after_s)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def map(self, fn: Callable[[Agent], T], hosts: Iterable[str] | None = None) -> Results[T]:
        """Run `fn` with each host's agent in parallel, at most `limit` at a time.

        A `GpurunError` of `fn` is that host's result, and so is the failure of a host without a session. Any other
        exception is a fault in `fn`: `map` raises it after all hosts have finished. If no thread can start, it raises
        Python's RuntimeError and has called no host.

        Args:
            hosts: the hosts to call; None = all, including hosts without a session.
        """
        names = [*self.agents, *self.failures] if hosts is None else list(hosts)
        outcomes: dict[str, Any] = {}
        waiting: SimpleQueue[str] = SimpleQueue()
        for name in names:
            if name in self.agents:
                waiting.put(name)
            else:
                missing = self.failures.get(name) or HostUnreachable(
                    "gpurun has opened no session to the host", host=name
                )
                outcomes[name] = _Raised(missing)

        def work() -> None:
            while True:
                try:
                    name = waiting.get_nowait()
                except Empty:
                    return
                try:
                    outcomes[name] = fn(self.agents[name])
                except BaseException as error:  # noqa: BLE001 - sorted below
                    outcomes[name] = _Raised(error)

        for thread in _started(work, min(self._limit, waiting.qsize())):
            thread.join()
        return _sorted_out(names, outcomes)

    def absorb(self, other: Fleet) -> None:
        """Take over the agents of another fleet, which were opened again or later. `other` is not usable afterwards."""
        other._closed.set()
        for name in self.agents.keys() & other.agents.keys():
            self.agents[name].close()
        self.agents = {**self.agents, **other.agents}
        self.failures = {**self.failures, **other.failures}
        for name in other.agents:
            self.failures.pop(name, None)
        self._watch_agents()

    def close(self) -> None:
        """Close every agent and connection. Idempotent."""
        self._closed.set()
        for agent in self.agents.values():
            agent.close()

    def _watch_agents(self) -> None:
        if self.agents and self._heartbeat is None:
            self._heartbeat = Thread(target=self._watch, name="fleet heartbeat", daemon=True)
            self._heartbeat.start()

    def _watch(self) -> None:
        """Detect hosts that have become silent. Only compares times: it never waits for a host."""
        tick = max(0.1, min(1.0, self._dead_after_s / 4))
        previous = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            stopped = now - previous > 3 * tick  # this process itself was stopped, so the silence proves nothing
            previous = now
            for agent in self.agents.values():
                if stopped:
                    agent.last_heard_s = now
                elif agent.alive and now - agent.last_heard_s > self._dead_after_s:
                    silence = now - agent.last_heard_s
                    agent.die(HostUnreachable(f"the host sent nothing for {silence:.0f} s", host=agent.host))


@dataclass(frozen=True)
class _Raised:
    error: BaseException


def _started(work: Callable[[], None], most: int) -> Sequence[Thread]:
    """Start so many threads that share the work, or fewer if this machine is short of threads. Raises RuntimeError if
    none starts.
    """
    threads: list[Thread] = []
    for _ in range(most):
        thread = Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not threads:
                raise
            break
        threads.append(thread)
    return threads


def _sorted_out(names: list[str], outcomes: Mapping[str, Any]) -> Results[Any]:
    ok: dict[str, Any] = {}
    failed: dict[str, GpurunError] = {}
    for name in names:
        outcome = outcomes[name]
        if not isinstance(outcome, _Raised):
            ok[name] = outcome
        elif isinstance(outcome.error, GpurunError):
            failed[name] = outcome.error
        else:
            raise outcome.error
    return Results(ok, failed)

"""Watch a running gang's containers: one thread for each host waits for its container's end.

If a host's connection breaks, its watcher connects again; the gang continues meanwhile. This module decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from gpurun.errors import OUTLIVED, GpurunError, HostFailure
from gpurun.launch.docker import container_name
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.gang_seen import ContainerEnd
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import CONNECT_S

RECONNECT_S = 1.0
ENGINE_BACK_S = 15.0
"""How long an engine that is out may take to come back and say how a container ended."""


class Watchers:
    """What the watchers have seen; they write it, the main loop reads it. Times on the monotonic clock."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._changed: SimpleQueue[str] = SimpleQueue()
        self._exits: dict[str, ContainerEnd] = {}
        self._down_since: dict[str, float] = {}
        self._engine_out_since: dict[str, float] = {}
        self.engine_out_s: dict[str, float] = {}
        """When a host's Docker was last seen not to answer."""

    @property
    def exits(self) -> Mapping[str, ContainerEnd]:
        """Return containers that have ended, by host."""
        return self._exits.copy()

    @property
    def down_since(self) -> Mapping[str, float]:
        """Return unreachable hosts, and since when they were not heard."""
        return self._down_since.copy()

    def watch(self, hosts: Sequence[str]) -> None:
        """Begin to watch hosts."""
        for host in hosts:
            threading.Thread(target=self._until_exit, args=(host,), name=f"exit {host}", daemon=True).start()

    def forget(self, hosts: Collection[str]) -> None:
        """Forget what was seen on hosts that have left, because it does not count if they come back."""
        for host in hosts:
            self._exits.pop(host, None)
            self._down_since.pop(host, None)

    def wait(self, most_s: float) -> None:
        """Wait until a watcher has news."""
        with suppress(Empty):
            self._changed.get(timeout=most_s)

    def _until_exit(self, host: str) -> None:
        """Wait for the host's container to end, even across lost connections and stopped engines."""
        found = None
        while found is None and not self._is_over(host):
            try:
                found = self._container_exit(host)
            except RemoteOpFailed as error:
                found = self._without_engine(host, error)
            except HostFailure as error:
                self._lost(host, error)
            except OUTLIVED:  # the head's own: nobody else would see the container's end
                self._stop.wait(RECONNECT_S)
        if found is not None and host in self._job.members:
            self._exits[host] = found
        self._changed.put(host)

    def _container_exit(self, host: str) -> ContainerEnd:
        """Wait for the end of the host's container.

        Raises:
            HostFailure: the host or its engine does not answer.
        """
        job = self._job
        agent, container = job.links.agent(host), container_name(job.lease.job, job.lease.attempt)
        code = None
        try:
            for reply in agent.stream("docker.wait", container=container):
                code = (reply.value or {}).get("code")
        except RemoteOpFailed as error:
            if error.kind != "not-found":
                raise
        try:
            states = agent.call("gang.inspect", job=job.lease.job).value
        except RemoteOpFailed as error:
            if code is None:
                raise
            # An engine that is stopped ends its containers first.
            return ContainerEnd(time.monotonic(), code, engine_out=error.message)
        mine = next((state for state in states if state["name"] == container), None)
        if mine is None:
            return ContainerEnd(time.monotonic(), code, is_removed=True)
        return ContainerEnd(
            time.monotonic(),
            code,
            is_oom=bool(mine["oom"]),
            ended_ago_s=mine["ended_ago_s"],
            memory_bytes=mine.get("memory_bytes"),
            unwritable=mine.get("unwritable", ""),
        )

    def _is_over(self, host: str) -> bool:
        """Return whether a host need not be watched any more."""
        return self._stop.is_set() or host not in self._job.members

    def _without_engine(self, host: str, error: RemoteOpFailed) -> ContainerEnd | None:
        """Handle a host that answers while its Docker does not: report it once, and wait a moment.

        Returns:
            The end of the container, if it has ended and no engine comes back to say how. With live-restore an engine
            comes back, or the container continues.
        """
        before, now = self.engine_out_s.get(host), time.monotonic()
        self.engine_out_s[host] = now
        if before is None or now - before > 5 * RECONNECT_S:
            self._engine_out_since[host] = now
            if not self._is_over(host):
                self._job.events.emit("host", host=host, state="Docker does not answer", reason=error.message)
        self._stop.wait(RECONNECT_S)
        if now - self._engine_out_since[host] < ENGINE_BACK_S:
            return None
        with suppress(HostFailure):
            if self._job.links.agent(host).call("gang.has_ended", job=self._job.lease.job).value:
                return ContainerEnd(time.monotonic(), engine_out=error.message)
        return None

    def _lost(self, host: str, error: GpurunError) -> None:
        """Remember since when the host is unreachable, and try to reconnect."""
        job = self._job
        if host not in self._down_since and not self._is_over(host):
            self._down_since[host] = time.monotonic() - job.links.silent_s(host)
            job.events.emit("host", host=host, state="unreachable", reason=error.message)
        while not self._is_over(host):
            with suppress(*OUTLIVED):  # the head has no descriptor, or no thread, for a moment
                if not job.links.open([host], connect_s=CONNECT_S):
                    if self._down_since.pop(host, None) is not None:
                        job.events.emit("host", host=host, state="reachable")
                    return
            self._stop.wait(RECONNECT_S)

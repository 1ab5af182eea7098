"""Sample the use of every GPU, over one agent per host that stays open."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from gpurun.errors import GpurunError
from gpurun.facts.samples import HostSample, sample_from_document
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet


class Watch:
    """The latest samples of many hosts. A context manager; leaving it stops sampling on the hosts."""

    def __init__(self, fleet: Fleet, hosts: Iterable[str], interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._latest: dict[str, HostSample] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.changed = threading.Event()
        for host in hosts:
            agent = fleet.agents.get(host)
            if agent is None:
                failure = fleet.failures.get(host)
                self._put(host, HostSample(problem=failure.message if failure else "no connection"))
                continue
            threading.Thread(target=self._follow, args=(agent,), name=f"watch {host}", daemon=True).start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> Mapping[str, HostSample]:
        """Return the newest sample of each host that has sent one."""
        with self._lock:
            return dict(self._latest)

    def close(self) -> None:
        """Stop sampling. Each host's stream ends with its next sample. Idempotent."""
        self._closed.set()

    def _put(self, host: str, sample: HostSample) -> None:
        with self._lock:
            self._latest[host] = sample
        self.changed.set()

    def _follow(self, agent: Agent) -> None:
        try:
            stream = agent.stream("probe.sample", interval_s=self._interval_s)
            try:
                for reply in stream:
                    if self._closed.is_set():
                        return
                    if reply.value is not None:
                        sample = sample_from_document(agent.host, reply.value, time.monotonic())
                        self._put(agent.host, sample)
            finally:
                with suppress(AttributeError):
                    stream.close()
        except GpurunError as error:
            self._put(agent.host, HostSample(problem=error.message, heard_s=time.monotonic()))

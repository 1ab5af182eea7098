"""Sample all hosts with leased GPUs, over one agent per host that stays open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from gpurun.doctor.watch import Watch
from gpurun.facts.samples import HostSample
from gpurun.remote.fleet import Fleet

INTERVAL_S = 5.0
AGAIN_S = 60.0
"""Time before another attempt to reach a host that did not answer."""
TICK_S = 1.0

Open = Callable[[Iterable[str]], Fleet]


class Sampling:
    """A background thread opens hosts that get leases, closes hosts that lose theirs, and keeps the latest samples.

    A host that does not answer has a sample with a problem, and delays no other host: the thread opens hosts in
    parallel, outside the caller's thread. A refresh opens no connection.

    Args:
        open_fleet: opens agents on hosts, by name.
        wanted: the hosts to sample now.
    """

    def __init__(self, open_fleet: Open, wanted: Callable[[], Iterable[str]], interval_s: float = INTERVAL_S) -> None:
        self._open, self._wanted, self._interval_s = open_fleet, wanted, interval_s
        self._fleet = Fleet({}, {})
        self._watches: dict[str, Watch] = {}
        self._asked_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top sampling", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def latest(self) -> Mapping[str, HostSample]:
        """Return the newest sample of each host; a host that is still opening has none."""
        with self._lock:
            watches = list(self._watches.values())
        return {host: sample for watch in watches for host, sample in watch.latest().items()}

    def close(self) -> None:
        """End sampling and close every agent. Idempotent."""
        self._closed.set()
        with self._lock:
            for watch in self._watches.values():
                watch.close()
        self._fleet.close()

    def look(self) -> None:
        """Open new hosts and hosts that failed a while ago; close hosts that are no longer wanted."""
        wanted, now_s = list(self._wanted()), time.monotonic()
        failed = {host for host, sample in self.latest().items() if sample.problem}
        due = [
            host for host in wanted
            if host not in self._watches or (host in failed and now_s - self._asked_s[host] > AGAIN_S)
        ]  # fmt: skip
        if due:
            self._asked_s.update(dict.fromkeys(due, now_s))
            opened = self._open(due)
            if self._closed.is_set():
                opened.close()
                return
            self._fleet.absorb(opened)
        with self._lock:
            for host in due:
                self._watches[host] = Watch(self._fleet, [host], self._interval_s)
            for host in self._watches.keys() - set(wanted):
                self._watches.pop(host).close()

    def _run(self) -> None:
        while not self._closed.wait(TICK_S):
            self.look()

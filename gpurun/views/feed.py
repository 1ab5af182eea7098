"""Read the state directory repeatedly in the background, and combine it with the hosts' samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from gpurun.doctor.survey import Watch
from gpurun.documents.plain import printed
from gpurun.errors import OUTLIVED, GpurunError, words_of
from gpurun.facts import HostSample
from gpurun.jobs.store import JobStore
from gpurun.leases.look import Cluster
from gpurun.remote.fleet import Fleet
from gpurun.remote.route import target_of
from gpurun.supervisor.lines import last_lines
from gpurun.views.picture import Picture, WaitingJob
from gpurun.views.reading import read_cluster
from gpurun.views.rows import Moment, leased_hosts
from gpurun.views.waiting import look_ahead, reasons_of, waiting_jobs

# Sample all hosts with leased GPUs, over one agent per host that stays open.


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


READ_EVERY_S = 4.0
DECIDE_EVERY_S = 15.0
COST_SHARE = 0.005
"""The share of one core for reading: if a read costs more, the reads become rarer."""
LOG_LINES = 300
EMPTY = Moment(Picture((), (), {}), (), {}, ())


class Feed:
    """The latest moment. A context manager; its exit ends all threads and closes all connections.

    Args:
        open_cluster: reads the inventory again, because users change it.
    """

    def __init__(self, store: JobStore, open_cluster: Callable[[], Cluster]) -> None:
        self._store, self._open_cluster = store, open_cluster
        self._cluster: Cluster | None = None
        self._read: tuple[Picture, tuple[str, ...]] = EMPTY.picture, ()
        self._queue: tuple[WaitingJob, ...] = ()
        self._queue_problem = ""
        self._decide_s = 0.0
        self._closed = threading.Event()
        self._hurry = threading.Event()
        self.sampling = Sampling(self._open_fleet, lambda: leased_hosts(self._read[0]))

    def __enter__(self) -> Feed:
        self.refresh()
        threading.Thread(target=self._run, name="top feed", daemon=True).start()
        self.sampling.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._hurry.set()
        self.sampling.close()

    def latest(self) -> Moment:
        """Return the present state."""
        picture, problems = self._read
        return Moment(picture, self._queue, self.sampling.latest(), problems)

    def hurry(self) -> None:
        """Read again immediately, after a change by the user."""
        self._decide_s = 0.0
        self._hurry.set()

    def log(self, job: str) -> list[str]:
        """Return the last lines of a job's log, printable on a terminal."""
        try:
            lines = last_lines(self._store.get(job).log, LOG_LINES)
        except GpurunError as error:
            return [str(error)]
        return [f"{logged.who} {printed(logged.line.text)}" for logged in lines]

    def log_stamp(self, job: str) -> object:
        """Return a value that changes when the job's log changes."""
        try:
            found = self._store.get(job).log.stat()
        except (OSError, GpurunError):
            return None
        return found.st_size, found.st_mtime_ns

    def refresh(self) -> None:
        """Read the state directory once. Damage becomes a message in the moment, and the last picture stays."""
        try:
            self._cluster = self._open_cluster()
            if time.monotonic() >= self._decide_s:
                self._decide()
            reading = read_cluster(self._cluster, self._store, reasons=reasons_of(self._queue))
        except OUTLIVED as error:
            self._read = self._read[0], (words_of(error),)
            return
        problems = [str(each) for each in reading.problems] + ([self._queue_problem] if self._queue_problem else [])
        self._read = reading.picture, tuple(dict.fromkeys(problems))

    def _decide(self) -> None:
        began_s = time.thread_time()
        try:
            self._queue = tuple(waiting_jobs(look_ahead(self._store.home), self._store.live_records()))
            self._queue_problem = ""
        except GpurunError as error:
            self._queue, self._queue_problem = (), str(error)
        self._decide_s = time.monotonic() + max(DECIDE_EVERY_S, (time.thread_time() - began_s) / COST_SHARE)

    def _run(self) -> None:
        pause_s = READ_EVERY_S
        while not self._closed.is_set():
            self._hurry.wait(pause_s)
            self._hurry.clear()
            began_s = time.thread_time()
            self.refresh()
            pause_s = max(READ_EVERY_S, (time.thread_time() - began_s) / COST_SHARE)

    def _open_fleet(self, hosts: Iterable[str]) -> Fleet:
        cluster = self._cluster
        if cluster is None:
            return Fleet({}, {})
        known = [cluster.inventory.by_name[host] for host in hosts if host in cluster.inventory.by_name]
        return Fleet.open([target_of(host, cluster.inventory) for host in known])

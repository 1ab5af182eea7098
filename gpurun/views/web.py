"""The cluster in a browser, read-only: `page` writes HTML; this module answers those whom `loopback` lets in."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpurun.documents.plain import printed
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.history.report import accounts, body
from gpurun.history.store import JobHistory, Wanted
from gpurun.inventory.folding import fold
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import ID_PATTERN
from gpurun.jobs.store import JobStore
from gpurun.leases.look import Cluster
from gpurun.markup import Markup
from gpurun.quantities import count
from gpurun.scheduler.explain import expected_in
from gpurun.state import clock
from gpurun.supervisor.lines import LogTail, last_lines
from gpurun.views.lines import Curves
from gpurun.views.loopback import Environ, Remade, StartResponse, say
from gpurun.views.page import cluster_body, job_body, problem_body, report_body, whole_page
from gpurun.views.picture import WaitingJob, shown_for_s
from gpurun.views.reading import Reading, read_cluster, with_trouble
from gpurun.views.waiting import look_ahead, reasons_of, waiting_jobs

# Answers requests for pages from what the state directory says. Reads; changes nothing.


LOG_LINES = 500
READ_EVERY_S, DECIDE_EVERY_S, COUNT_EVERY_S = 2.0, 10.0, 60.0
REPORT_S = 30 * 86400.0
MOST_CURVES = 64
"""Jobs whose curves are kept in memory."""


@dataclass
class _Metrics:
    """A job's reports, read as they come."""

    tail: LogTail
    curves: Curves = field(default_factory=Curves)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drawn(self) -> list[Markup]:
        with self.lock:
            for report in self.tail.new_reports():
                self.curves.add(report.rank, report.step, report.metrics)
            return self.curves.drawn()


class Pages:
    """The application behind the door.

    Args:
        open_cluster: reads the inventory anew, because people change it.
        duration: seconds in words.
    """

    def __init__(self, store: JobStore, open_cluster: Callable[[], Cluster], duration: Callable[[float], str]) -> None:
        self._store, self._open_cluster, self._duration = store, open_cluster, duration
        self._queue = Remade(self._decide, DECIDE_EVERY_S)
        self._reading = Remade(self._read, READ_EVERY_S)
        self._report = Remade(self._count, COUNT_EVERY_S)
        self._metrics: dict[str, _Metrics] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            return say(start, "405 Method Not Allowed", "gpurun: these pages are read-only.\n")
        path = str(environ.get("PATH_INFO", "/"))
        nonce = secrets.token_urlsafe(16)
        try:
            page = self._page(path, nonce)
        except (GpurunError, OSError) as error:
            hint = error.hint if isinstance(error, GpurunError) else None
            page = whole_page("gpurun", problem_body(str(error), hint), nonce)
            return self._send(start, "500 Internal Server Error", page, nonce)
        if page is None:
            return say(start, "404 Not Found", "gpurun: there is no such page.\n")
        return self._send(start, "200 OK", page, nonce)

    def _send(self, start: StartResponse, status: str, page: str, nonce: str) -> Iterable[bytes]:
        return say(start, status, page, kind="text/html; charset=utf-8", style=f"'nonce-{nonce}'")

    def _page(self, path: str, nonce: str) -> str | None:
        if path == "/":
            return whole_page("gpurun", self._cluster(), nonce)
        if path == "/report":
            return whole_page("gpurun: use of GPUs", self._report.get(), nonce, refresh_s=None)
        name = path.removeprefix("/job/")
        if name == path or not ID_PATTERN.fullmatch(name):
            return None
        try:
            folder = self._store.find(name)
        except BadInput:
            return None
        return self._job(folder, nonce)

    def _cluster(self) -> Markup:
        queue, decision_problem = self._queue.get()
        reading = self._reading.get()
        problems = [str(problem) for problem in reading.problems] + ([decision_problem] if decision_problem else [])
        now_s = clock.now_s()
        return cluster_body(
            reading.picture, queue, dict.fromkeys(problems), fold, self._duration, lambda at_s: expected_in(at_s, now_s)
        )

    def _count(self) -> Markup:
        """Who used what in the last 30 days."""
        problems: list[StateError] = []
        now_s = clock.now_s()
        with JobHistory(self._store.home).sources(problems.append, now_s=now_s) as found:
            capacity = self._open_cluster().inventory.total_gpus
            made = accounts(found, Wanted(since_s=now_s - REPORT_S), now_s=now_s, capacity=capacity)
        return report_body(body(made), map(str, problems))

    def _job(self, folder: JobFolder, nonce: str) -> str:
        record = with_trouble(self._store, folder.record())
        now_s = record.ended_s or clock.now_s()
        hosts = ", ".join(f"{grant.host}:{','.join(map(str, grant.gpus))}" for grant in record.granted)
        failure = record.first_failure
        waits = reasons_of(self._queue.get()[0]).get(record.id, "")
        facts = [
            ("state", record.state.value), ("because", "; ".join(filter(None, (record.story(now_s), waits)))),
            ("owner", record.owner), ("GPUs", str(record.gpus)), ("hosts", hosts or "none"),
            ("ran" if record.started_s else "waited", self._duration(shown_for_s(record, now_s))),
            ("attempt", str(record.attempt)), ("exit code", "" if record.exit_code is None else str(record.exit_code)),
            ("evidence", failure.evidence if failure else ""),
        ]  # fmt: skip
        lines = last_lines(folder.log, LOG_LINES)
        shown = (
            f"the last {count(len(lines), 'line')}; `gpurun logs {record.id}` prints all"
            if lines
            else "nothing printed yet"
        )
        log = (f"{logged.who} {printed(logged.line.text)}" for logged in lines)
        shown_job = job_body(f"{record.id} {record.name}", facts, self._drawn(folder), log, shown)
        return whole_page(f"{record.id} {record.name}", shown_job, nonce, refresh_s=None if record.state.ended else 10)

    def _drawn(self, folder: JobFolder) -> list[Markup]:
        with self._lock:
            while folder.id not in self._metrics and len(self._metrics) >= MOST_CURVES:
                self._metrics.pop(next(iter(self._metrics)))
            metrics = self._metrics.setdefault(folder.id, _Metrics(LogTail(folder.log)))
        return metrics.drawn()

    def _read(self) -> Reading:
        return read_cluster(self._open_cluster(), self._store, reasons=reasons_of(self._queue.get()[0]))

    def _decide(self) -> tuple[list[WaitingJob], str]:
        """The queue, or why nothing is decided."""
        try:
            return waiting_jobs(look_ahead(self._store.home), self._store.live_records()), ""
        except StateError as error:
            return [], str(error)

"""A job as a future (`concurrent.futures`): it outlives the process that waits for it, and can be found again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gpurun.api.results import NoResult, answer_of
from gpurun.documents.plain import printable, printed
from gpurun.errors import GpurunError, JobFailed
from gpurun.head import requests
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.states import State
from gpurun.state.people import myself
from gpurun.supervisor.loglines import LogTail

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord

POLL_S = 0.25


class Job(Future[Any]):
    """A job of this user. `result` waits for its end; a process that ends while it waits ends no job.

    Attributes:
        id: as `gpurun status` shows it.
    """

    def __init__(self, folder: JobFolder, *, returns: bool) -> None:
        super().__init__()
        self.id = folder.id
        self._folder = folder
        self._returns = returns
        _WATCHER.watch(self)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state}>"

    @property
    def state(self) -> str:
        """Such as ``QUEUED``, ``RUNNING``, ``SUCCEEDED``."""
        return self._folder.record().state.value

    def running(self) -> bool:
        """Whether it has GPUs and has not ended."""
        record = self._folder.record()
        return not record.state.ended and record.state is not State.QUEUED

    def cancel(self) -> bool:
        """Ask for the job's end; False if it has ended already. `result` raises CancelledError once it has."""
        if self.done() or self._folder.record().state.ended:
            return self.cancelled()
        requests.cancel(self._folder, by=myself(), reason="cancel()", environ=os.environ)
        return True

    def logs(self) -> str:
        """What its ranks have printed so far: each line behind its rank."""
        return "".join(self._new_lines(LogTail(self._folder.log)))

    def follow(self) -> Any:
        """Print what its ranks print, until it has ended; then as `result`."""
        tail = LogTail(self._folder.log)
        while True:
            is_over = self.done()
            for line in self._new_lines(tail):
                print(line, end="", flush=True)  # noqa: T201  into the notebook
            if is_over:
                return self.result()
            time.sleep(POLL_S)

    def results(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned, by rank.

        Raises:
            NoResult: one of them has left none.
        """
        self.result(timeout)
        sizes = sum(len(grant.gpus) for grant in self._folder.record().granted)
        return [self._value_of(rank) for rank in range(sizes)]

    def _new_lines(self, tail: LogTail) -> Iterator[str]:
        for logged in tail.new():
            text = printed(logged.line.text)
            yield f"{text}\n" if logged.line.rank is None else f"[{logged.line.rank}] {text}\n"

    def _value_of(self, rank: int) -> Any:
        answer = answer_of(self._folder, rank)
        if answer is None:
            raise NoResult("it has left no result", job=self.id, where=f"rank {rank}")
        return answer.value

    def _look(self) -> bool:
        """Settle the future once the job has ended; whether it has."""
        record = self._folder.record()
        if not record.state.ended:
            return False
        try:
            self._settle(record)
        except GpurunError as error:
            self.set_exception(error)
        return True

    def _settle(self, record: JobRecord) -> None:
        if record.state is State.CANCELLED:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif record.state is State.SUCCEEDED:
            self.set_result(self._value_of(0) if self._returns else record.exit_code or 0)
        else:
            self.set_exception(self._why(record))

    def _why(self, record: JobRecord) -> JobFailed:
        """The exception that the function raised, on the rank that failed first if that is known."""
        first = record.first_failure
        ranks = [first.rank] if first is not None and first.rank is not None else []
        for rank in (*ranks, *range(record.gpus)) if self._returns else ():
            answer = answer_of(self._folder, rank)
            if answer is not None and answer.error is not None:
                return answer.error
        return JobFailed(printable(record.reason) or record.state.value, job=self.id, hint=f"gpurun logs {self.id}")


class _Watcher:
    """One thread of this process looks after all jobs that somebody waits for; a fork begins its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Job] = []
        self._thread: threading.Thread | None = None

    def watch(self, job: Job) -> None:
        with self._lock:
            self._open.append(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="gpurun jobs", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        caretaker = Caretaker()
        while True:
            with self._lock:
                jobs = list(self._open)
                if not jobs:
                    self._thread = None
                    return
            over = [job for job in jobs if _tried(job)]
            with self._lock:
                self._open = [job for job in self._open if job not in over]
            caretaker.look(job._folder for job in jobs if job not in over)
            time.sleep(POLL_S)


def _tried(job: Job) -> bool:
    try:
        return job._look()
    except GpurunError:  # the state directory cannot be read now; the job goes on
        return False


_WATCHER = _Watcher()

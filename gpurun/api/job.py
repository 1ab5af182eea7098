"""A job as a future (`concurrent.futures`). It outlives the process that waits, and another process can find it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpurun.documents.plain import printable, printed
from gpurun.errors import OUTLIVED, GpurunError, JobFailed
from gpurun.head import spawn
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore
from gpurun.node.folder.below import Cursor, open_regular, open_top
from gpurun.runtime.gpurun_call import MOST_BYTES, MOST_KIND, MOST_TEXT, RESULTS, decoded
from gpurun.state.paths import myself
from gpurun.supervisor.lines import LogTail

if TYPE_CHECKING:
    from pathlib import Path

    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord


# Read what the ranks of a function returned. The data come from hosts, so this module does not trust them.


MOST_VALUES = 10_000_000
"""A value of two bytes, such as an empty list, takes about 64 in memory."""


class RemoteError(JobFailed):
    """The function raised an exception on a rank.

    Attributes:
        rank: the rank.
        kind: the name of the exception's class.
        trace: the traceback as text.
    """

    def __init__(self, *, job: str | None, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}", job=job, where=f"rank {rank}")
        self.rank, self.kind, self.text, self.trace = rank, kind, text, trace

    def __reduce__(self) -> Any:
        """Pools of processes pass exceptions on as pickles."""
        return partial(RemoteError, job=self.job, rank=self.rank, kind=self.kind, text=self.text, trace=self.trace), ()

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}" if self.trace else super().__str__()


class NoResult(JobFailed):
    """The job succeeded, but a rank's result is missing or cannot be read."""


@dataclass(frozen=True)
class Returned:
    """The result of one rank: a value, or an error."""

    value: Any = None
    error: RemoteError | None = None


def answer_of(folder: JobFolder, rank: int) -> Returned | None:
    """Return the result of a rank; None if the rank left none.

    Raises:
        NoResult: it cannot be read.
    """
    try:
        text = _read(folder, rank)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoResult(
            f"the rank's result cannot be read: {error.strerror}", job=folder.id, where=f"rank {rank}"
        ) from error
    try:
        most = sum(map(text.count, (b",", b"[", b"{")))
        if most > MOST_VALUES:
            raise ValueError(f"the result has more than {MOST_VALUES} values")
        told = json.loads(text)
        if "error" in told:
            lengths = {"kind": MOST_KIND, "text": MOST_TEXT, "trace": MOST_TEXT}
            said = {key: _plain(told["error"][key], most) for key, most in lengths.items()}
            return Returned(error=RemoteError(job=folder.id, rank=rank, **said))
        return Returned(decoded(told["value"]))
    except ModuleNotFoundError as error:
        raise NoResult(
            "the result has NumPy arrays, but NumPy is not installed here",
            job=folder.id,
            hint="install NumPy: pip install numpy",
        ) from error
    except Exception as error:  # whatever a stranger's bytes make a parser raise
        why = f"the rank's result is damaged: {type(error).__name__}: {printable(str(error)[:200])}"
        raise NoResult(why, job=folder.id, where=f"rank {rank}") from error


def _read(folder: JobFolder, rank: int) -> bytes:
    top = open_top(str(folder.outputs))
    try:
        with Cursor(top) as cursor:
            descriptor, found = open_regular(cursor.at((RESULTS.encode(),)), b"%d.json" % rank)
        with os.fdopen(descriptor, "rb") as file:
            if found.st_size > MOST_BYTES:
                raise OSError(27, f"the result is larger than {MOST_BYTES >> 20} MiB")
            return file.read(MOST_BYTES)
    finally:
        os.close(top)


def _plain(text: object, most: int) -> str:
    """Return text that cannot control a terminal or a notebook."""
    if not isinstance(text, str):
        raise TypeError("no text")
    return "\n".join(printable(line) for line in text[-most:].split("\n"))


POLL_S = 0.25
MOST_LOOKS = 50
"""So many jobs that are live are read at a time: a map may have thousands."""


class Job(Future[Any]):
    """A job of this user. `result` waits for the job's end. If the waiting process ends, the job continues.

    Attributes:
        id: the id that `gpurun status` shows.
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
        """Return whether the job has GPUs and has not ended."""
        record = self._folder.record()
        return not record.state.ended and record.state is not State.QUEUED

    def cancel(self) -> bool:
        """Request a cancel; return False if the job has ended. `result` raises CancelledError after the job's end.

        Raises:
            NotYours: the job belongs to another user.
        """
        if self.done() or self._folder.record().state.ended:
            return self.cancelled()
        spawn.refuse_others(self._folder)
        spawn.cancel(self._folder, by=myself(), reason="cancel()", environ=os.environ)
        return True

    def logs(self) -> str:
        """Return everything that the job's ranks have printed so far, each line with its rank in front."""
        return "".join(self._new_lines(LogTail(self._folder.log)))

    def follow(self) -> Any:
        """Print what the ranks print until the job ends; then do the same as `result`."""
        tail = LogTail(self._folder.log)
        while True:
            is_over = self.done()
            for line in self._new_lines(tail):
                print(line, end="", flush=True)  # noqa: T201  into the notebook
            if is_over:
                return self.result()
            time.sleep(POLL_S)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return what each rank returned, by rank.

        Raises:
            NoResult: a rank left no result.
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
            raise NoResult("the rank wrote no result", job=self.id, where=f"rank {rank}")
        return answer.value

    def _look(self) -> bool:
        """Settle the future if the job has ended; return whether it has."""
        try:
            record = self._folder.record()
        except (GpurunError, OSError):  # damaged, or it cannot be read now: its supervisor writes it again
            if self._folder.path.exists():
                return False
            self.set_exception(JobFailed("the job was removed", job=self.id))
            return True
        if not record.state.ended:
            return False
        try:
            self._settle(record)
        except Exception as error:  # noqa: BLE001  every error must reach the callers that wait
            self.set_exception(error)
        return True

    @property
    def _home(self) -> Path:
        return self._folder.path.home

    def _settle(self, record: JobRecord) -> None:
        if record.state is State.CANCELLED:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif record.state is State.SUCCEEDED:
            self.set_result(self._value_of(0) if self._returns else record.exit_code or 0)
        else:
            self.set_exception(self._why(record))

    def _why(self, record: JobRecord) -> JobFailed:
        """Return the exception that the function raised, if possible from the rank that failed first."""
        first = record.first_failure
        ranks = [first.rank] if first is not None and first.rank is not None else []
        for rank in (*ranks, *range(record.gpus)) if self._returns else ():
            answer = answer_of(self._folder, rank)
            if answer is not None and answer.error is not None:
                return answer.error
        return JobFailed(
            printable(record.reason) or record.state.value,
            job=self.id,
            hint=f"`gpurun logs {self.id}` prints the job's output",
        )


class _Watcher:
    """One thread of this process watches all jobs that somebody waits for. A forked process starts its own."""

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

    def forked(self) -> None:
        """Start afresh in a child process: the copied lock may belong to a thread that the child does not have."""
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        caretaker = Caretaker()
        while True:
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
            with suppress(*OUTLIVED):  # a damaged record: commands report it; or no memory for a moment
                self._settle()
                caretaker.look([job._folder for job in self._open])
            time.sleep(POLL_S)

    def _settle(self) -> None:
        """Settle jobs that have ended. Read a few of the live jobs each time, in turn, and all others now."""
        with self._lock:
            jobs = list(self._open)
        live = {home: _live(home) for home in {job._home for job in jobs}}
        waiting = [job for job in jobs if job.id in live[job._home]][:MOST_LOOKS]
        others = [job for job in jobs if job.id not in live[job._home]]
        over = {job for job in (*others, *waiting) if job._look()}
        with self._lock:
            rest = [job for job in self._open if job not in over]
            self._open = sorted(rest, key=set(waiting).__contains__)  # those just read come last


def _live(home: Path) -> set[str]:
    with suppress(GpurunError, OSError):
        return set(JobStore(home).live_ids())
    return set()


_WATCHER = _Watcher()
os.register_at_fork(after_in_child=_WATCHER.forked)

"""Copy ended attempts from the jobs' folders into the history; or all of them again after damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpurun.errors import StateError, StateUnavailable
from gpurun.history import database
from gpurun.history.database import HistorySource
from gpurun.history.row import HistoryRow, row_of
from gpurun.jobs import attempts
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state.path import StatePath
from gpurun.state.people import user_name

OnProblem = Callable[[StateError], None]


def collect(home: Path) -> int:
    """Bring the history of this user up to date. Returns the number of jobs with news. Idempotent, and quick without
    news.

    Raises:
        StateUnavailable: files of a job cannot be read now, and the rows of all other jobs are written; or the history
            cannot be written now.
        StateError: the history is damaged. In all cases marks stay, so nothing is lost.
    """
    jobs, lacking = _collect(home)
    for error in lacking.values():
        raise error
    return jobs


def jobs_lacking(home: Path) -> Mapping[str, StateError]:
    """Bring the history of this user up to date. Returns the jobs of which it may lack a row all the same, and why.

    Raises:
        StateUnavailable: nobody can know now which jobs have news.
    """
    return _collect(home)[1]


def _collect(home: Path) -> tuple[int, dict[str, StateError]]:
    """Return the number of jobs with news, and as `jobs_lacking`."""
    marks, store = attempts.history_folder(home, os.getuid()), JobStore(home)
    lacking: dict[str, StateError] = {}
    versions = {}
    try:
        for mark in attempts.marked(marks):
            with _noted(lacking, mark.job):
                versions[mark] = attempts.version_of(store.get(mark.job), mark.attempt)
    except FileNotFoundError:
        return 0, lacking
    news = [mark for mark, version in versions.items() if version is not None]
    if not news:
        return 0, lacking
    jobs, rows = sorted({mark.job for mark in news}), _Rows(home)
    try:
        with database.own(home, write=True) as connection:
            database.put(connection, rows.of(jobs))
    except StateError as error:
        return 0, {**dict.fromkeys(jobs, error), **lacking}
    lacking |= rows.unread
    for mark in news:  # after the commit: a mark that comes back costs a look, no more
        if mark.job in lacking:
            continue
        with _noted(lacking, mark.job):
            (marks / mark.name).unlink(missing_ok=True)
            if attempts.version_of(store.get(mark.job), mark.attempt) not in (versions[mark], (0, 0)):
                (marks / mark.name).touch()  # it was written again meanwhile
    return len(jobs), lacking


@contextmanager
def _noted(lacking: dict[str, StateError], job: str) -> Iterator[None]:
    """Note an error of one job: the others are collected all the same."""
    try:
        yield
    except StateError as error:
        lacking[job] = error


def rebuild(home: Path) -> tuple[int, StatePath | None]:
    """Write the rows of all jobs of this user that have a folder. Rows of pruned jobs stay.

    Returns:
        The number of rows; and the new name of a damaged file.

    Raises:
        StateUnavailable: files of a job cannot be read now. The rows of all other jobs are written.
        StateError: the history cannot be written.
    """
    aside, found = database.set_aside_damaged(home), _Rows(home)
    with database.own(home, write=True) as connection:
        database.put(connection, found.of(JobStore(home).ids()))
        (count,) = connection.execute("SELECT count(*) FROM attempts").fetchone()
    found.check()
    collect(home)
    return count, aside


class _Rows:
    """Makes the rows of one user; `uid` None = this user.

    Attributes:
        unread: the jobs with files that could not be read at that moment. Their rows may be missing.
    """

    def __init__(self, home: Path, uid: int | None = None) -> None:
        self._store, self._uid = JobStore(home), os.getuid() if uid is None else uid
        self.unread: dict[str, StateUnavailable] = {}

    def of(self, jobs: Iterable[str]) -> Iterator[HistoryRow]:
        """Yield the ended attempts of these jobs."""
        for job in jobs:
            try:
                yield from self._of_job(self._store.get(job))
            except StateUnavailable as error:
                self.unread[job] = error
            except (FileNotFoundError, StateError):
                continue

    def _of_job(self, folder: JobFolder) -> Iterator[HistoryRow]:
        for record, use in attempts.kept(folder):
            if record.owner_uid == self._uid:
                yield row_of(record, _spec(folder), use)

    def check(self) -> None:
        """Raise the first of `unread`, if there is one."""
        for error in self.unread.values():
            raise error


def _spec(folder: JobFolder) -> JobSpec | None:
    """Return the job's spec; None if it is damaged. Raises StateUnavailable."""
    try:
        return folder.spec()
    except StateUnavailable:
        raise
    except StateError:
        return None


def running(home: Path, now_s: float, on_problem: OnProblem) -> Iterator[HistoryRow]:
    """Yield a row for each attempt that holds GPUs now, and for each queued job, unless its files cannot be read now.

    Args:
        on_problem: called for each job that is left out.
    """
    store = JobStore(home)
    for record in store.live_records():
        folder = store.get(record.id)
        if not record.state.ended:
            try:
                yield row_of(record, _spec(folder), attempts.read_use(folder, record.attempt), now_s=now_s)
            except StateUnavailable as error:
                on_problem(error)


@contextmanager
def sources(home: Path, on_problem: OnProblem, *, now_s: float | None = None) -> Iterator[list[HistorySource]]:
    """Yield the history of every user that this user may read, up to date.

    Args:
        on_problem: called for a history, and for files of a job, that cannot be read; the others follow.
        now_s: also include the attempts that run at this moment.
    """
    with ExitStack() as stack:
        found: list[HistorySource] = []
        with suppress(FileNotFoundError):
            for name in sorted((StatePath(home) / attempts.HISTORY).names()):
                if name.isascii() and name.isdigit():
                    try:
                        with suppress(FileNotFoundError):
                            found.append(_of_user(home, int(name), stack, on_problem))
                    except StateError as error:
                        on_problem(error)
        if now_s is not None:
            found.append(HistorySource(database.in_memory(running(home, now_s, on_problem))))
        yield found


def _of_user(home: Path, uid: int, stack: ExitStack, on_problem: OnProblem) -> HistorySource:
    """Return that user's history. Raises FileNotFoundError if there is none."""
    folder, user = attempts.history_folder(home, uid), user_name(uid)
    if (owner := _owner_of(folder)) != uid:
        raise StateError(
            f"the folder belongs to {user_name(owner)}, so {user} has no history", where=str(folder),
            hint=f"ask root to remove the folder; then run `gpurun history --rebuild` as {user}",
        )  # fmt: skip
    if uid == os.getuid():
        try:
            collect(home)
        except StateUnavailable as error:  # what it has of other attempts is true all the same
            on_problem(error)
        return HistorySource(stack.enter_context(database.own(home, write=False)), user, uid)
    copy = stack.enter_context(database.copy_of(folder))
    found = _Rows(home, uid)
    database.put(copy, found.of(sorted({mark.job for mark in attempts.marked(folder)})))
    for problem in found.unread.values():
        on_problem(problem)
    return HistorySource(copy, user, uid)


def _owner_of(folder: StatePath) -> int:
    return folder.stat().st_uid

"""Copy ended attempts from the jobs' folders into the history; or all of them again after damage."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpurun.errors import StateError, StateUnavailable
from gpurun.history.goodput import PARTS
from gpurun.history.row import COLUMNS, HistoryRow, row_of
from gpurun.jobs.folder import (
    HISTORY,
    JobFolder,
    history_folder,
    kept,
    make_history_folder,
    marked,
    read_use,
    version_of,
)
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state import durable
from gpurun.state.paths import StatePath, is_account, state_error, user_name

# A user's history as an SQLite file, ``history/UID/attempts.db``. Only that user's processes write it.


FILE = "attempts.db"
BUSY_S = 20.0
MOST_BYTES = 4 << 30
_COPY_TRIES = 20
_ONE_CREATES = threading.Lock()
"""Held while a missing file is made and closed, so that no thread of this process has locked it by then."""
_TYPES = {"int": "INTEGER", "float": "REAL", "str": "TEXT"}


def _typed(columns: Sequence[str]) -> list[str]:
    hints = HistoryRow.__annotations__
    return [
        f"{name} {_TYPES[hints[name].split(' ')[0]]}{'' if 'None' in hints[name] else ' NOT NULL'}" for name in columns
    ]


def _schema(columns: Sequence[str], counted: Sequence[str]) -> tuple[str, ...]:
    return (
        f"CREATE TABLE attempts({', '.join(_typed(columns))}, PRIMARY KEY(job, attempt)) WITHOUT ROWID",
        f"CREATE INDEX counted ON attempts({', '.join(counted)})",
        "CREATE INDEX ended ON attempts(ended_s)",
    )


_REBUILD = "`gpurun history --rebuild` renames the damaged file and reads the rows from the jobs again"
GROUPED = ("user", "pool", "project", "generation")
_COUNTED_AT_FIRST = (
    *GROUPED, "ended_s", "granted_s", "outcome", "cause", "cause_host", "waited_s", "gpu_s", "use_percent",
)  # fmt: skip
COUNTED = (*_COUNTED_AT_FIRST, *PARTS, "lost_cause")
"""What accounts are made of, in an index of its own: a third of the table, in the order of the groups."""
SCHEMA = _schema(COLUMNS, COUNTED)
_OLDER = {frozenset(_schema(COLUMNS[:30], _COUNTED_AT_FIRST)): 30}
"""The schema of each older gpurun, and how many columns it has. A new column stands last and may be NULL: SQLite then
changes an old table into exactly the new one.
"""
_PUT = f"INSERT OR REPLACE INTO attempts VALUES({', '.join('?' * len(COLUMNS))})"


@dataclass(frozen=True)
class HistorySource:
    """Readable rows of the history.

    Attributes:
        user: the owner of the rows, as this machine names the owner of the file; None = each row names its owner, and
            gpurun made the rows.
        uid: that owner's number.
    """

    rows: sqlite3.Connection
    user: str | None = None
    uid: int = -1

    def __post_init__(self) -> None:
        self.rows.create_function("owner_of", 1, lambda said: self.owner_of((said or b"").decode("utf-8", "replace")))

    def owner_of(self, said: object) -> str:
        """Return whose a row is: the name that it has, if its owner may have it.

        A user keeps a name after the account is gone, also if another account has the number by now. But no file can
        give its rows to an account of another user.
        """
        name = said if isinstance(said, str) else ""
        if self.user is None or name == self.user:
            return name
        return self.user if not name or name.startswith("uid ") or _is_account(name) else name

    def is_all_of(self, asked: str) -> bool:
        """Return whether somebody asks for the owner of the file by number."""
        return self.user is not None and asked in (str(self.uid), f"uid {self.uid}")


@cache
def _is_account(name: str) -> bool:
    return is_account(name)


def in_memory(rows: Iterable[HistoryRow] = ()) -> sqlite3.Connection:
    """Return a history without a file."""
    connection = sqlite3.connect(":memory:")
    for statement in SCHEMA:
        connection.execute(statement)
    put(connection, rows)
    return connection


@dataclass(frozen=True)
class JobHistory:
    """The history files of a state directory, one for each user."""

    home: Path

    @contextmanager
    def own(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """Open this user's history. With `write`, creates it if missing, and commits changes at the end.

        Raises:
            FileNotFoundError: there is no history, and `write` is false.
            StateError: it is damaged, or cannot be written.
        """
        folder = make_history_folder(self.home, os.getuid()) if write else history_folder(self.home, os.getuid())
        path = folder / FILE
        _check(path, create=write)
        if not write and not path.stat().st_size:  # made, and then the disk was full
            raise FileNotFoundError(errno.ENOENT, "gpurun has not written a row into the history yet", str(path))
        try:
            uri = f"file:{quote(str(path.plain.absolute()))}?mode=rw"
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as connection:
                _set_up(connection)
                if write:
                    connection.execute("BEGIN IMMEDIATE")
                _make_schema(connection, write=write)
                yield connection
                if write:
                    connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise _told(error, path) from error

    def set_aside_damaged(self) -> StatePath | None:
        """Rename this user's file if it is damaged; return the new name.

        Raises:
            StateError: it cannot be used for another reason, such as a full disk.
        """
        try:
            with self.own(write=True) as connection:
                (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if said != "ok":
                    raise sqlite3.DatabaseError(said)
        except StateError as error:
            why = error.__cause__
            if not isinstance(why, sqlite3.DatabaseError) or isinstance(why, sqlite3.OperationalError):
                raise
        else:
            return None
        path = history_folder(self.home, os.getuid()) / FILE
        with suppress(FileNotFoundError):
            durable.set_aside(path.sibling(f"{FILE}-journal"))
        return durable.set_aside(path)

    def collect(self) -> int:
        """Bring the history of this user up to date. Returns the number of jobs with news. Idempotent, and quick
        without news.

        Raises:
            StateUnavailable: files of a job cannot be read now, and the rows of all other jobs are written; or the
            history
                cannot be written now.
            StateError: the history is damaged. In all cases marks stay, so nothing is lost.
        """
        jobs, lacking = self._collect()
        for error in lacking.values():
            raise error
        return jobs

    def jobs_lacking(self) -> Mapping[str, StateError]:
        """Bring the history of this user up to date. Returns the jobs of which it may lack a row all the same, and why.

        Raises:
            StateUnavailable: nobody can know now which jobs have news.
        """
        return self._collect()[1]

    def _collect(self) -> tuple[int, dict[str, StateError]]:
        """Return the number of jobs with news, and as `jobs_lacking`."""
        marks, store = history_folder(self.home, os.getuid()), JobStore(self.home)
        lacking: dict[str, StateError] = {}
        versions = {}
        try:
            for mark in marked(marks):
                with _noted(lacking, mark.job):
                    versions[mark] = version_of(store.get(mark.job), mark.attempt)
        except FileNotFoundError:
            return 0, lacking
        news = [mark for mark, version in versions.items() if version is not None]
        if not news:
            return 0, lacking
        jobs, rows = sorted({mark.job for mark in news}), _Rows(self.home)
        try:
            with self.own(write=True) as connection:
                put(connection, rows.of(jobs))
        except StateError as error:
            return 0, {**dict.fromkeys(jobs, error), **lacking}
        lacking |= rows.unread
        for mark in news:  # after the commit: a mark that comes back costs a look, no more
            if mark.job in lacking:
                continue
            with _noted(lacking, mark.job):
                (marks / mark.name).unlink(missing_ok=True)
                if version_of(store.get(mark.job), mark.attempt) not in (versions[mark], (0, 0)):
                    (marks / mark.name).touch()  # it was written again meanwhile
        return len(jobs), lacking

    def rebuild(self) -> tuple[int, StatePath | None]:
        """Write the rows of all jobs of this user that have a folder. Rows of pruned jobs stay.

        Returns:
            The number of rows; and the new name of a damaged file.

        Raises:
            StateUnavailable: files of a job cannot be read now. The rows of all other jobs are written.
            StateError: the history cannot be written.
        """
        aside, found = self.set_aside_damaged(), _Rows(self.home)
        with self.own(write=True) as connection:
            put(connection, found.of(JobStore(self.home).ids()))
            (count,) = connection.execute("SELECT count(*) FROM attempts").fetchone()
        found.check()
        self.collect()
        return count, aside

    def running(self, now_s: float, on_problem: OnProblem) -> Iterator[HistoryRow]:
        """Yield a row for each attempt that holds GPUs now, and for each queued job, unless its files cannot be read
        now.

        Args:
            on_problem: called for each job that is left out.
        """
        store = JobStore(self.home)
        for record in store.live_records():
            folder = store.get(record.id)
            if not record.state.ended:
                try:
                    yield row_of(record, _spec(folder), read_use(folder, record.attempt), now_s=now_s)
                except StateUnavailable as error:
                    on_problem(error)

    @contextmanager
    def sources(self, on_problem: OnProblem, *, now_s: float | None = None) -> Iterator[list[HistorySource]]:
        """Yield the history of every user that this user may read, up to date.

        Args:
            on_problem: called for a history, and for files of a job, that cannot be read; the others follow.
            now_s: also include the attempts that run at this moment.
        """
        with ExitStack() as stack:
            found: list[HistorySource] = []
            with suppress(FileNotFoundError):
                for name in sorted((StatePath(self.home) / HISTORY).names()):
                    if name.isascii() and name.isdigit():
                        try:
                            with suppress(FileNotFoundError):
                                found.append(self._of_user(int(name), stack, on_problem))
                        except StateError as error:
                            on_problem(error)
            if now_s is not None:
                found.append(HistorySource(in_memory(self.running(now_s, on_problem))))
            yield found

    def _of_user(self, uid: int, stack: ExitStack, on_problem: OnProblem) -> HistorySource:
        """Return that user's history. Raises FileNotFoundError if there is none."""
        folder, user = history_folder(self.home, uid), user_name(uid)
        if (owner := _owner_of(folder)) != uid:
            raise StateError(
                f"the folder belongs to {user_name(owner)}, so {user} has no history", where=str(folder),
                hint=f"ask root to remove the folder; then run `gpurun history --rebuild` as {user}",
            )  # fmt: skip
        if uid == os.getuid():
            try:
                self.collect()
            except StateUnavailable as error:  # what it has of other attempts is true all the same
                on_problem(error)
            return HistorySource(stack.enter_context(self.own(write=False)), user, uid)
        copy = stack.enter_context(copy_of(folder))
        found = _Rows(self.home, uid)
        put(copy, found.of(sorted({mark.job for mark in marked(folder)})))
        for problem in found.unread.values():
            on_problem(problem)
        return HistorySource(copy, user, uid)


_NUMBERS = {"database or disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}
"""What SQLite says of a failed system call, and the call's error. (`sqlite_errorcode` is of Python 3.11.)"""


def _told(error: sqlite3.Error, path: StatePath) -> StateError:
    """Return the error about a user's own file, for people. Damage is no OperationalError: one may pass."""
    if (number := _NUMBERS.get(str(error))) is not None:
        return state_error(OSError(number, os.strerror(number)), path, "used")
    if isinstance(error, sqlite3.OperationalError):
        return StateUnavailable(
            f"the history cannot be used now: {error}", where=str(path),
            hint="try again; `fuser -v FILE` shows which process uses the file",
        )  # fmt: skip
    return StateError(f"the history cannot be used: {error}", where=str(path), hint=_REBUILD)


def _check(path: StatePath, *, create: bool) -> None:
    """Refuse links and pipes; with `create`, make a file that is missing, with the right mode.

    Whoever closes a file drops all POSIX locks that this process has on it, also those of SQLite in another thread. So
    gpurun does not open a file that SQLite may have open: O_PATH only names it (man 2 open).
    """
    with _ONE_CREATES:
        try:
            os.close(path.open_file(os.O_PATH))
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):  # another process made it; SQLite opens what that one checked
                os.close(path.open_file(os.O_RDWR | os.O_CREAT | os.O_EXCL))


def _make_schema(connection: sqlite3.Connection, *, write: bool) -> None:
    """Make the table of a new file if `write`; see `_read_or_upgrade` for the others."""
    if write and connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
        for statement in SCHEMA:
            connection.execute(statement)
    else:
        _read_or_upgrade(connection, upgrade=write)


def _read_or_upgrade(connection: sqlite3.Connection, *, upgrade: bool) -> None:
    """Prepare a file of this or an older gpurun: columns that it lacks are NULL.

    Args:
        upgrade: change the file's table. Otherwise a view that only this connection has takes the table's place.

    Raises:
        sqlite3.DatabaseError: its schema is none that gpurun has made.
    """
    columns = _OLDER.get(_found_schema(connection))
    if columns is not None and upgrade:
        for column in _typed(COLUMNS[columns:]):
            connection.execute(f"ALTER TABLE attempts ADD COLUMN {column}")
        connection.execute("DROP INDEX counted")
        connection.execute(SCHEMA[1])
    elif columns is not None:
        missing = ", ".join(f"NULL AS {name}" for name in COLUMNS[columns:])
        connection.execute(f"CREATE TEMP VIEW attempts AS SELECT *, {missing} FROM main.attempts")  # noqa: S608
        return
    if _found_schema(connection) != {*SCHEMA}:
        raise sqlite3.DatabaseError("the schema of the file differs from the schema of this gpurun version")


@contextmanager
def copy_of(folder: StatePath) -> Iterator[sqlite3.Connection]:
    """Open a private copy of another user's history; an empty one if that user has none.

    Raises:
        StateError: it cannot be read, or is not a history.
    """
    with tempfile.TemporaryDirectory(prefix="gpurun-history-") as private:
        copy = Path(private) / FILE
        if not _copied(folder / FILE, copy):
            yield in_memory()
            return
        try:
            with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                _set_up(connection)
                _read_or_upgrade(connection, upgrade=True)
                yield connection
        except sqlite3.Error as error:
            raise StateError(f"the history cannot be read: {error}", where=str(folder / FILE)) from error


def _copied(path: StatePath, to: Path) -> bool:
    """Copy a file while nobody writes it. Raises StateError if it is always being written."""
    journal = path.sibling(f"{FILE}-journal")
    for _ in range(_COPY_TRIES):
        try:
            with path.reader() as stream:
                before = os.fstat(stream.fileno())
                if before.st_size > MOST_BYTES:
                    raise StateError(
                        "the file is larger than any database of attempts that gpurun writes", where=str(path)
                    )
                if not journal.exists():
                    with to.open("wb") as target:
                        while data := stream.read(1 << 20):
                            target.write(data)
                    after = path.stat()
                    same = (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
                    if same and not journal.exists():
                        return before.st_size > 0
        except FileNotFoundError:
            return False
        time.sleep(0.05)
    raise StateError(
        "a gpurun process of the owner is writing the file, or was killed while writing", where=str(path),
        hint="try again; the owner's next `gpurun history` repairs the file",
    )  # fmt: skip


def _set_up(connection: sqlite3.Connection) -> None:
    """Follow https://www.sqlite.org/security.html for other users' files; it costs little for the user's own."""
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    for setting in (
        "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "synchronous=FULL", "cache_size=-65536",
        "temp_store=MEMORY",
    ):  # fmt: skip
        connection.execute(f"PRAGMA {setting}")


def _found_schema(connection: sqlite3.Connection) -> frozenset[str]:
    found = connection.execute("SELECT sql FROM main.sqlite_master WHERE sql IS NOT NULL").fetchall()
    return frozenset(text for (text,) in found)


def put(connection: sqlite3.Connection, rows: Iterable[HistoryRow]) -> None:
    """Write rows. Replaces a row of the same job and attempt."""
    connection.executemany(_PUT, map(attrgetter(*COLUMNS), rows))


# Select rows of the history.


MOST_NUMBER = 1e12
"""Numbers of another user's file are cut to this: 30,000 years, in seconds."""
_NUMBERS_OF_SELECT = {name for name, kind in HistoryRow.__annotations__.items() if not kind.startswith("str")}
_OPTIONAL = {name for name, kind in HistoryRow.__annotations__.items() if "None" in kind}
_WHOLE = {name for name, kind in HistoryRow.__annotations__.items() if kind.startswith("int")}


@dataclass(frozen=True)
class Wanted:
    """Conditions on rows; None or empty = no condition.

    Attributes:
        user: a name, or a number: that of the file's owner, whatever the rows call the user.
        host: attempts with GPUs of this host.
        states: outcomes.
        name: part of the job's name or id.
        since_s, until_s: attempts that ended after, or began before, that time.
    """

    user: str | None = None
    pool: str | None = None
    project: str | None = None
    host: str | None = None
    states: tuple[str, ...] = ()
    name: str | None = None
    since_s: float | None = None
    until_s: float | None = None

    def where(self, source: HistorySource) -> tuple[str, dict[str, Any]]:
        """Return the condition in SQL and its parameters."""
        texts = {"pool": self.pool, "project": self.project}
        parts = [f"{column} = :{column}" for column, value in texts.items() if value is not None]
        values: dict[str, Any] = {column: value for column, value in texts.items() if value is not None}
        if self.user is not None and not source.is_all_of(self.user):
            parts.append("owner_of(CAST(user AS BLOB)) = :user")
            values["user"] = self.user
        if self.host is not None:
            parts.append("instr(' ' || hosts || ' ', ' ' || :host || ' ') > 0")
            values["host"] = self.host
        if self.name is not None:
            parts.append("(instr(lower(name), lower(:name)) > 0 OR instr(job, :name) > 0)")
            values["name"] = self.name
        if self.states:
            parts.append(f"outcome IN ({', '.join(f':state{number}' for number in range(len(self.states)))})")
            values |= {f"state{number}": state for number, state in enumerate(self.states)}
        if self.since_s is not None:
            parts.append("ended_s > :since")
            values["since"] = self.since_s
        if self.until_s is not None:
            parts.append("coalesce(granted_s, ended_s) < :until")
            values["until"] = self.until_s
        return " AND ".join(parts) or "1", values


def rows(sources: Iterable[HistorySource], wanted: Wanted, *, most: int | None = None) -> list[HistoryRow]:
    """Return the matching rows, the latest end first; at most `most`."""
    found: list[HistoryRow] = []
    limit = "" if most is None else f" LIMIT {most:d}"
    for source in sources:
        condition, values = wanted.where(source)
        found += _read(source, f"{condition} ORDER BY ended_s DESC, job, attempt{limit}", values)
    found.sort(key=lambda row: (-row.ended_s, row.job, row.attempt))
    return found if most is None else found[:most]


def row_of_attempt(source: HistorySource, job: object, attempt: object) -> Iterator[HistoryRow]:
    """Yield the row of one attempt, if there is one."""
    return _read(source, "job = :job AND attempt = :attempt", {"job": job, "attempt": attempt})


def _read(source: HistorySource, condition: str, values: Mapping[str, Any]) -> Iterator[HistoryRow]:
    for found in source.rows.execute(f"SELECT {', '.join(COLUMNS)} FROM attempts WHERE {condition}", values):  # noqa: S608
        yield _sound(dict(zip(COLUMNS, found, strict=True)), source)


def _sound(values: Mapping[str, Any], source: HistorySource) -> HistoryRow:
    """Return a row in which every value has its type. Columns of another user's file may hold anything."""
    row: dict[str, Any] = {
        n: _number(n, value) if n in _NUMBERS_OF_SELECT else _text(n, value) for n, value in values.items()
    }
    return HistoryRow(**{**row, "user": source.owner_of(row["user"])})


def _text(name: str, value: object) -> str | None:
    return value if isinstance(value, str) else None if name in _OPTIONAL else ""


def _number(name: str, value: object) -> float | int | None:
    if not isinstance(value, int | float) or math.isnan(value):
        return None if name in _OPTIONAL else 0
    cut = min(max(value, -MOST_NUMBER), MOST_NUMBER)
    return int(cut) if name in _WHOLE else float(cut)


OnProblem = Callable[[StateError], None]


@contextmanager
def _noted(lacking: dict[str, StateError], job: str) -> Iterator[None]:
    """Note an error of one job: the others are collected all the same."""
    try:
        yield
    except StateError as error:
        lacking[job] = error


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
        for record, use in kept(folder):
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


def _owner_of(folder: StatePath) -> int:
    return folder.stat().st_uid

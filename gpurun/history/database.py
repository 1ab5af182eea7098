"""A user's history as an SQLite file, ``history/UID/attempts.db``. Only that user's processes write it.

SQLite's write-ahead log needs memory that all processes share, so it does not work on NFS. So the file uses SQLite's
rollback journal. Its locks are POSIX locks, which gpurun checks for the state directory anyway.

Another user's file is not trusted. gpurun reads a copy, so paths and locks of that user have no effect. It compares the
schema, and checks the type of every value.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote

from gpurun.errors import StateError, StateUnavailable
from gpurun.history.row import COLUMNS, HistoryRow
from gpurun.jobs.attempts import history_folder, make_history_folder
from gpurun.state import durable
from gpurun.state.path import StatePath, told
from gpurun.state.people import is_account

FILE = "attempts.db"
BUSY_S = 20.0
MOST_BYTES = 4 << 30
_COPY_TRIES = 20
_ONE_CREATES = threading.Lock()
"""Held while a missing file is made and closed, so that no thread of this process has locked it by then."""
_TYPES = {"int": "INTEGER", "float": "REAL", "str": "TEXT"}


def _schema() -> str:
    hints = HistoryRow.__annotations__
    columns = [
        f"{name} {_TYPES[hints[name].split(' ')[0]]}{'' if 'None' in hints[name] else ' NOT NULL'}" for name in COLUMNS
    ]
    return f"CREATE TABLE attempts({', '.join(columns)}, PRIMARY KEY(job, attempt)) WITHOUT ROWID"


_REBUILD = "`gpurun history --rebuild` renames the damaged file and reads the rows from the jobs again"
GROUPED = ("user", "pool", "project", "generation")
COUNTED = (
    *GROUPED, "ended_s", "granted_s", "outcome", "cause", "cause_host", "waited_s", "gpu_s", "use_percent",
)  # fmt: skip
"""What accounts are made of, in an index of its own: a fifth of the table, in the order of the groups."""
SCHEMA = (
    _schema(),
    f"CREATE INDEX counted ON attempts({', '.join(COUNTED)})",
    "CREATE INDEX ended ON attempts(ended_s)",
)
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


@contextmanager
def own(home: Path, *, write: bool) -> Iterator[sqlite3.Connection]:
    """Open this user's history. With `write`, creates it if missing, and commits changes at the end.

    Raises:
        FileNotFoundError: there is no history, and `write` is false.
        StateError: it is damaged, or cannot be written.
    """
    folder = make_history_folder(home, os.getuid()) if write else history_folder(home, os.getuid())
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


_NUMBERS = {"database or disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}
"""What SQLite says of a failed system call, and the call's error. (`sqlite_errorcode` is of Python 3.11.)"""


def _told(error: sqlite3.Error, path: StatePath) -> StateError:
    """Return the error about a user's own file, for people. Damage is no OperationalError: one may pass."""
    if (number := _NUMBERS.get(str(error))) is not None:
        return told(OSError(number, os.strerror(number)), path, "used")
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
    is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    if is_new and write:
        for statement in SCHEMA:
            connection.execute(statement)
    elif not _is_sound(connection):
        raise sqlite3.DatabaseError("the schema of the file differs from the schema of this gpurun version")


def set_aside_damaged(home: Path) -> StatePath | None:
    """Rename this user's file if it is damaged; return the new name.

    Raises:
        StateError: it cannot be used for another reason, such as a full disk.
    """
    try:
        with own(home, write=True) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if said != "ok":
                raise sqlite3.DatabaseError(said)
    except StateError as error:
        why = error.__cause__
        if not isinstance(why, sqlite3.DatabaseError) or isinstance(why, sqlite3.OperationalError):
            raise
    else:
        return None
    path = history_folder(home, os.getuid()) / FILE
    with suppress(FileNotFoundError):
        durable.set_aside(path.sibling(f"{FILE}-journal"))
    return durable.set_aside(path)


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
                _make_schema(connection, write=False)
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
    for setting in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "synchronous=FULL", "cache_size=-65536"):
        connection.execute(f"PRAGMA {setting}")


def _is_sound(connection: sqlite3.Connection) -> bool:
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {text for (text,) in found} == {*SCHEMA}


def put(connection: sqlite3.Connection, rows: Iterable[HistoryRow]) -> None:
    """Write rows. Replaces a row of the same job and attempt."""
    connection.executemany(_PUT, map(attrgetter(*COLUMNS), rows))

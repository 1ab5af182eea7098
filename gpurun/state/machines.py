"""What a user knows of the machines of hosts: when they last answered a check, and which of them are out.

A host is *out* when a check that depends on no job finds it broken. It returns when the same check passes. The
knowledge belongs to a user, ``machines/UID.json``: the missing SSH key of one user must not take a host from others.
Passes read only the file of their own user; displays may read every file.

A machine is identified by the address that SSH connects to (`gpurun.inventory.model.Host.machine`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from gpurun.errors import StateError, StateUnavailable
from gpurun.state import durable, lock
from gpurun.state.own_lock import open_own_lock
from gpurun.state.path import StatePath, told

FOLDER = "machines"
MOST_MACHINES = 20_000
MOST_LETTERS = 1000
MOST_UID_DIGITS = 10
BEFORE_ALL_S = -1.0
PATIENCE_S = 10.0
"""A write takes milliseconds."""


@dataclass(frozen=True)
class Out:
    """Why a host is out.

    Attributes:
        check: the name of the check that failed, as `gpurun doctor` names it.
        reason: what the check found, for people.
        since_s: when a check first found the host broken, seconds since the epoch.
        remedy: what to do; "" = unknown.
    """

    check: str
    reason: str
    since_s: float
    remedy: str = ""

    @property
    def words(self) -> str:
        """For people: ``out: no route to host``."""
        return f"out: {self.reason}"


@dataclass(frozen=True)
class Machine:
    """What is known of one machine.

    Attributes:
        name: the inventory's name of the host.
        seen_s: when it was last looked at, or answered a supervisor; seconds since the epoch.
        id: what the machine calls itself; "" = it has not said so yet.
        out: why it is out; None = the last check passed.
        inventory: the canonical path of the inventory that names the host so.
        memory_mib, cores: what its engine has for containers; None = it has not said so yet.
        begun_s: when that look began, seconds since the epoch; 0 = unknown. Of two looks, the one that began last
            counts.
    """

    name: str
    seen_s: float
    id: str = ""
    out: Out | None = None
    inventory: str = ""
    memory_mib: int | None = None
    cores: int | None = None
    begun_s: float = 0.0

    @property
    def as_of_s(self) -> float:
        """Return for which moment this holds at least."""
        return self.begun_s or self.seen_s


WAYS = ("ssh",)
"""Checks of the way to a machine. What they find holds for one address, the other checks' findings for the machine."""


def outs_of(machines: Mapping[str, Machine]) -> dict[str, Out]:
    """Return `Host.machine` → why that machine is out.

    If inventories reach one machine by several addresses, the newest look at the machine holds for all of them. An id
    that several hosts of one inventory give says nothing: they were installed from one image.
    """
    outs = {address: known.out for address, known in machines.items() if known.out is not None}
    if not outs:
        return {}
    by_id: dict[str, dict[str, Machine]] = {}
    for address, known in machines.items():
        if known.id:
            by_id.setdefault(known.id, {})[address] = known
    for same in by_id.values():
        if 1 < len(same) == len({known.inventory for known in same.values()}):
            _join(same, outs)
    return outs


def _join(same: Mapping[str, Machine], outs: dict[str, Out]) -> None:
    """Let the newest look at a machine hold for all its addresses that can be reached."""
    reached = {address: known for address, known in same.items() if known.out is None or known.out.check not in WAYS}
    newest = max(reached.values(), key=lambda known: known.as_of_s, default=None)
    for address in reached if newest is not None else ():
        if newest is not None and newest.out is not None:
            outs[address] = newest.out
        else:
            outs.pop(address, None)


@dataclass(frozen=True)
class _File:
    machines: dict[str, Machine] = field(default_factory=dict)
    version: int = 1


def machines_folder(home: Path) -> StatePath:
    """Return the folder of these files."""
    return StatePath(home) / FOLDER


def read_machines(home: Path, uid: int) -> Mapping[str, Machine]:
    """Return `Host.machine` → what that user knows of it.

    A missing file, a damaged one, and one that another user can have written count as nothing known. The next look
    replaces a damaged file.
    """
    try:
        return _read(home, uid)
    except StateError:
        return {}


def _read(home: Path, uid: int) -> Mapping[str, Machine]:
    """Do as `read_machines`.

    Raises:
        StateUnavailable: the file cannot be read now; what it says is not lost.
    """
    for path in _files(home, uid, ".json"):
        try:
            found, signer = durable.read_signed(path, _File)
        except StateUnavailable:
            raise
        except (FileNotFoundError, StateError):
            continue
        if signer == uid:
            now_s = time.time()
            return {address: _not_in_future(known, now_s) for address, known in found.machines.items()}
    return {}


def _not_in_future(known: Machine, now_s: float) -> Machine:
    """Return a look in the future as the oldest one: the clock was set back, and every other look is newer."""
    return known if max(known.seen_s, known.begun_s) <= now_s else replace(known, begun_s=BEFORE_ALL_S)


def outs_stamp(home: Path) -> frozenset[str]:
    """Return the machines that this user knows to be out. Quick enough to call repeatedly.

    Raises:
        StateError: the file cannot be examined.
    """
    try:
        found = _own_file(home, ".json").stat()
    except FileNotFoundError:
        return frozenset()
    return _outs_at(home, (found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=1)
def _outs_at(home: Path, _stamp: tuple[int, int, int]) -> frozenset[str]:
    return frozenset(address for address, known in read_machines(home, os.getuid()).items() if known.out is not None)


def users_who_looked(home: Path) -> list[int]:
    """Return the uids of the users who know something of machines: for displays."""
    try:
        names = machines_folder(home).names()
    except (FileNotFoundError, StateError):
        return []
    uids = {name.partition(".")[0] for name in names if name.endswith(".json")}
    numbers = sorted(int(uid) for uid in uids if uid.isascii() and uid.isdigit() and len(uid) <= MOST_UID_DIGITS)
    return [uid for uid in numbers if read_machines(home, uid)]


def note_looks(home: Path, looks: Mapping[str, Machine]) -> None:
    """Add this user's looks at machines, durably. An out machine keeps the time since when it is out.

    A look without an id, memory or cores keeps what the machine said before. A look that began before the one that is
    known changes nothing else: its answer came late.

    Raises:
        StateError: the file cannot be written, or not be read now. It is left as it is.
    """
    if not looks:
        return
    with own_lock(home, "lock"):
        before = _read(home, os.getuid())
        after = {**before, **{machine: _joined(before.get(machine), look) for machine, look in looks.items()}}
        newest = sorted(after, key=lambda machine: after[machine].as_of_s)[-MOST_MACHINES:]
        path = _own_file(home, ".json")
        durable.write_record(path, _File({machine: after[machine] for machine in newest}))


def _joined(before: Machine | None, look: Machine) -> Machine:
    if before is not None and look.as_of_s < before.as_of_s:
        before, look = look, before
    out = look.out
    if out is not None:
        since_s = out.since_s if before is None or before.out is None else min(before.out.since_s, out.since_s)
        out = Out(out.check, out.reason[:MOST_LETTERS], since_s, out.remedy[:MOST_LETTERS])
    known = before if before is not None else look
    return replace(
        look, id=look.id or known.id, out=out, memory_mib=look.memory_mib or known.memory_mib,
        cores=look.cores or known.cores,
    )  # fmt: skip


@contextmanager
def own_lock(home: Path, name: str, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a lock of this user's that no other user can hold.

    Args:
        name: which one.
        patience_s: give up after this long.

    Raises:
        StateUnavailable: another process of this user holds it.
        StateError: its file cannot be opened.
    """
    _make_folder(home)
    path = _own_file(home, f".{name}")
    descriptor = open_own_lock(path)
    try:
        if not lock.take_within(descriptor, patience_s):
            raise StateUnavailable(f"the file is locked by {lock.holders_in_words(descriptor)}", where=str(path))
        yield
    finally:
        os.close(descriptor)


def _make_folder(home: Path) -> None:
    """Make the folder of these files. In a user's own state directory, root leaves it to that user."""
    folder = machines_folder(home)
    if folder.exists():
        return
    durable.make_folder(folder)
    descriptor = folder.open_folder()
    try:
        if os.geteuid() == 0:
            os.fchown(descriptor, home.stat().st_uid, -1)
    except OSError as error:
        raise told(error, folder, "left to its user") from error
    finally:
        os.close(descriptor)


def _own_file(home: Path, suffix: str) -> StatePath:
    """Return this user's file with that suffix. If another user made a file of its name first, use a random name."""
    uid, folder = os.getuid(), machines_folder(home)
    first = folder / f"{uid}{suffix}"
    for path in (first, *_files(home, uid, suffix)):
        try:
            if path.stat().st_uid == uid:
                return path
        except FileNotFoundError:
            return path
    return folder / f"{uid}.{secrets.token_hex(8)}{suffix}"


def _files(home: Path, uid: int, suffix: str) -> list[StatePath]:
    """Return the files of that user, by name, regardless of their owner."""
    try:
        names = machines_folder(home).names()
    except FileNotFoundError:
        return []
    wanted = sorted(name for name in names if name.startswith(f"{uid}.") and name.endswith(suffix))
    return [machines_folder(home) / name for name in wanted]

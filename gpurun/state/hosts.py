"""What a user knows of the machines of hosts: when they last answered, which of them are out or cordoned, and why.

A host is *out* when a check that depends on no job finds it broken. It returns after its burn-in: so many passed checks
in a row as its inventory says. The knowledge belongs to a user, ``machines/UID.json``: the missing SSH key of one user
must not take a host from others. Passes read only the file of their own user; displays may read every file.

A machine is identified by the address that SSH connects to (`gpurun.inventory.model.Host.machine`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from gpurun.errors import StateError, StateUnavailable
from gpurun.state import durable, locks
from gpurun.state.audit import AuditLog
from gpurun.state.locks import change_lock, open_own_lock
from gpurun.state.paths import StatePath, state_error
from gpurun.state.sharing import StateDirectory

# By what gpurun knows a machine: the name of a host, the address, and the id that the machine itself gives. Pure.


@dataclass(frozen=True)
class KnownAs:
    """What is known of the machine behind a host of an inventory.

    Attributes:
        host: its name in the inventory.
        machine: the address that SSH connects to (`gpurun.inventory.model.Host.machine`); "" = unknown.
        id: what the machine calls itself; "" = unknown.
    """

    host: str
    machine: str = ""
    id: str = ""


class KnownMachines:
    """Machines by key, to be found by any name of theirs.

    Args:
        machines: pairs of a key and a machine.
    """

    def __init__(self, machines: Iterable[tuple[str, KnownAs]]) -> None:
        self._known: dict[str, KnownAs] = dict(machines)
        self._by_id: dict[str, list[str]] = {}
        self._by_machine: dict[str, list[str]] = {}
        self._by_host: dict[str, list[str]] = {}
        for key, known in self._known.items():
            self._by_id.setdefault(known.id, []).append(key)
            self._by_machine.setdefault(known.machine, []).append(key)
            self._by_host.setdefault(known.host, []).append(key)

    def same(self, known: KnownAs, *, by_name: bool = True) -> Iterator[str]:
        """Yield the keys of the entries that are this machine, the surest first; perhaps one twice.

        Args:
            by_name: an equal name is enough while one of the ids is unknown.
        """
        if known.id:
            yield from self._by_id.get(known.id, ())
        candidates = [*(self._by_machine.get(known.machine, ()) if known.machine else ())]
        candidates += self._by_host.get(known.host, ()) if by_name else ()
        for key in candidates:
            if not (known.id and self._known[key].id):
                yield key


# Cordons: hosts that get no new gangs, because people cordoned or drained them, or health checks found a problem.


CordonState = Literal["cordoned", "draining", "lost"]


@dataclass(frozen=True)
class Cordon:
    """Why a host gets no new gangs.

    Attributes:
        since_s: seconds since the epoch.
        evidence: what was seen, word for word, when a health check did it.
        until_s: draining: when gangs that cannot move are ended, seconds since the epoch; None = never.
        machine: the address that SSH connects to (`gpurun.inventory.model.Host.machine`); "" = unknown.
        id: what the machine calls itself; "" = it had not said so.
    """

    state: CordonState
    by: str
    since_s: float
    reason: str
    evidence: str = ""
    until_s: float | None = None
    machine: str = ""
    id: str = ""

    @property
    def words(self) -> str:
        """For people: ``cordoned: fan``."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


def again(old: Cordon, new: Cordon) -> Cordon:
    """Return the cordon of a host that already has one and gets another.

    A lost host stays lost until its fence or until a person uncordons it. A second drain keeps the values of the first
    unless it sets new ones.
    """
    if old.state == new.state == "draining":
        until_s = old.until_s if new.until_s is None else new.until_s
        return replace(old, reason=new.reason or old.reason, until_s=until_s)
    is_same = (old.state, old.reason) == (new.state, new.reason)
    return old if old.state == "lost" or is_same else new


def cordons_on(cordons: Mapping[str, Cordon], hosts: Iterable[KnownAs]) -> dict[str, Cordon]:
    """Return host → the cordon of its machine, for those of these hosts that have one.

    Args:
        cordons: as `Cordons.read` returns them.
    """
    if not cordons:
        return {}
    known = _index(cordons)
    keys = ((host.host, next(known.same(host), None)) for host in hosts)
    return {host: cordons[key] for host, key in keys if key is not None}


def put_cordon(cordons: dict[str, Cordon], host: KnownAs, cordon: Cordon) -> bool:
    """Give a host's machine a cordon, or change the one that it has (`again`). Returns False if nothing changes."""
    new = replace(cordon, machine=host.machine, id=host.id)
    key = next(_index(cordons).same(host), None)
    if key is None:
        key = host.host if host.host not in cordons else f"{host.host}/{host.id}"
    else:
        new = again(cordons[key], new)
    is_new = cordons.get(key) != new
    cordons[key] = new
    return is_new


def lift_cordons(cordons: dict[str, Cordon], host: KnownAs) -> list[Cordon]:
    """Remove all cordons of a host's machine, and return them."""
    keys = dict.fromkeys(_index(cordons).same(host))
    return [cordons.pop(key) for key in keys]


def _index(cordons: Mapping[str, Cordon]) -> KnownMachines:
    return KnownMachines(
        (key, KnownAs(key.partition("/")[0], cordon.machine, cordon.id)) for key, cordon in cordons.items()
    )


@dataclass(frozen=True)
class _Cordons:
    hosts: dict[str, Cordon] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class _Deadline:
    """When a drain ends gangs that cannot move.

    Attributes:
        since_s: of the drain's cordon. A later drain of the host is another one.
        machine, id: of the drain's cordon, so that whoever changes the cordon moves no deadline to another machine.
    """

    since_s: float
    until_s: float
    machine: str = ""
    id: str = ""


@dataclass(frozen=True)
class _Deadlines:
    hosts: dict[str, _Deadline] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class Cordons:
    """The cordons of a state directory, in two files."""

    home: Path

    def file(self) -> StatePath:
        """Where they are written."""
        return StateDirectory(self.home).cordons_folder() / "cordons.json"

    def deadlines_file(self) -> StatePath:
        """Where the deadlines of drains are written."""
        return StatePath(self.home) / "deadlines.json"

    def read(self) -> Mapping[str, Cordon]:
        """Return the cordons by their keys in the file; `cordons_on` says which hosts they are.

        Raises:
            StateError: a file is damaged.
        """
        try:
            found = durable.read_record(self.file(), _Cordons).hosts
        except FileNotFoundError:
            return {}
        deadlines = self._read_deadlines() if any(cordon.state == "draining" for cordon in found.values()) else {}
        return {host: replace(cordon, until_s=_until_s(cordon, deadlines.get(host))) for host, cordon in found.items()}

    def _read_deadlines(self) -> Mapping[str, _Deadline]:
        try:
            return durable.read_record(self.deadlines_file(), _Deadlines).hosts
        except FileNotFoundError:
            return {}

    def _write(self, hosts: Mapping[str, Cordon]) -> None:
        """Write cordons and deadlines; the deadlines first, because one without its drain means nothing."""
        known = self._read_deadlines()
        wanted = {
            host: _Deadline(cordon.since_s, cordon.until_s, cordon.machine, cordon.id)
            for host, cordon in hosts.items() if cordon.until_s is not None
        }  # fmt: skip
        if wanted != known:
            try:
                durable.write_record(self.deadlines_file(), _Deadlines(wanted))
            except StateError:
                if wanted.items() - known.items():
                    raise
        durable.write_record(self.file(), _Cordons({host: replace(it, until_s=None) for host, it in hosts.items()}))

    @contextmanager
    def changing(self) -> Iterator[dict[str, Cordon]]:
        """The cordons as a dictionary to change; written back, whole, unless the block raises.

        `put_cordon` and `lift_cordons` change it for a host.

        Raises:
            StateError: the file is damaged; it is left as it is.
            StateUnavailable: somebody keeps the lock of the cordons.
            UnsafeState: the state directory does not keep its users apart.
        """
        durable.make_home(self.home)
        StateDirectory(self.home).enter()
        with change_lock(self.home, "cordons.lock"):
            hosts = dict(self.read())
            before = dict(hosts)
            yield hosts
            if hosts != before:
                self._write(hosts)
                self._audit(before, hosts)

    def _audit(self, before: Mapping[str, Cordon], after: Mapping[str, Cordon]) -> None:
        for host in sorted(before.keys() | after.keys()):
            if before.get(host) != after.get(host):
                new = after.get(host)
                if new is None:
                    AuditLog(self.home).note("uncordon", target=host)
                else:
                    AuditLog(self.home).note("cordon", target=host, state=new.state, reason=new.reason)


def _until_s(cordon: Cordon, deadline: _Deadline | None) -> float | None:
    if deadline is None or cordon.state != "draining":
        return None
    is_its = (deadline.since_s, deadline.machine, deadline.id) == (cordon.since_s, cordon.machine, cordon.id)
    return deadline.until_s if is_its else None


FOLDER = "machines"
MOST_MACHINES = 20_000
MOST_LETTERS = 1000
MOST_UID_DIGITS = 10
BEFORE_ALL_S = -1.0
PATIENCE_S = 10.0
"""A write takes milliseconds."""
BURN_IN = 2
"""How many passed checks in a row bring a host back, if its inventory does not say."""
BURN_IN_GAP_S = 5.0
"""Two looks that begin within this time are one check of a burn-in: several processes may look at a moment."""


@dataclass(frozen=True)
class Out:
    """Why a host is out.

    Attributes:
        check: the name of the check that failed, as `gpurun doctor` names it.
        reason: what the check found, for people.
        since_s: when a check first found the host broken, seconds since the epoch.
        remedy: what to do; "" = unknown.
        passed: how many checks in a row have passed since; `needed`: how many bring the host back; `passed_s`: when the
            last of them began, seconds since the epoch.
    """

    check: str
    reason: str
    since_s: float
    remedy: str = ""
    passed: int = 0
    needed: int = 0
    passed_s: float = 0.0

    @property
    def words(self) -> str:
        """For people: ``out: no route to host``."""
        return f"out: {self.shown}"

    @property
    def shown(self) -> str:
        """For people: the reason, and how far the burn-in is."""
        return f"{self.reason} (passed {self.passed} of {self.needed} checks)" if self.passed else self.reason


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
        slow_times: how often a job of this user named it slow; `slow_s`: when last, seconds since the epoch;
            `slow_why`: what the job said.
    """

    name: str
    seen_s: float
    id: str = ""
    out: Out | None = None
    inventory: str = ""
    memory_mib: int | None = None
    cores: int | None = None
    begun_s: float = 0.0
    slow_times: int = 0
    slow_s: float = 0.0
    slow_why: str = ""

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


@dataclass(frozen=True)
class Machines:
    """What users' processes know of machines: a file for each user, below one folder."""

    home: Path

    def folder(self) -> StatePath:
        """Return the folder of these files."""
        return StatePath(self.home) / FOLDER

    def read(self, uid: int) -> Mapping[str, Machine]:
        """Return `Host.machine` → what that user knows of it.

        A missing file, a damaged one, and one that another user can have written count as nothing known. The next look
        replaces a damaged file.
        """
        try:
            return self._read(uid)
        except StateError:
            return {}

    def _read(self, uid: int) -> Mapping[str, Machine]:
        """Do as `read`.

        Raises:
            StateUnavailable: the file cannot be read now; what it says is not lost.
        """
        for path in self._files(uid, ".json"):
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

    def outs_stamp(self) -> frozenset[str]:
        """Return the machines that this user knows to be out. Quick enough to call repeatedly.

        Raises:
            StateError: the file cannot be examined.
        """
        try:
            found = self._own_file(".json").stat()
        except FileNotFoundError:
            return frozenset()
        return _outs_at(self.home, (found.st_ino, found.st_mtime_ns, found.st_size))

    def users(self) -> list[int]:
        """Return the uids of the users who know something of machines: for displays."""
        try:
            names = self.folder().names()
        except (FileNotFoundError, StateError):
            return []
        uids = {name.partition(".")[0] for name in names if name.endswith(".json")}
        numbers = sorted(int(uid) for uid in uids if uid.isascii() and uid.isdigit() and len(uid) <= MOST_UID_DIGITS)
        return [uid for uid in numbers if self.read(uid)]

    def note(self, looks: Mapping[str, Machine], burn_in: Mapping[str, int] | None = None) -> Mapping[str, Out]:
        """Add this user's looks at machines, durably. An out machine keeps the time since when it is out.

        A look without an id, memory or cores keeps what the machine said before. A look that began before the one that
        is known changes nothing else: its answer came late.

        Args:
            burn_in: machine → how many passed checks in a row bring it back; 1 if it is missing.

        Returns:
            The machines whose look passed and that are still out, because their burn-in is not over.

        Raises:
            StateError: the file cannot be written, or not be read now. It is left as it is.
        """
        if not looks:
            return {}
        needed = burn_in or {}
        with self.own_lock("lock"):
            before = self._read(os.getuid())
            seen = {
                machine: _joined(before.get(machine), look, needed.get(machine, 1)) for machine, look in looks.items()
            }
            self._write({**before, **seen})
        burning = {machine: known.out for machine, known in seen.items() if looks[machine].out is None}
        return {machine: out for machine, out in burning.items() if out is not None and out.passed}

    def note_slow(self, machine: str, host: str, inventory: str, why: str, *, now_s: float | None = None) -> None:
        """Count, durably, that a job of this user's named a host slow.

        Args:
            machine: `gpurun.inventory.model.Host.machine`.
            inventory: the canonical path of the inventory that names it `host`.
            why: for people.
            now_s: seconds since the epoch; None = now.

        Raises:
            StateError: the file cannot be written, or not be read now. It is left as it is.
        """
        at_s = time.time() if now_s is None else now_s
        with self.own_lock("lock"):
            before = self._read(os.getuid())
            known = before.get(machine) or Machine(host, at_s, inventory=inventory)
            named = replace(known, slow_times=known.slow_times + 1, slow_s=at_s, slow_why=why[:MOST_LETTERS])
            self._write({**before, machine: named})

    def _write(self, machines: Mapping[str, Machine]) -> None:
        newest = sorted(machines, key=lambda machine: machines[machine].as_of_s)[-MOST_MACHINES:]
        durable.write_record(self._own_file(".json"), _File({machine: machines[machine] for machine in newest}))

    @contextmanager
    def own_lock(self, name: str, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Hold a lock of this user's that no other user can hold. Its file lies beside what is known of machines.

        Args:
            name: which one.
            patience_s: give up after this long.

        Raises:
            StateUnavailable: another process of this user holds it.
            StateError: its file cannot be opened.
        """
        self._make_folder()
        path = self._own_file(f".{name}")
        descriptor = open_own_lock(path)
        try:
            if not locks.take_within(descriptor, patience_s):
                raise StateUnavailable(f"the file is locked by {locks.holders_in_words(descriptor)}", where=str(path))
            yield
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        """Make the folder of these files. In a user's own state directory, root leaves it to that user."""
        folder = self.folder()
        if folder.exists():
            return
        durable.make_folder(folder)
        descriptor = folder.open_folder()
        try:
            if os.geteuid() == 0:
                os.fchown(descriptor, self.home.stat().st_uid, -1)
        except OSError as error:
            raise state_error(error, folder, "left to its user") from error
        finally:
            os.close(descriptor)

    def _own_file(self, suffix: str) -> StatePath:
        """Return this user's file with that suffix. If another user made one of its name first, use a random name."""
        uid, folder = os.getuid(), self.folder()
        first = folder / f"{uid}{suffix}"
        for path in (first, *self._files(uid, suffix)):
            try:
                if path.stat().st_uid == uid:
                    return path
            except FileNotFoundError:
                return path
        return folder / f"{uid}.{secrets.token_hex(8)}{suffix}"

    def _files(self, uid: int, suffix: str) -> list[StatePath]:
        """Return the files of that user, by name, regardless of their owner."""
        try:
            names = self.folder().names()
        except FileNotFoundError:
            return []
        wanted = sorted(name for name in names if name.startswith(f"{uid}.") and name.endswith(suffix))
        return [self.folder() / name for name in wanted]


def _not_in_future(known: Machine, now_s: float) -> Machine:
    """Return a look in the future as the oldest one: the clock was set back, and every other look is newer."""
    return known if max(known.seen_s, known.begun_s) <= now_s else replace(known, begun_s=BEFORE_ALL_S)


@lru_cache(maxsize=1)
def _outs_at(home: Path, _stamp: tuple[int, int, int]) -> frozenset[str]:
    return frozenset(address for address, known in Machines(home).read(os.getuid()).items() if known.out is not None)


def _joined(before: Machine | None, look: Machine, burn_in: int) -> Machine:
    if before is not None:
        look = replace(look, slow_times=before.slow_times, slow_s=before.slow_s, slow_why=before.slow_why)
    if before is not None and look.as_of_s < before.as_of_s:
        before, look = look, before
    elif before is not None and before.out is not None and look.out is None:
        look = replace(look, out=_burnt_in(before.out, look.as_of_s, burn_in))
    out = look.out
    if out is not None:
        since_s = out.since_s if before is None or before.out is None else min(before.out.since_s, out.since_s)
        out = replace(out, reason=out.reason[:MOST_LETTERS], since_s=since_s, remedy=out.remedy[:MOST_LETTERS])
    known = before if before is not None else look
    return replace(
        look, id=look.id or known.id, out=out, memory_mib=look.memory_mib or known.memory_mib,
        cores=look.cores or known.cores,
    )  # fmt: skip


def _burnt_in(out: Out, passed_s: float, burn_in: int) -> Out | None:
    """Return why a machine is still out after one more passed check, which began at `passed_s`; None if it is back."""
    if out.passed and abs(passed_s - out.passed_s) < BURN_IN_GAP_S:
        return replace(out, needed=burn_in) if out.passed < burn_in else None
    passed = out.passed + 1
    return replace(out, passed=passed, needed=burn_in, passed_s=passed_s) if passed < burn_in else None

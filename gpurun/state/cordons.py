"""Cordons: hosts that get no new gangs, because people cordoned or drained them, or health checks found a problem.

Cordons are state, not inventory: ``$GPURUN_HOME/cordons.json`` has who, when and why. The deadlines of drains are in
``$GPURUN_HOME/deadlines.json``. A deadline stops jobs. So in a shared state directory only root can write that file,
while every member can write the cordons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpurun.errors import StateError
from gpurun.state import audit, durable
from gpurun.state.change_lock import change_lock
from gpurun.state.path import StatePath
from gpurun.state.shared import cordons_folder, enter

CordonState = Literal["cordoned", "draining", "lost"]


@dataclass(frozen=True)
class Cordon:
    """Why a host gets no new gangs.

    Attributes:
        since_s: seconds since the epoch.
        evidence: what was seen, word for word, when a health check did it.
        until_s: draining: when gangs that cannot move are ended, seconds since the epoch; None = never.
    """

    state: CordonState
    by: str
    since_s: float
    reason: str
    evidence: str = ""
    until_s: float | None = None

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


@dataclass(frozen=True)
class _File:
    hosts: dict[str, Cordon] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class _Deadline:
    """When a drain ends gangs that cannot move.

    Attributes:
        since_s: of the drain's cordon. A later drain of the host is another one.
    """

    since_s: float
    until_s: float


@dataclass(frozen=True)
class _Deadlines:
    hosts: dict[str, _Deadline] = field(default_factory=dict)
    version: int = 1


def cordons_file(home: Path) -> StatePath:
    """Where they are written."""
    return cordons_folder(home) / "cordons.json"


def deadlines_file(home: Path) -> StatePath:
    """Where the deadlines of drains are written."""
    return StatePath(home) / "deadlines.json"


def read_cordons(home: Path) -> Mapping[str, Cordon]:
    """Cordons by host. Raises StateError when a file is damaged."""
    try:
        found = durable.read_record(cordons_file(home), _File).hosts
    except FileNotFoundError:
        return {}
    deadlines = _read_deadlines(home) if any(cordon.state == "draining" for cordon in found.values()) else {}
    return {host: replace(cordon, until_s=_until_s(cordon, deadlines.get(host))) for host, cordon in found.items()}


def _read_deadlines(home: Path) -> Mapping[str, _Deadline]:
    try:
        return durable.read_record(deadlines_file(home), _Deadlines).hosts
    except FileNotFoundError:
        return {}


def _until_s(cordon: Cordon, deadline: _Deadline | None) -> float | None:
    if deadline is None or cordon.state != "draining" or deadline.since_s != cordon.since_s:
        return None
    return deadline.until_s


def _write(home: Path, hosts: Mapping[str, Cordon]) -> None:
    """Write cordons and deadlines; the deadlines first, because one without its drain means nothing."""
    known = _read_deadlines(home)
    wanted = {
        host: _Deadline(cordon.since_s, cordon.until_s) for host, cordon in hosts.items() if cordon.until_s is not None
    }
    if wanted != known:
        try:
            durable.write_record(deadlines_file(home), _Deadlines(wanted))
        except StateError:
            if wanted.items() - known.items():
                raise
    durable.write_record(cordons_file(home), _File({host: replace(it, until_s=None) for host, it in hosts.items()}))


@contextmanager
def changing_cordons(home: Path) -> Iterator[dict[str, Cordon]]:
    """The cordons as a dictionary to change; written back, whole, unless the block raises.

    Raises:
        StateError: the file is damaged; it is left as it is.
        StateUnavailable: somebody keeps the lock of the cordons.
        UnsafeState: the state directory does not keep its users apart.
    """
    durable.make_home(home)
    enter(home)
    with change_lock(home, "cordons.lock"):
        hosts = dict(read_cordons(home))
        before = dict(hosts)
        yield hosts
        if hosts != before:
            _write(home, hosts)
            _audit(home, before, hosts)


def _audit(home: Path, before: Mapping[str, Cordon], after: Mapping[str, Cordon]) -> None:
    for host in sorted(before.keys() | after.keys()):
        if before.get(host) != after.get(host):
            new = after.get(host)
            if new is None:
                audit.note(home, "uncordon", target=host)
            else:
                audit.note(home, "cordon", target=host, state=new.state, reason=new.reason)

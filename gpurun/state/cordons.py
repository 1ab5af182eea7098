"""Cordons: hosts that get no new gangs, because people cordoned or drained them, or health checks found a problem.

Cordons are state, not inventory: ``$GPURUN_HOME/cordons.json`` has who, when and why. A cordon belongs to a machine,
whatever an inventory calls it (`gpurun.state.known_as`). Its key in the file is the host's name when it was cordoned;
if another machine of this name has a cordon, the key is ``name/id``. The deadlines of drains are in
``$GPURUN_HOME/deadlines.json``. A deadline stops jobs. So in a shared state directory only root can write that file,
while every member can write the cordons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpurun.errors import StateError
from gpurun.state import audit, durable
from gpurun.state.change_lock import change_lock
from gpurun.state.known_as import KnownAs, KnownMachines
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
        cordons: as `read_cordons` returns them.
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


def cordons_file(home: Path) -> StatePath:
    """Where they are written."""
    return cordons_folder(home) / "cordons.json"


def deadlines_file(home: Path) -> StatePath:
    """Where the deadlines of drains are written."""
    return StatePath(home) / "deadlines.json"


def read_cordons(home: Path) -> Mapping[str, Cordon]:
    """Return the cordons by their keys in the file; `cordons_on` says which hosts they are.

    Raises:
        StateError: a file is damaged.
    """
    try:
        found = durable.read_record(cordons_file(home), _Cordons).hosts
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
    if deadline is None or cordon.state != "draining":
        return None
    is_its = (deadline.since_s, deadline.machine, deadline.id) == (cordon.since_s, cordon.machine, cordon.id)
    return deadline.until_s if is_its else None


def _write(home: Path, hosts: Mapping[str, Cordon]) -> None:
    """Write cordons and deadlines; the deadlines first, because one without its drain means nothing."""
    known = _read_deadlines(home)
    wanted = {
        host: _Deadline(cordon.since_s, cordon.until_s, cordon.machine, cordon.id)
        for host, cordon in hosts.items() if cordon.until_s is not None
    }  # fmt: skip
    if wanted != known:
        try:
            durable.write_record(deadlines_file(home), _Deadlines(wanted))
        except StateError:
            if wanted.items() - known.items():
                raise
    durable.write_record(cordons_file(home), _Cordons({host: replace(it, until_s=None) for host, it in hosts.items()}))


@contextmanager
def changing_cordons(home: Path) -> Iterator[dict[str, Cordon]]:
    """The cordons as a dictionary to change; written back, whole, unless the block raises.

    `put_cordon` and `lift_cordons` change it for a host.

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

"""Hosts that get no new gangs: cordoned or draining by people, lost or suspect by health checks.

State, not inventory: it lives in ``$GPURUN_HOME/cordons.json`` with who, when and why, never in the file that
people keep in git.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    """

    state: CordonState
    by: str
    since_s: float
    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class _File:
    hosts: dict[str, Cordon] = field(default_factory=dict)
    version: int = 1


def cordons_file(home: Path) -> StatePath:
    """Where they are written."""
    return cordons_folder(home) / "cordons.json"


def read_cordons(home: Path) -> Mapping[str, Cordon]:
    """Cordons by host. Raises StateError when the file is damaged."""
    try:
        return durable.read_record(cordons_file(home), _File).hosts
    except FileNotFoundError:
        return {}


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
            durable.write_record(cordons_file(home), _File(hosts))
            _audit(home, before, hosts)


def _audit(home: Path, before: Mapping[str, Cordon], after: Mapping[str, Cordon]) -> None:
    for host in sorted(before.keys() | after.keys()):
        if before.get(host) != after.get(host):
            new = after.get(host)
            if new is None:
                audit.note(home, "uncordon", target=host)
            else:
                audit.note(home, "cordon", target=host, state=new.state, reason=new.reason)

"""Show what memory and cores a job may use on its hosts (`gpurun.launch.share`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpurun.errors import StateError
from gpurun.inventory.folding import fold
from gpurun.launch.share import HostShare, alike

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder


@dataclass(frozen=True)
class _Host:
    host: str = ""
    share: HostShare | None = None


@dataclass(frozen=True)
class _Planned:
    """The parts of ``plan.json`` that are shown."""

    hosts: tuple[_Host, ...] = ()


def shares_of(folder: JobFolder) -> dict[str, HostShare]:
    """Return host → share in the plan of the job's last attempt; empty if no attempt has come so far."""
    from gpurun.state import durable

    try:
        planned = durable.read_record(folder.path / "plan.json", _Planned)
    except (FileNotFoundError, StateError):
        return {}
    return {each.host: each.share for each in planned.hosts if each.share is not None}


def lines(given: Mapping[str, HostShare]) -> list[str]:
    """Return a line for each different share, with its hosts."""
    return [f"{fold(hosts)}: {words}" for words, hosts in alike(given).items()]

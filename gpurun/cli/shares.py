"""Show what memory and cores a job may use on its hosts (`gpurun.launch.share`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpurun.errors import StateError
from gpurun.inventory.folding import fold
from gpurun.launch.share import HostShare, alike

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.spec import Grant, JobSpec


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


def expected(spec: JobSpec, grants: Sequence[Grant], inventory: Inventory) -> dict[str, HostShare]:
    """Return host → share of a gang that has not started yet, by what this user knows of the hosts."""
    from gpurun.facts.hardware import DockerFacts
    from gpurun.launch.share import shares
    from gpurun.state.home import home
    from gpurun.state.machines import read_machines

    machines = read_machines(home(os.environ), os.getuid())
    there = [grant for grant in grants if grant.host in inventory.by_name]
    known = {}
    for grant in there:
        machine = machines.get(inventory.by_name[grant.host].machine)
        if machine is not None and machine.memory_mib is not None:
            known[grant.host] = DockerFacts(memory_bytes=machine.memory_mib << 20, cores=machine.cores)
    return shares(spec, there, inventory, known=known)


def lines(given: Mapping[str, HostShare]) -> list[str]:
    """Return a line for each different share, with its hosts."""
    return [f"{fold(hosts)}: {words}" for words, hosts in alike(given).items()]

"""What the inventory's commands share: their options, where things are, who has what."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpurun.inventory.leased import JobsByHost
    from gpurun.inventory.model import Host, Inventory
    from gpurun.state.cordons import Cordon

InventoryOption = Annotated[
    str | None, typer.Option("--inventory", "-i", metavar="FILE", help="Inventory file.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
HostsArgument = Annotated[
    str, typer.Argument(metavar="HOSTS", help="Host set, such as gpu-r1-[01-16] or @rack:r1&!@cordoned.")
]
SomeHostsArgument = Annotated[
    str | None,
    typer.Argument(metavar="[HOSTS]", help="Host set, such as gpu-r1-[01-16] or @rack:r1.", show_default=False),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the difference, change nothing.")]


@dataclass(frozen=True)
class Cluster:
    """An inventory with the state that belongs to it."""

    inventory: Inventory
    home: Path

    @cached_property
    def cordons(self) -> Mapping[str, Cordon]:
        """Why hosts get no new gangs."""
        from gpurun.state.cordons import read_cordons

        return read_cordons(self.home)

    def choose(self, selection: str | None) -> tuple[Host, ...]:
        """The hosts a person means; all of them, if none are named."""
        if selection is None:
            return self.inventory.hosts
        from gpurun.inventory.hostset import select

        names = select(self.inventory, selection, state_groups(self.cordons))
        return tuple(self.inventory.by_name[name] for name in names)


def state_groups(cordons: Mapping[str, Cordon]) -> dict[str, list[str]]:
    """``@cordoned``: every host that gets no new gangs; ``@draining`` and ``@lost`` are among them."""
    groups: dict[str, list[str]] = {"cordoned": list(cordons), "draining": [], "lost": []}
    for host, cordon in cordons.items():
        if cordon.state != "cordoned":
            groups[cordon.state].append(host)
    return groups


def state_home() -> Path:
    """The state directory."""
    from gpurun.state.home import home

    return home(os.environ)


def located(explicit: str | None) -> Path:
    """The inventory file that is meant."""
    from gpurun.inventory.locate import find

    return find(explicit, os.environ)


def cluster(explicit: str | None) -> Cluster:
    """The inventory that is meant, and its state."""
    from gpurun.inventory.load import load

    return Cluster(load(located(explicit)), state_home())


class Leases:
    """The leases of a state directory, as `gpurun.inventory.leased` wants them."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @contextmanager
    def frozen(self) -> Iterator[JobsByHost]:
        """See `gpurun.inventory.leased.LeaseView`."""
        from gpurun.leases.allocator import allocator_lock
        from gpurun.leases.store import LeaseStore

        store = LeaseStore(self._home)
        if not store.folder.exists():
            yield {}
            return
        with allocator_lock(self._home):
            holdings = store.read_all()
            if holdings.damaged:
                raise holdings.damaged[0]
            jobs: dict[str, list[str]] = {}
            for lease in holdings.leases:
                for grant in lease.grants:
                    jobs.setdefault(grant.host, []).append(lease.job)
            yield jobs

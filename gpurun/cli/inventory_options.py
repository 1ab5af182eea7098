"""Options of the inventory's commands, and functions that find the state directory, the inventory and leases."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpurun.inventory.leased import JobsByMachine
    from gpurun.leases.cluster import Cluster

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show how the inventory would change.")]


def state_home() -> Path:
    """Return the state directory."""
    from gpurun.state.home import home

    return home(os.environ)


def located(explicit: str | None) -> Path:
    """Return the inventory file: the given path, else the default (`gpurun.inventory.locate`)."""
    from gpurun.inventory.locate import find

    return find(explicit, os.environ)


def cluster(explicit: str | None) -> Cluster:
    """Load the inventory (`located` says which) and its state."""
    from gpurun.leases.cluster import open_cluster

    return open_cluster(explicit, os.environ)


class Leases:
    """The leases of a state directory, in the form that `gpurun.inventory.leased` needs."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @contextmanager
    def frozen(self) -> Iterator[JobsByMachine]:
        """See `gpurun.inventory.leased.LeaseView`."""
        from gpurun.leases.allocator import allocator_lock
        from gpurun.leases.occupancy import Occupancy
        from gpurun.leases.store import LeaseStore

        store = LeaseStore(self._home)
        if not store.folder.exists():
            yield {}
            return
        with allocator_lock(self._home):
            holdings = store.read_all()
            if holdings.damaged:
                raise holdings.damaged[0]
            yield Occupancy(holdings.leases).jobs_by_machine()

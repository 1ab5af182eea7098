"""What commands open: the state directory, the inventory, leases, and jobs."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpurun.inventory.change import InventoryFile, JobsByMachine
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.store import JobStore
    from gpurun.leases.look import Cluster


def state_home() -> Path:
    """Return the state directory."""
    from gpurun.state.paths import home

    return home(os.environ)


def located(explicit: str | None) -> Path:
    """Return the inventory file: the given path, else the default (`gpurun.inventory.read`)."""
    from gpurun.inventory.read import find_inventory

    return find_inventory(explicit, os.environ)


def cluster(explicit: str | None) -> Cluster:
    """Load the inventory (`located` says which) and its state."""
    from gpurun.leases.look import open_cluster

    return open_cluster(explicit, os.environ)


class Leases:
    """The leases of a state directory, in the form that `gpurun.inventory.change` needs."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @contextmanager
    def frozen(self) -> Iterator[JobsByMachine]:
        """See `gpurun.inventory.change.LeaseView`."""
        from gpurun.leases.occupancy import Occupancy
        from gpurun.leases.store import AllocatorLock, LeaseStore

        store = LeaseStore(self._home)
        if not store.folder.exists():
            yield {}
            return
        with AllocatorLock(self._home).held():
            holdings = store.read_all()
            if holdings.damaged:
                raise holdings.damaged[0]
            yield Occupancy(holdings.leases).jobs_by_machine()


def inventory_file(path: Path) -> InventoryFile:
    """Return an inventory's file, with its history and its leases."""
    from gpurun.inventory.change import InventoryFile

    home = state_home()
    return InventoryFile(path, home, Leases(home))


def open_store() -> JobStore:
    """Recover what a crash left behind, then return the job store. Every command that reads jobs does this."""
    from gpurun.jobs.store import JobStore
    from gpurun.state.filesystem import check_locks
    from gpurun.state.paths import home
    from gpurun.state.sharing import StateDirectory

    state = home(os.environ)
    StateDirectory(state).enter()
    check_locks(state)
    if any(folder.is_dir() and any(folder.iterdir()) for folder in (state / "leases", state / "live")):
        from gpurun.head.waiter import Waiter

        with suppress(StateError):  # `status` and `recover` report damage; other commands do not
            Waiter(state).resume()
    if (state / "sweeps").is_dir():
        from gpurun.studies.runner import Conductors

        Conductors(state).ensure()
    return JobStore(state)


def find_job(text: str) -> JobFolder:
    """Find a job by id or name. Raises BadInput if no job or several jobs match."""
    return open_store().find(text)

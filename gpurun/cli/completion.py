"""Words that the shell completes: jobs, hosts and pools as they are now.

A completion never fails: if gpurun cannot read a file, it offers no words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps

MOST_JOBS = 100


def _quietly(find: Callable[[str], Iterable[str]]) -> Callable[[str], list[str]]:
    @wraps(find)
    def words(incomplete: str) -> list[str]:
        try:
            return [word for word in find(incomplete) if word.startswith(incomplete) and word.isprintable()]
        except Exception:  # noqa: BLE001 - an error message would appear in the command line that a person types
            return []

    return words


@_quietly
def jobs(incomplete: str) -> Iterable[str]:
    """Complete ids and names of jobs that have not ended, and of the jobs that ended last."""
    from gpurun.jobs.store import JobStore
    from gpurun.state.home import home

    store = JobStore(home(os.environ))
    ids = [*store.live_ids(), *store.recently_ended(MOST_JOBS)][:MOST_JOBS]
    names = () if incomplete.startswith("j-") else [record.name for record in store.records(lambda _: None, ids=ids)]
    return ["@last", *ids, *dict.fromkeys(names)]


@_quietly
def states(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete states of jobs."""
    from gpurun.jobs.states import State

    return State.__members__


@_quietly
def hosts(incomplete: str) -> Iterable[str]:
    """Complete the last host or group of a host set, such as ``gpu-r1-01,@ra``."""
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find

    inventory = load(find(None, os.environ))
    before, comma, _ = incomplete.rpartition(",")
    racks = [f"@rack:{rack}" for rack in dict.fromkeys(host.rack for host in inventory.hosts)]
    generations = [f"@generation:{name}" for name in dict.fromkeys(host.generation for host in inventory.hosts)]
    states = ["@cordoned", "@draining", "@lost"]
    return (before + comma + word for word in (*(host.name for host in inventory.hosts), *racks, *generations, *states))


@_quietly
def pools(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete names of pools."""
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find

    return (pool.name for pool in load(find(None, os.environ)).pools)

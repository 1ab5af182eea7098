"""``gpurun inventory drain``: report what happens to the gangs on the hosts, and wait until the hosts are empty."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gpurun.cli.patience import Patience, jobs_in_words
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import NotYours, StateError
from gpurun.head.caretaker import Caretaker
from gpurun.state import clock

if TYPE_CHECKING:
    from pathlib import Path

    from gpurun.leases.cluster import Cluster
    from gpurun.leases.view import View
    from gpurun.scheduler.drain import Departure

POLL_S = 0.5
PASS_EVERY_S = 5.0


def refuse_deadline(home: Path) -> None:
    """Raise NotYours if several users share the state directory: the deadline would stop other users' jobs."""
    from gpurun.state.shared import is_shared

    if is_shared(home) and os.getuid() != 0:
        raise NotYours(
            "several users share the state directory, so only root may set a deadline, which stops other users' jobs",
            hint="leave out --deadline: gpurun then moves the jobs that can move, and waits for the other jobs",
        )


def report_drain(found: Cluster, names: Sequence[str], changed: Sequence[str], *, as_json: bool) -> None:
    """Print which jobs leave the hosts, which jobs the drain waits for, and why."""
    view, leaving = _look(found, names)
    if as_json:
        print_json(_document(found, view, names, changed, leaving))
    else:
        _say(leaving, view.now_s)


def wait_until_empty(found: Cluster, names: Sequence[str], changed: Sequence[str], *, as_json: bool) -> None:
    """Wait until no job holds GPUs of the hosts. Restarts supervisors that died meanwhile.

    Raises:
        StateError: a host is lost, or somebody uncordoned a host meanwhile.
    """
    from gpurun.jobs.store import JobStore

    store, caretaker, told, pass_s = JobStore(found.home), Caretaker(), set[tuple[str, str]](), 0.0
    patience = Patience()
    while True:
        view, leaving = _look(found, names)
        states = _states(found, view, names)
        if states == {"drained"}:
            break
        if other := states - {"draining", "drained"}:
            raise StateError(
                f"gpurun does not drain all named hosts any more: a host is {', '.join(sorted(other))}",
                hint="run `gpurun status` to see the state of each host. gpurun cannot drain a lost host",
            )
        _say([each for each in leaving if (each.gang, each.fate) not in told], view.now_s)
        told.update((each.gang, each.fate) for each in leaving)
        folders = [store.get(each.gang) for each in leaving if each.gang in view.jobs]
        if any(each.fate == "ends" for each in leaving) and time.monotonic() >= pass_s:
            _have_them_ended(found.home)
            pass_s = time.monotonic() + PASS_EVERY_S
        caretaker.look(folders)
        patience.tell(partial(jobs_in_words, folders))
        time.sleep(POLL_S)
    if as_json:
        print_json(_document(found, view, names, changed, ()))
    else:
        from gpurun.inventory.hostset import fold

        say(f"{fold(names)}: drained")


def _have_them_ended(home: Path) -> None:
    """Run a scheduling pass, which stops jobs at the deadline. In a shared state directory only root's pass does so."""
    from gpurun.head.spawn import run_pass_and_start

    run_pass_and_start(home, now_s=clock.now_s(), environ=os.environ)


def _look(found: Cluster, names: Sequence[str]) -> tuple[View, tuple[Departure, ...]]:
    from gpurun.leases.cluster import Cluster
    from gpurun.leases.look import look

    view = look(found.home, now_s=clock.now_s())
    return view, Cluster(found.inventory, found.home).departures(view, names)


def _states(found: Cluster, view: View, names: Sequence[str]) -> set[str]:
    from gpurun.leases.cluster import Cluster

    rows = Cluster(found.inventory, found.home).rows(view)
    return {row.state for row in rows if row.host.name in names}


def _say(leaving: Sequence[Departure], now_s: float) -> None:
    from gpurun.scheduler.drain import in_words

    for each in leaving:
        say(printable(f"  {each.gang} {in_words(each, now_s)}"))


def _document(
    found: Cluster, view: View, names: Sequence[str], changed: Sequence[str], leaving: Sequence[Departure]
) -> dict[str, Any]:
    states = _states(found, view, names)
    state = "drained" if states == {"drained"} else "draining"
    jobs = [{"job": each.gang, **{key: value for key, value in asdict(each).items() if key != "gang"}}
            for each in leaving]  # fmt: skip
    return {"hosts": list(names), "changed": list(changed), "state": state, "jobs": jobs}

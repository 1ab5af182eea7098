"""Store a new sweep and start it; restart a stopped one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpurun.environments.log import Report
from gpurun.errors import BadInput
from gpurun.head.origin import origin_of
from gpurun.head.submission import pin
from gpurun.inventory.model import Inventory
from gpurun.jobs.recipe import check_length
from gpurun.state import audit
from gpurun.state.shared import enter
from gpurun.sweeps.plan import SweepPlan, job_of, longest_point
from gpurun.sweeps.search import searcher_for
from gpurun.sweeps.starting import ensure_conductors
from gpurun.sweeps.store import Journal, SweepFolder, SweepStore
from gpurun.sweeps.trials import JournalEntry, Outcome


def submit_sweep(
    plan: SweepPlan,
    inventory: Inventory,
    store: SweepStore,
    environ: Mapping[str, str],
    on_build: Report = lambda *_: None,
) -> SweepFolder:
    """Store a sweep, with its job's image and code as they are now, and start its conductor.

    Raises:
        BadInput: the sweep needs Optuna which is not installed, or its parameters make a command too long; an image is
            not on this machine, or the workdir cannot be read.
        StateError: it cannot be stored.
    """
    enter(store.home)
    searcher_for(plan)
    check_length(job_of(plan, "s-00000000", plan.trials, longest_point(plan)))
    (pinned,), codes = pin([plan.template], inventory, store.home, environ, on_build)
    origin = origin_of(None if pinned.workdir is None else Path(pinned.workdir))
    folder = store.create(replace(plan, template=pinned, origin=origin), codes.get(pinned.code))
    audit.note(store.home, "sweep", sweep=folder.id, name=plan.name, trials=plan.trials)
    ensure_conductors(store.home, environ)
    return folder


def reopen(folder: SweepFolder, *, also_failed: bool) -> int:
    """Continue an ended sweep; return how many trials run again.

    Raises:
        BadInput: its conductor lives, or nothing is left to do.
    """
    descriptor = folder.take_lock()
    if descriptor is None:
        raise BadInput(f"{folder.id} has not ended", hint=f"stop the sweep first: gpurun sweep stop {folder.id}")
    try:
        outcomes: tuple[Outcome, ...] = ("cancelled", "failed") if also_failed else ("cancelled",)
        trials, now_s = folder.trials(), time.time()
        again = [JournalEntry("again", now_s, t.number) for t in trials.by_number.values() if t.outcome in outcomes]
        if not again and not trials.unended() and len(trials.by_number) >= folder.plan().trials:
            raise BadInput(f"all trials of {folder.id} have ended", hint="--failed runs the failed trials again")
        journal = Journal(folder)
        try:
            journal.add(*again)
        finally:
            journal.close()
        folder.stop.unlink(missing_ok=True)
        folder.done.unlink(missing_ok=True)
        return len(again)
    finally:
        os.close(descriptor)

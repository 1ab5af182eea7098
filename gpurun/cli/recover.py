"""``gpurun recover``: pick up what a crash left, and say what only a person can decide."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.printing import print_json, say
from gpurun.errors import BadInput, StateError


def recover(
    discard: Annotated[
        str | None,
        typer.Option(
            "--discard", metavar="FILE", help="Move a damaged lease out of the way, after you checked its GPUs."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Replace supervisors that died, give queued jobs another look, and name every damaged lease."""
    from gpurun.jobs.home import home
    from gpurun.jobs.shared import enter
    from gpurun.leases.store import LeaseStore
    from gpurun.supervisor.spawn import adopt_orphans, run_pass_and_start
    from gpurun.supervisor.waiter import ensure_waiter, has_queued

    state = home(os.environ)
    enter(state)
    if discard is not None:
        say(f"moved to {_discard(state, Path(discard).name)}")
    adopted = adopt_orphans(state, os.environ)
    damaged = LeaseStore(state).read_all().damaged
    if not damaged:
        run_pass_and_start(state, now_s=time.time(), environ=os.environ)
        if has_queued(state, os.getuid()):
            ensure_waiter(state, os.environ)
    if as_json:
        print_json({"adopted": list(adopted), "damaged": [{"file": e.where, "reason": e.message} for e in damaged]})
    else:
        say(f"adopted: {', '.join(adopted) or 'nothing was orphaned'}")
        for error in damaged:
            say(f"damaged: {error}")
            say("  → make sure that nothing of it runs (`gpurun doctor`, `docker ps` on the hosts), then")
            say(f"    gpurun recover --discard {Path(error.where or '').name}")
    if damaged:
        raise typer.Exit(StateError.exit_code)


def _discard(home: Path, name: str) -> Path:
    """Move a damaged lease to ``discarded/``; a healthy one is refused.

    Raises:
        BadInput: there is no such damaged lease.
    """
    from gpurun.jobs import audit
    from gpurun.leases.allocator import allocator_lock
    from gpurun.leases.store import LeaseStore

    with allocator_lock(home):
        store = LeaseStore(home)
        if not any(Path(error.where or "").name == name for error in store.read_all().damaged):
            raise BadInput(f"{name!r} is not a damaged lease", hint="`gpurun recover` lists them")
        kept = home / "discarded"
        kept.mkdir(exist_ok=True)
        target = kept / f"{time.time_ns()}-{name}"
        (store.folder / name).rename(target)
        audit.note(home, "discard", lease=name, kept=str(target))
        return target

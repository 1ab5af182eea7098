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
    install: Annotated[
        bool, typer.Option("--install", help="Have systemd run this at boot and every minute: root's for everybody.")
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take that back.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --install: print the units only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Replace supervisors that died, give queued jobs another look, and name every damaged lease."""
    from gpurun.jobs.store import JobStore
    from gpurun.leases.store import LeaseStore
    from gpurun.state import audit
    from gpurun.state.home import home
    from gpurun.state.shared import enter
    from gpurun.supervisor.spawn import adopt_orphans, run_pass_and_start
    from gpurun.supervisor.waiter import ensure_waiter, has_queued

    if install or uninstall or dry_run:
        _change_timer(install=install, uninstall=uninstall, dry_run=dry_run)
        return
    state = home(os.environ)
    enter(state)
    if discard is not None:
        say(f"moved to {_discard(state, Path(discard).name)}")
    audit.bound(state)
    JobStore(state).sweep(now_s=time.time())
    adopted = adopt_orphans(state, os.environ)
    damaged = LeaseStore(state).read_all().damaged
    if not damaged:
        run_pass_and_start(state, now_s=time.time(), environ=os.environ)
        if has_queued(state, os.getuid()):
            ensure_waiter(state, os.environ)
    for problem in _recover_others(state):
        say(f"not recovered: {problem}")
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


def _change_timer(*, install: bool, uninstall: bool, dry_run: bool) -> None:
    from gpurun.cli import recover_timer

    if install and uninstall:
        raise BadInput("--install and --uninstall contradict each other")
    if uninstall:
        recover_timer.uninstall()
    else:
        recover_timer.install(dry_run=dry_run)


def _recover_others(home: Path) -> list[str]:
    """Root recovers what every user has in a shared state directory, as that user; what was wrong."""
    from gpurun.state.shared import is_shared
    from gpurun.supervisor.everybody import owners, recover_as

    if os.getuid() != 0 or not is_shared(home):
        return []
    return [problem for uid in owners(home) if (problem := recover_as(uid, home, os.environ))]


def _discard(home: Path, name: str) -> Path:
    """Move a damaged lease to ``discarded/``; a healthy one is refused.

    Raises:
        BadInput: there is no such damaged lease.
    """
    from gpurun.leases.allocator import allocator_lock
    from gpurun.leases.store import LeaseStore
    from gpurun.state import audit, durable

    with allocator_lock(home):
        store = LeaseStore(home)
        if not any(Path(error.where or "").name == name for error in store.read_all().damaged):
            raise BadInput(f"{name!r} is not a damaged lease", hint="`gpurun recover` lists them")
        kept = home / "discarded"
        durable.make_folder(kept)
        target = kept / f"{time.time_ns()}-{name}"
        (store.folder / name).rename(target)
        durable.sync_folder(kept)
        durable.sync_folder(store.folder)
        audit.note(home, "discard", lease=name, kept=str(target))
        return target

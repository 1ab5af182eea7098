"""``gpurun sweep run | stop | resume``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.job_options import DryRunOption, Given, flags_of, job_options
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.cli.submit import spec_of
from gpurun.errors import BadInput, NotYours
from gpurun.jobs.recipe_keys import SETTINGS, SWEEP
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.recipe import Recipe
    from gpurun.sweeps.plan import SweepPlan
    from gpurun.sweeps.store import SweepFolder, SweepStore
    from gpurun.sweeps.wish import Wish

POLL_S = 1.0
NO_SWEEP = "s-00000000"
"""The id of a sweep that is only thought of."""
NOT_RUN = "the sweep's process does not run now; the owner's next gpurun command starts the process"
SweepArgument = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP",
        help="SWEEP is a sweep's id, the beginning of the id, or the sweep's name.",
        autocompletion=completion.sweeps,
    ),
]


@job_options("sweep run")
def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [NAME=RANGE…]", help="The recipe. For --random and --tpe, add ranges such as layers=2..8."
        ),
    ] = None,
    inventory: InventoryOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the sweep until the sweep ends.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Run a recipe, or a command in a Docker image, with many combinations of parameters. Each combination is one job.

    gpurun sweep recipes/fashion-mnist --grid lr=0.1,0.01 --metric accuracy:max

    gpurun sweep -n 1 --image me/train:1 --tpe 50 lr=log:1e-5..1e-1 --metric loss:min --as-flags -- python3 train.py
    """
    from gpurun.environments.log import BuildLines
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find
    from gpurun.jobs.recipe import lines_of
    from gpurun.jobs.recipe import read as read_recipe
    from gpurun.sweeps.store import SweepStore
    from gpurun.sweeps.submitting import submit_sweep

    recipe_path, ranges = _split(words or ())
    recipe = read_recipe(Path(recipe_path)) if recipe_path is not None else None
    found = load(find(inventory, os.environ))
    points = {key: value for key, value in given.items() if key in SWEEP}
    wish = _wish(recipe, points, ranges)
    asked = {key: value for key, value in given.items() if key not in SWEEP}
    spec, said = spec_of(recipe, found, flags_of(asked, context.obj, recipe, found), is_plan=dry_run)
    with lines_of(recipe, {"sweep": bool(points or ranges) or None}).named("sweep"):
        plan = wish.plan(spec, found.source, time.time())
    if dry_run:
        _show_plan(plan, found, said, as_json=as_json)
        return
    folder = submit_sweep(plan, found, SweepStore(_home()), os.environ, BuildLines())
    trials = plan.trials
    say(f"{folder.id}: {count(trials, 'trial')} of {spec.name}; `gpurun sweep status {folder.id}` shows the trials")
    code = _follow(folder) if follow else 0
    if as_json:
        print_json({"sweep": folder.id, "trials": trials})
    elif not follow:
        typer.echo(folder.id)
    raise typer.Exit(code)


def _show_plan(plan: SweepPlan, inventory: Inventory, said: Sequence[str], *, as_json: bool) -> None:
    """Show the job of the first trial."""
    from gpurun.cli.dry_run import show_plan
    from gpurun.sweeps.plan import job_of
    from gpurun.sweeps.search import searcher_for

    trial = job_of(plan, NO_SWEEP, 0, searcher_for(plan).next_point(0))
    if not as_json:
        typer.echo(f"{count(plan.trials, 'trial')}; the first trial:")
    show_plan(trial, inventory, said, as_json=as_json, more={"trials": plan.trials})


def _split(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Split the arguments into the recipe, if any, and the ranges."""
    recipe = words[0] if words and "=" not in words[0] else None
    rest = tuple(words[recipe is not None :])
    if strange := [word for word in rest if "=" not in word]:
        raise BadInput(
            f"{strange[0]!r} is not a parameter", hint="write a parameter as NAME=VALUES, such as lr=log:1e-5..1e-1"
        )
    return recipe, rest


def _wish(recipe: Recipe | None, given: Given, ranges: Sequence[str]) -> Wish:
    """Combine the recipe's sweep with flags. Points given by flags replace all points of the recipe."""
    from gpurun.jobs.recipe import convert_flag
    from gpurun.sweeps.space import assignments
    from gpurun.sweeps.wish import Wish

    wish = Wish.of_recipe(recipe.sweep if recipe is not None else {})
    if "grid" in given or ranges:
        grid, space = assignments(_texts(given.get("grid"))), assignments(tuple(ranges))
        wish = replace(wish, grid=grid, space=space, random=None, tpe=None)
    if "random" in given or "tpe" in given:
        wish = replace(wish, random=None, tpe=None)
    flags = [(SETTINGS[key].names[-1], key, value) for key, value in given.items() if key != "grid"]
    return replace(wish, **dict(convert_flag(*flag) for flag in flags))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else ()


def stop(sweep: SweepArgument, as_json: JsonOption = False) -> None:
    """Stop a sweep and cancel its jobs. `gpurun sweep resume` continues a stopped sweep.

    gpurun sweep stop mnist
    """
    from gpurun.state import audit
    from gpurun.sweeps.starting import ensure_conductors

    folder = own_sweep(sweep, or_root=True)
    if folder.done.exists():  # as `gpurun cancel` of a job that has ended
        say(f"{folder.id} has ended already")
    else:
        folder.stop.touch()
        audit.note(_home(), "sweep stop", sweep=folder.id)
        ensure_conductors(_home(), os.environ)
        while not folder.done.exists() and folder.is_conducted():
            time.sleep(POLL_S / 4)
        is_done = folder.done.exists()
        say(f"{folder.id} is stopped" if is_done else f"{folder.id} will stop: {folder.trouble() or NOT_RUN}")
    if as_json:
        _print_as_json(folder)


def resume(
    sweep: SweepArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Also run failed trials again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a stopped sweep, and run its cancelled trials again.

    gpurun sweep resume mnist --failed
    """
    from gpurun.sweeps.starting import ensure_conductors
    from gpurun.sweeps.submitting import reopen

    folder = own_sweep(sweep)
    again = reopen(folder, also_failed=failed)
    ensure_conductors(_home(), os.environ)
    say(f"{folder.id} continues; {count(again, 'trial runs', 'trials run')} again")
    if as_json:
        _print_as_json(folder)


def _print_as_json(folder: SweepFolder) -> None:
    from gpurun.cli.sweep_reading import as_document

    print_json(as_document(folder, folder.plan(), folder.trials()))


def own_sweep(text: str, *, or_root: bool = False) -> SweepFolder:
    """Find a sweep that this command changes.

    Args:
        or_root: root may change every user's sweeps.

    Raises:
        BadInput: no sweep matches.
        NotYours: the sweep belongs to another user.
    """
    folder = open_sweeps().find(text)
    if not (folder.is_mine() or (or_root and os.getuid() == 0)):
        raise NotYours("the sweep belongs to another user; only the owner may change the sweep", where=folder.id)
    return folder


def open_sweeps() -> SweepStore:
    """Recover what a crash left behind, then return the sweep store."""
    from gpurun.cli.jobs import open_store
    from gpurun.sweeps.store import SweepStore

    return SweepStore(open_store().home)


def _home() -> Path:
    from gpurun.state.home import home

    return home(os.environ)


def _follow(folder: SweepFolder) -> int:
    """Show the sweep's progress until it ends. Returns 0 if a trial is complete, else 1."""
    from gpurun.cli.sweep_reading import summary

    said = ""
    while True:
        is_done = folder.done.exists()
        trials = folder.trials()
        if (text := summary(folder, folder.plan(), trials)) != said:
            said = text
            say(text)
        if is_done:
            return 0 if trials.counts()["complete"] else 1
        open_sweeps()  # restarts a conductor that died
        time.sleep(POLL_S)

"""``gpurun sweep run | stop | resume``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.printing import print_json, say
from gpurun.cli.submit import pairs_of, spec_of
from gpurun.errors import BadInput, NotYours

if TYPE_CHECKING:
    from gpurun.jobs.recipe import Recipe
    from gpurun.sweeps.store import SweepFolder, SweepStore
    from gpurun.sweeps.wish import Wish

POLL_S = 1.0
NOT_RUN = "its process does not run now; the next command of its owner starts it"
SweepArgument = Annotated[
    str, typer.Argument(metavar="SWEEP", help="The sweep's id, the beginning of it, or its name.")
]


def _option(*names: str, metavar: str | None = None, text: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [NAME=RANGE…]", help="The recipe, and ranges such as layers=2..8 for --random and --tpe."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        _option("--grid", metavar="NAME=A,B", text="NAME=A,B: try each of these values; may be repeated."),
    ] = None,
    random: Annotated[int | None, typer.Option("--random", metavar="N", min=1, help="Try N random points.")] = None,
    tpe: Annotated[
        int | None, typer.Option("--tpe", metavar="N", min=1, help="Try N points, chosen near the best so far.")
    ] = None,
    metric: Annotated[
        str | None, _option("--metric", metavar="NAME:max|min", text="Metric that trials report, and max or min.")
    ] = None,
    stop_rule: Annotated[
        str | None,
        _option(
            "--stop", metavar="asha:min=1,factor=3", text="How to stop weak trials early, such as asha:min=1,factor=3."
        ),
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", metavar="K", min=1, help="Run at most K trials at a time.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=1 << 31, help="Seed of the random points.")] = None,
    as_flags: Annotated[
        bool, typer.Option("--as-flags", help="Append parameters to the command: --NAME=VALUE.")
    ] = False,
    gpus: Annotated[str | None, _option("-n", "--gpus", metavar="GPUS", text="GPUs of each trial.")] = None,
    image: Annotated[str | None, _option("--image", metavar="IMAGE", text="Docker image on this machine.")] = None,
    workdir: Annotated[str | None, _option("--workdir", metavar="DIR", text="Folder that every host gets.")] = None,
    outputs: Annotated[
        str | None, _option("--outputs", metavar="PATH", text="Folder in the container that gpurun copies to the head.")
    ] = None,
    env: Annotated[list[str] | None, _option("-e", "--env", metavar="K=V", text="Environment of every rank.")] = None,
    launcher: Annotated[str | None, _option("--launcher", metavar="L", text="What starts the ranks.")] = None,
    pool: Annotated[str | None, _option("--pool", metavar="P", text="Charge the jobs to this pool.")] = None,
    priority: Annotated[
        str | None, _option("--priority", metavar="N", text="Jobs with a higher number start earlier.")
    ] = None,
    name: Annotated[str | None, _option("--name", metavar="N", text="Name of the sweep.")] = None,
    inventory: Annotated[str | None, _option("-i", "--inventory", metavar="FILE", text="Inventory file.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the sweep until it ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Run a recipe, or a command in an image, with many parameters. Each trial is a job.

    gpurun sweep recipes/fashion-mnist --grid lr=0.1,0.01 --metric accuracy:max

    gpurun sweep -n 1 --image me/train:1 --tpe 50 lr=log:1e-5..1e-1 --metric loss:min --as-flags -- python3 train.py
    """
    from gpurun.environments.log import BuildLines
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find
    from gpurun.jobs.recipe import read as read_recipe
    from gpurun.sweeps.store import SweepStore
    from gpurun.sweeps.submitting import submit_sweep

    found = load(find(inventory, os.environ))
    recipe_path, ranges = _split(words or ())
    recipe = read_recipe(Path(recipe_path)) if recipe_path is not None else None
    flags = {
        "--gpus": ("gpus", gpus), "--image": ("image", image), "--pool": ("pool", pool), "--name": ("name", name),
        "--priority": ("priority", priority), "--launcher": ("launcher", launcher), "--outputs": ("outputs", outputs),
        "--workdir": ("workdir", str(Path(workdir).absolute()) if workdir is not None else None),
        "--env": ("env", pairs_of("--env", env) if env else None),
        "the command": ("command", list(context.obj) if context.obj is not None else None),
    }  # fmt: skip
    wish = _wish(recipe, grid or (), ranges, random, tpe, {
        "metric": metric, "stop": stop_rule, "max_parallel": max_parallel, "seed": seed, "as_flags": as_flags or None,
    })  # fmt: skip
    spec, _ = spec_of(recipe, found, flags, {})
    store = SweepStore(_home())
    folder = submit_sweep(wish, spec, found, store, os.environ, BuildLines())
    count = folder.plan().trials
    say(f"{folder.id}: {count} trial{'s' * (count != 1)} of {spec.name}; `gpurun sweep status {folder.id}` shows them")
    if follow:
        raise typer.Exit(_follow(folder))
    if as_json:
        print_json({"sweep": folder.id, "trials": count})
    else:
        typer.echo(folder.id)


def _split(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Split the arguments into the recipe, if any, and the ranges."""
    recipe = words[0] if words and "=" not in words[0] else None
    rest = tuple(words[recipe is not None :])
    if strange := [word for word in rest if "=" not in word]:
        raise BadInput(f"{strange[0]!r} is not a parameter", hint="NAME=VALUES, such as lr=log:1e-5..1e-1")
    return recipe, rest


def _wish(
    recipe: Recipe | None, grid: Sequence[str], ranges: Sequence[str], random: int | None, tpe: int | None,
    rest: dict[str, Any],
) -> Wish:  # fmt: skip
    """Combine the recipe's sweep with flags. Points given by flags replace all points of the recipe."""
    from gpurun.sweeps.space import assignments
    from gpurun.sweeps.wish import Wish

    given = dict(recipe.sweep) if recipe is not None else {}
    if "space" in given:
        given["space"] = {name: tuple(text.split(",")) for name, text in given["space"].items()}
    if grid or ranges:
        given = {key: value for key, value in given.items() if key not in ("grid", "space", "random", "tpe")}
        given |= {"grid": assignments(tuple(grid)), "space": assignments(tuple(ranges))}
    if random is not None or tpe is not None:
        given |= {"random": random, "tpe": tpe}
    return Wish(**{**given, **{key: value for key, value in rest.items() if value is not None}})


def stop(sweep: SweepArgument) -> None:
    """Stop a sweep and cancel its jobs. `gpurun sweep resume` continues it.

    gpurun sweep stop mnist
    """
    from gpurun.state import audit
    from gpurun.sweeps.starting import ensure_conductors

    folder = own_sweep(sweep, or_root=True)
    if folder.done.exists():
        raise BadInput(f"{folder.id} has ended")
    folder.stop.touch()
    audit.note(_home(), "sweep stop", sweep=folder.id)
    ensure_conductors(_home(), os.environ)
    while not folder.done.exists() and folder.is_conducted():
        time.sleep(POLL_S / 4)
    say(f"{folder.id} is stopped" if folder.done.exists() else f"{folder.id} will stop: {folder.trouble() or NOT_RUN}")


def resume(
    sweep: SweepArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Also run failed trials again.")] = False,
) -> None:
    """Continue a stopped sweep. Runs cancelled trials again.

    gpurun sweep resume mnist --failed
    """
    from gpurun.sweeps.starting import ensure_conductors
    from gpurun.sweeps.submitting import reopen

    folder = own_sweep(sweep)
    again = reopen(folder, also_failed=failed)
    ensure_conductors(_home(), os.environ)
    say(f"{folder.id} continues; {again} trial{'s run' if again != 1 else ' runs'} again")


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
        raise NotYours("belongs to another user; only they may change it", where=folder.id)
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

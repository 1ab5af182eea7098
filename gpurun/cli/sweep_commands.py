"""``gpurun sweep run | status | best | table | plot | stop | resume``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from gpurun.cli import completion
from gpurun.cli.job_options import DryRunOption, Given, flags_of, job_options
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say, say_problem
from gpurun.cli.submit import spec_of
from gpurun.documents.plain import csv_text, printable
from gpurun.errors import BadInput, NotYours, StateError
from gpurun.jobs.recipe_keys import SETTINGS, SWEEP
from gpurun.quantities import count, duration

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.recipe import Recipe
    from gpurun.jobs.store import JobStore
    from gpurun.studies.store import SweepFolder, SweepStore
    from gpurun.studies.sweep_plan import SweepPlan, Wish
    from gpurun.studies.trials import Metric, Trial, Trials
    from gpurun.views.lines import Cell


# ``gpurun sweep run | stop | resume``.


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
    from gpurun.content.build import BuildLines
    from gpurun.inventory.read import find_inventory, load_inventory
    from gpurun.jobs.recipe import lines_of, read_recipe
    from gpurun.studies.runner import submit_sweep
    from gpurun.studies.store import SweepStore

    recipe_path, ranges = _split(words or ())
    recipe = read_recipe(Path(recipe_path)) if recipe_path is not None else None
    found = load_inventory(find_inventory(inventory, os.environ))
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
        print_json(SweepStartedShape(sweep=folder.id, trials=trials))
    elif not follow:
        typer.echo(folder.id)
    raise typer.Exit(code)


def _show_plan(plan: SweepPlan, inventory: Inventory, said: Sequence[str], *, as_json: bool) -> None:
    """Show the job of the first trial."""
    from gpurun.cli.dry_run import show_plan
    from gpurun.studies.search import Searcher
    from gpurun.studies.sweep_plan import job_of

    trial = job_of(plan, NO_SWEEP, 0, Searcher(plan).next_point(0))
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
    from gpurun.studies.sweep_plan import Wish, assignments

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
    from gpurun.state.audit import AuditLog
    from gpurun.studies.runner import Conductors

    folder = own_sweep(sweep, or_root=True)
    if folder.done.exists():  # as `gpurun cancel` of a job that has ended
        say(f"{folder.id} has ended already")
    else:
        folder.stop.touch()
        AuditLog(_home()).note("sweep stop", sweep=folder.id)
        Conductors(_home()).ensure()
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
    from gpurun.studies.runner import Conductors, reopen

    folder = own_sweep(sweep)
    again = reopen(folder, also_failed=failed)
    Conductors(_home()).ensure()
    say(f"{folder.id} continues; {count(again, 'trial runs', 'trials run')} again")
    if as_json:
        _print_as_json(folder)


def _print_as_json(folder: SweepFolder) -> None:

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
    from gpurun.cli.stores import open_store
    from gpurun.studies.store import SweepStore

    return SweepStore(open_store().home)


def _home() -> Path:
    from gpurun.state.paths import home

    return home(os.environ)


def _follow(folder: SweepFolder) -> int:
    """Show the sweep's progress until it ends. Returns 0 if a trial is complete, else 1."""

    said, trials = "", folder.trials()
    for trials in _looks(folder):
        if (text := summary(folder, folder.plan(), trials)) != said:
            said = text
            say(text)
    return 0 if trials.counts()["complete"] else 1


def _looks(folder: SweepFolder) -> Iterator[Trials]:
    """Yield the sweep's trials as they are now, until the sweep ends."""
    while True:
        is_done = folder.done.exists()
        yield folder.trials()
        if is_done:
            return
        open_sweeps()  # restarts a conductor that died
        time.sleep(POLL_S)


SHOWN = 20


def status(
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="[SWEEP]",
            help="Show the trials of this sweep.",
            show_default=False,
            autocompletion=completion.sweeps,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the sweep live until the sweep ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of all sweeps, or the trials of one sweep. The best trial comes first.

    gpurun sweep status mnist --watch
    """
    store = open_sweeps()
    if sweep is None:
        rows, damaged = _all(store)
        if as_json:
            print_json(SweepsShape(sweeps=[as_document(*row) for row in rows]))
        for row in () if as_json else rows:
            typer.echo(printable(summary(*row)))
        if not rows and not as_json:
            say("there is no sweep yet; `gpurun sweep RECIPE --grid NAME=A,B` starts a sweep")
        for error in damaged:
            say_problem(error)
        if damaged:
            raise typer.Exit(StateError.exit_code)
        return
    folder = store.find(sweep)
    plan, trials = folder.plan(), folder.trials()
    if as_json:
        print_json(_with_trials(folder, plan, trials))
    elif watch:
        _watch(folder, plan)
    else:
        _print(folder, plan, trials)


def _all(store: SweepStore) -> tuple[list[tuple[SweepFolder, SweepPlan, Trials]], list[StateError]]:
    """Return all readable sweeps, oldest first, and the errors of the others."""
    rows, damaged = [], []
    for folder in map(store.get, store.ids()):
        try:
            rows.append((folder, folder.plan(), folder.trials()))
        except StateError as error:
            damaged.append(error)
    return sorted(rows, key=lambda row: row[1].created_s), damaged


def _print(folder: SweepFolder, plan: SweepPlan, trials: Trials) -> None:
    from gpurun.cli.tables import print_table

    print_table(*_table(folder, plan, trials, SHOWN))
    if (more := len(trials.by_number) - SHOWN) > 0:
        typer.echo(f"{more} more; `gpurun sweep table {folder.id}` shows all trials")
    typer.echo(printable(summary(folder, plan, trials)))


def _watch(folder: SweepFolder, plan: SweepPlan) -> None:
    from gpurun.cli.tables import redrawn, terminal_columns
    from gpurun.views.lines import table_lines

    with redrawn() as draw:
        for trials in _looks(folder):
            shown = table_lines(*_table(folder, plan, trials, SHOWN), terminal_columns())
            draw([*shown, [(printable(summary(folder, plan, trials)), "")]])


def _table(folder: SweepFolder, plan: SweepPlan, trials: Trials, most: int) -> tuple[list[str], list[list[Cell]]]:
    """Return columns and rows, best trial first; the best complete one is bold. Open trials show their job's state."""
    from gpurun.jobs.store import JobStore

    jobs, best = JobStore(folder.path.home), trials.best(plan.metric) if plan.metric else None
    columns = ["trial", *([plan.metric.name, "step"] if plan.metric else []), *plan.space, "state", "time", "job"]
    rows: list[list[Cell]] = []
    for trial in trials.ranked(plan.metric)[:most]:
        row = _row(plan, trial, "best" if trial is best else _state_of_job(jobs, trial))
        rows.append([(text, "head" if trial is best else "") for text in row])
    return columns, rows


def _state_of_job(jobs: JobStore, trial: Trial) -> str:
    """Return the job's state for an open trial, such as ``running``; else the trial's state."""
    with suppress(StateError):
        if _state(trial) == "open":
            return jobs.get(trial.job).record().state.value.lower()
    return _state(trial)


def _row(plan: SweepPlan, trial: Trial, state: str) -> list[str]:
    from gpurun.studies.sweep_plan import value_text

    value = "" if trial.step is None else "NaN" if trial.value is None else f"{trial.value:.6g}"
    took_s = (trial.ended_s or time.time()) - trial.asked_s if trial.job else 0.0
    return [
        str(trial.number),
        *([value, "" if trial.step is None else str(trial.step)] if plan.metric else []),
        *(value_text(trial.parameters[name]) if name in trial.parameters else "" for name in plan.space),
        f"{state}{': ' + trial.reason if trial.outcome == 'failed' else ''}",
        duration(took_s),
        trial.job,
    ]


def _state(trial: Trial) -> str:
    return trial.outcome or ("stopping" if trial.stopping else "open" if trial.job else "waits")


def summary(folder: SweepFolder, plan: SweepPlan, trials: Trials) -> str:
    """Describe the sweep's progress and its best trial in one line."""
    counts = trials.counts()
    told = [f"{count} {'queued or running' if what == 'open' else what}" for what, count in counts.items() if count]
    left = plan.trials - len(trials.by_number)
    parts = [*told, *([f"{left} to come"] if left else [])]
    best = trials.best(plan.metric) if plan.metric else None
    shown = f"; best: {_best_words(plan, best)}" if best is not None else ""
    trouble = f"; {folder.trouble()}" if folder.trouble() else ""
    state = ("stopped" if folder.stop.exists() else "done") if folder.done.exists() else "runs"
    return f"{folder.id} {plan.name} {state}: {', '.join(parts)} of {plan.trials}{shown}{trouble}"


def _best_words(plan: SweepPlan, best: Trial) -> str:
    from gpurun.studies.sweep_plan import words

    name = plan.metric.name if plan.metric else ""
    return f"{name} {best.value:.6g} with {' '.join(words(best.parameters))} (trial {best.number}, {best.job})"


def best(sweep: SweepArgument, as_json: JsonOption = False) -> None:
    """Print the parameters, the job and the outputs folder of the best completed trial.

    gpurun sweep best mnist --json
    """
    from gpurun.jobs.store import JobStore

    store = open_sweeps()
    folder = store.find(sweep)
    plan = folder.plan()
    metric = _metric_of(folder, plan)
    found = folder.trials().best(metric)
    if found is None:
        raise BadInput(
            f"no trial of {folder.id} has ended with a value of {metric.name}",
            hint=f"`gpurun sweep status {folder.id}` shows all trials",
        )
    outputs = JobStore(store.home).get(found.job).outputs
    where = str(outputs) if outputs.is_dir() else ""
    if as_json:
        document: BestTrialShape = {**trial_document(found), "outputs": where}
        print_json(document)
        return
    typer.echo(printable(_best_words(plan, found)))
    if where:
        typer.echo(where)


def table(
    sweep: SweepArgument,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print all trials of a sweep. The best trial comes first.

    gpurun sweep table mnist --csv > mnist.csv
    """
    if as_csv and as_json:
        raise BadInput("give either --csv or --json, not both")
    folder = open_sweeps().find(sweep)
    plan, trials = folder.plan(), folder.trials()
    if as_json:
        print_json(_with_trials(folder, plan, trials))
        return
    if not as_csv:
        from gpurun.cli.tables import print_table

        print_table(*_table(folder, plan, trials, len(trials.by_number)))
        return
    own: tuple[TrialKey, ...] = ("trial", "state", "value", "step", "job", "reason")
    heads = [*own, *(f"parameter.{name}" if name in own else name for name in plan.space)]
    rows = []
    for trial in trials.ranked(plan.metric):
        told = trial_document(trial)
        rows.append([*(told[name] for name in own), *(trial.parameters.get(name, "") for name in plan.space)])
    sys.stdout.write(csv_text(heads, rows))


def plot(
    sweep: SweepArgument,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FILE", help="Write the plot to this SVG file; default: SWEEP.svg.", show_default=False
        ),
    ] = None,
) -> None:
    """Draw a sweep as SVG: each trial's parameters and metric, and the metric over steps and time.

    Each line is a trial. Darker lines are better trials, and the red line is the best trial. In a browser, point at a
    line to see the trial's parameters.

    gpurun sweep plot mnist --to mnist.svg
    """
    from gpurun.studies.sweep_pictures import curves, picture
    from gpurun.studies.trials import Trials

    folder = open_sweeps().find(sweep)
    plan = folder.plan()
    metric = _metric_of(folder, plan)
    entries = list(folder.entries())
    path = to or Path(f"{folder.id}.svg")
    try:
        path.write_text(picture(folder.id, plan, metric, Trials(entries), curves(entries)), encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"cannot write the plot: {error.strerror}", where=str(path), hint="name another file with --to FILE"
        ) from error
    typer.echo(printable(str(path)))


def _metric_of(folder: SweepFolder, plan: SweepPlan) -> Metric:
    if plan.metric is None:
        raise BadInput(
            f"{folder.id} has no metric, so no trial is the best",
            hint="start a sweep with --metric, such as --metric accuracy:max",
        )
    return plan.metric


class TrialShape(TypedDict):
    """A trial. Times are seconds since 1970.

    Attributes:
        state: `open`, `waits`, `stopping`, `complete`, `pruned`, `failed` or `cancelled`.
        value: the newest value of the metric; null: no value yet, or not a number.
        step: the step at which the metric had this value.
    """

    trial: int
    state: str
    value: float | None
    step: int | None
    job: str
    parameters: Mapping[str, Any]
    reason: str
    asked_s: float
    ended_s: float | None


TrialKey = Literal["trial", "state", "value", "step", "job", "reason"]


class BestTrialShape(TrialShape):
    """The best trial.

    Attributes:
        outputs: the folder of the trial's outputs; empty: the trial has no outputs.
    """

    outputs: str


class SweepStartedShape(TypedDict):
    """A sweep that was started."""

    sweep: str
    trials: int


class SweepShape(TypedDict):
    """A sweep.

    Attributes:
        search: `grid`, `random` or `tpe`.
        points: how many combinations of parameters the sweep tries.
        counts: trials by outcome; `open`: not ended.
        trouble: why the sweep cannot continue, or why gpurun stopped the sweep; empty: the sweep has no trouble.
        trials: all trials, the best first; only `gpurun sweep status SWEEP` and `gpurun sweep table` print them.
    """

    sweep: str
    name: str
    search: str
    points: int
    metric: str | None
    done: bool
    stopped: bool
    counts: dict[str, int]
    best: TrialShape | None
    trouble: str
    trials: NotRequired[list[TrialShape]]


class SweepsShape(TypedDict):
    """All sweeps. With a SWEEP, the document is the sweep with its `trials`."""

    sweeps: list[SweepShape]


def as_document(folder: SweepFolder, plan: SweepPlan, trials: Trials) -> SweepShape:
    """Return a sweep for scripts."""
    best = trials.best(plan.metric) if plan.metric else None
    return {
        "sweep": folder.id, "name": plan.name, "search": plan.search, "points": plan.trials,
        "metric": plan.metric.name if plan.metric else None, "done": folder.done.exists(),
        "stopped": folder.stop.exists(), "counts": trials.counts(), "best": trial_document(best) if best else None,
        "trouble": folder.trouble(),
    }  # fmt: skip


def _with_trials(folder: SweepFolder, plan: SweepPlan, trials: Trials) -> SweepShape:
    """Return a sweep with all its trials, the best first."""
    shown = [trial_document(trial) for trial in trials.ranked(plan.metric)]
    return {**as_document(folder, plan, trials), "trials": shown}


def trial_document(trial: Trial) -> TrialShape:
    """Return a trial for scripts."""
    return {
        "trial": trial.number, "state": _state(trial), "value": trial.value, "step": trial.step, "job": trial.job,
        "parameters": trial.parameters, "reason": trial.reason, "asked_s": trial.asked_s,
        "ended_s": trial.ended_s,
    }  # fmt: skip

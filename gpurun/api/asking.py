"""`gpurun.submit`, `gpurun.map`, `gpurun.job`, `gpurun.jobs`, `gpurun.cancel`."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

from gpurun.api.job import Job
from gpurun.api.packing import COMMAND, pack
from gpurun.api.telling import clues_of_call
from gpurun.environments.log import BuildLines
from gpurun.errors import BadInput, StateError
from gpurun.head.planned import planned
from gpurun.head.reading import clues_of
from gpurun.head.submission import submit_jobs
from gpurun.head.waiter import resume
from gpurun.head.wish import spec_of
from gpurun.inventory.load import load
from gpurun.inventory.locate import find
from gpurun.inventory.model import Inventory
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.recipe import Recipe
from gpurun.jobs.recipe import read as read_recipe
from gpurun.jobs.recipe_keys import CONSTRAINTS, FIELDS
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import ENDED, State
from gpurun.jobs.store import JobStore
from gpurun.state.home import home

OUTPUTS = "/outputs"
What = Callable[..., Any] | Sequence[str] | str | Path
_OWN = ("args", "kwargs", "inventory", "dry_run")
"""Arguments of `submit` that are no settings."""


@overload
def submit(
    what: What, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, inventory: str | None = None,
    dry_run: Literal[False] = False, **settings: Any,
) -> Job: ...  # fmt: skip


@overload
def submit(
    what: What, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, inventory: str | None = None,
    dry_run: Literal[True], **settings: Any,
) -> dict[str, Any]: ...  # fmt: skip


def submit(
    what: What, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, inventory: str | None = None,
    dry_run: bool = False, **settings: Any,
) -> Job | dict[str, Any]:  # fmt: skip
    """Run a function, a command or a recipe on a gang of GPUs. The same as ``gpurun submit``.

    Args:
        what: a function, which each rank calls; a command as a list of words; or a recipe's path.
        args, kwargs: the function's arguments.
        inventory: the inventory's file; default: as on the command line.
        dry_run: submit nothing; return the plan, as ``gpurun submit --dry-run --json`` prints it.
        settings: keys of a recipe and of its ``constraints``: ``gpus=8, image="me/train:1", gpus_per_host=4``.
            Without ``launcher``, what a function or its module imports says what starts the ranks. If nothing says it,
            one GPU needs no launcher, and several need the setting.

    Returns:
        A future. For a function, its `result` is what rank 0 returned; otherwise it is the exit code.

    Raises:
        BadInput: something is missing or wrong, or the function cannot be pickled.
        NeverFits: the inventory can never hold the job.
        StateError: gpurun cannot store the job.
    """
    call = (what, args, kwargs or {})
    if not dry_run:
        return _submit([call], inventory, settings)[0]
    found = load(find(inventory, os.environ))
    with ExitStack() as folders:
        spec, said = _spec(call, found, dict(settings), folders, is_plan=True)
        plan = planned(spec, found, said, os.environ).document
    return dict(json.loads(json.dumps(plan, default=list)))


def map(
    function: Callable[..., Any],
    points: Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Any]],
    *,
    inventory: str | None = None,
    **settings: Any,
) -> list[Job]:
    """Submit one job for each point: ``[job.result() for job in gpurun.map(train, {"lr": [0.1, 0.01]}, image=…)]``.

    Args:
        points: a list with the keyword arguments of each call; or a mapping from names to values, which gives a point
            for each combination.
        settings: as for `submit`; one GPU each unless `gpus` says more.

    Raises:
        BadInput: as `submit`; then no job is submitted.
    """
    if isinstance(points, Mapping):
        names = list(points)
        for name, values in points.items():
            if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
                raise BadInput(
                    f"the values of {name} are not a list", hint=f'give a list, such as {{"{name}": [0.1, 0.01]}}'
                )
        points = [dict(zip(names, values, strict=True)) for values in itertools.product(*points.values())]
    calls: list[tuple[Any, Sequence[Any], Mapping[str, Any]]] = []
    for point in points:
        if not isinstance(point, Mapping):
            raise BadInput(f"each point must be a dictionary of arguments, not {type(point).__name__}")
        calls.append((function, (), point))
    return _submit(calls, inventory, {"gpus": 1, **settings}) if calls else []


def job(text: str) -> Job:
    """Find a job that was submitted before, by its id, the beginning of its id, or its name.

    Raises:
        BadInput: no job matches, or several do.
    """
    return _future(_open().find(text))


def jobs(*states: str, everybody: bool = False) -> list[Job]:
    """Return this user's jobs, oldest first: ``gpurun.jobs()`` those that have not ended, ``gpurun.jobs("FAILED")``.

    Args:
        states: the states to look for, such as ``RUNNING``; none: all in which a job has not ended.
        everybody: also other users' jobs.

    Raises:
        BadInput: a text is not a state.
    """
    names = {state.upper() for state in states}
    if wrong := sorted(names - set(State.__members__)):
        raise BadInput(f"{wrong[0]!r} is not a state", hint=f"the states are {', '.join(State.__members__)}")
    wanted = {State[name] for name in names} or set(State) - ENDED
    store = _open()
    ids = store.ids() if wanted & ENDED else store.live_ids()
    found = [
        record for record in store.records(lambda _: None, ids=ids)
        if record.state in wanted and (everybody or record.owner_uid == os.getuid())
    ]  # fmt: skip
    return [_future(store.get(record.id)) for record in sorted(found, key=lambda record: record.submitted_s)]


def cancel(*which: Job | str) -> list[Job]:
    """Request the end of jobs, named as on the command line or given as futures. Returns the jobs; waits for none.

    Raises:
        BadInput: no job matches, or several do. Then no job is cancelled.
        NotYours: a job belongs to another user.
    """
    found = [each if isinstance(each, Job) else job(each) for each in which]
    for each in found:
        each.cancel()
    return found


def _open() -> JobStore:
    store = JobStore(home(os.environ))
    resume(store.home, os.environ)
    return store


def _future(folder: JobFolder) -> Job:
    try:
        returns = folder.spec().command[-3:] == COMMAND
    except StateError:  # damaged: the job can still be watched and cancelled
        returns = False
    return Job(folder, returns=returns)


def _submit(
    calls: Sequence[tuple[Any, Sequence[Any], Mapping[str, Any]]], named: str | None, settings: Any
) -> list[Job]:
    found = load(find(named, os.environ))
    with ExitStack() as folders:
        specs = []
        for call in calls:
            spec, said = _spec(call, found, dict(settings), folders)
            specs.append(spec)
            for text in said:
                sys.stderr.write(f"{text}\n")
        submission = submit_jobs(specs, found, home(os.environ), os.environ, on_build=BuildLines())
    returns = callable(calls[0][0])
    return [Job(folder, returns=returns) for folder in submission.folders]


def _check_call(args: object, kwargs: object, settings: Mapping[str, Any]) -> None:
    """Raise BadInput if `args` is not a list of arguments: a text, for example, would become one argument for each
    letter.
    """
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise BadInput(
            f"args must be a list of arguments, not {type(args).__name__}", hint="write submit(train, (0.1,), …)"
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise BadInput(
            "kwargs must be a dictionary of arguments by name", hint='write submit(train, kwargs={"lr": 0.1}, …)'
        )
    if "command" in settings:
        raise BadInput(
            "submit() accepts a function or command=, not both", hint="submit either the function or the command"
        )


def _spec(
    call: tuple[Any, Sequence[Any], Mapping[str, Any]],
    inventory: Inventory,
    settings: dict[str, Any],
    folders: ExitStack,
    *,
    is_plan: bool = False,
) -> tuple[JobSpec, tuple[str, ...]]:
    """Return a call as a spec, and lines that tell the user how gpurun read it."""
    what, args, kwargs = call
    recipe: Recipe | None = None
    workdir = settings.get("workdir")
    settings["workdir"] = None if workdir is None else str(Path(workdir).absolute())
    if callable(what):
        _check_call(args, kwargs, settings)
        top = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="gpurun-call-")))
        pack(top, what, args, kwargs, None if workdir is None else Path(workdir).absolute())
        settings = {"name": getattr(what, "__name__", "call").strip("<>"), "outputs": OUTPUTS, **settings}
        settings |= {"workdir": str(top), "command": list(COMMAND)}
    elif args or kwargs:
        raise BadInput(
            "submit() accepts args and kwargs only with a function", hint="write the arguments into the command"
        )
    elif isinstance(what, (str, Path)):
        recipe = read_recipe(Path(what))
    else:
        settings["command"] = list(what)
    if isinstance(places := settings.get("constraints"), Mapping):
        settings = {**places, **settings, "constraints": None}
    unknown = sorted(settings.keys() - (FIELDS.keys() - {"sweep"}) - CONSTRAINTS.keys())
    if unknown:
        known = [*FIELDS.keys() - {"sweep"}, *CONSTRAINTS, *_OWN]
        meant = get_close_matches(unknown[0], known, n=1)
        hint = (
            f"did you mean {meant[0]}?"
            if meant
            else "docs/reference/recipes.md lists all settings: each key of a recipe or of its constraints is a setting"
        )
        raise BadInput(f"there is no setting {unknown[0]!r}", hint=hint)
    flags = {key: (key, value) for key, value in settings.items()}
    reads = (lambda _spec: clues_of_call(what)) if callable(what) else clues_of
    return spec_of(recipe, inventory, flags, reads=reads, is_plan=is_plan)

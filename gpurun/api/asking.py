"""`gpurun.submit`, `gpurun.map`, `gpurun.job`, `gpurun.jobs`, `gpurun.cancel`."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, overload

from gpurun.api.job import Job
from gpurun.content.build import BuildLines
from gpurun.documents.plain import json_text
from gpurun.errors import BadInput, StateError
from gpurun.head.submit import MOST_SOURCE_BYTES, clues_in, clues_of, planned, spec_of, submit_jobs
from gpurun.head.waiter import Waiter
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import find_inventory, load_inventory
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.recipe import Recipe, read_recipe
from gpurun.jobs.recipe_keys import CONSTRAINTS, FIELDS
from gpurun.jobs.record import ENDED, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.launch.launchers.choosing import ProgramClues, agreed
from gpurun.runtime import gpurun_call
from gpurun.state.paths import home

# What a function and its module say of how ranks find each other.


MOST_NAMES = 10_000


def clues_of_call(function: Callable[..., Any]) -> ProgramClues:
    """Return what a function says of its launcher; if it says nothing, what its module imports.

    A notebook is a module without a file: what its cells have imported counts.
    """
    while isinstance(function, functools.partial):
        function = function.func
    shown = str(getattr(function, "__qualname__", type(function).__name__))
    own = clues_in(_source(function), shown, None)
    if agreed(own.clues) is None:
        module = sys.modules.get(str(getattr(function, "__module__", "")))
        text = _source(module) if module is not None else ""
        file = getattr(module, "__file__", None)
        folder = Path(file).parent if isinstance(file, str) and text else None
        names = () if module is None or text else _names(module)
        own = clues_in(text, getattr(module, "__name__", shown), folder, names)
    return replace(own, function=shown)


def _source(what: Any) -> str:
    """Return the source of a function or module; "" if it has none, such as a builtin's, or is too large."""
    try:
        text = textwrap.dedent(inspect.getsource(what))
    except (OSError, TypeError, SyntaxError, IndexError, UnicodeError):
        return ""
    return text if len(text) <= MOST_SOURCE_BYTES else ""


def _names(module: ModuleType) -> list[str]:
    """Return the dotted names of what is in a module."""
    found = list[str]()
    for value in list(vars(module).values())[:MOST_NAMES]:
        if isinstance(value, ModuleType):
            found.append(value.__name__)
        elif isinstance(value, type | FunctionType) and isinstance(value.__module__, str):
            found.append(f"{value.__module__}.{value.__name__}")
    return found


# Pack a function and its arguments into a workdir that any image with the same Python can run.


COMMAND = ("python3", "-u", "gpurun_call.py")
OWN = ("call.json", gpurun_call.CALL, "gpurun_call.py", "cloudpickle")
"""What a packed call has beside the workdir's files."""
MOST_BYTES = 256 << 20
"""Of a pickled call: larger data belongs into a file system that hosts mount, or into the workdir."""


def pack(
    folder: Path, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], workdir: Path | None
) -> None:
    """Fill an empty folder with files that run `function(*args, **kwargs)`.

    Modules next to the notebook or script are pickled by value, with the function.

    Args:
        workdir: a folder whose files to add, too.

    Raises:
        BadInput: something cannot be pickled or is too large, or cloudpickle is not installed.
    """
    try:
        import cloudpickle  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise BadInput(
            "gpurun needs cloudpickle to send a function to hosts, but cloudpickle is not installed",
            hint="install cloudpickle: pip install 'gpurun[python]'",
        ) from error
    with _PACKING, _by_value(cloudpickle):
        try:
            data = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise BadInput(
                f"gpurun cannot send {name} to hosts: {_what_stays(cloudpickle, function, args, kwargs)}{error}",
                hint="create the named object inside the function",
            ) from error
    if len(data) > MOST_BYTES:
        raise BadInput(
            f"the function and its arguments take {len(data) >> 20} MiB, more than the limit of {MOST_BYTES >> 20} MiB",
            hint="let the function read its data from a mount, the image or the workdir",
        )
    try:
        _fill(folder, data, workdir, Path(cloudpickle.__file__).parent)
    except OSError as error:  # a full disk, or a workdir that cannot be read
        raise BadInput(
            f"gpurun cannot store the function and its arguments: {error.strerror or error}", where=str(folder)
        ) from error


def _fill(folder: Path, data: bytes, workdir: Path | None, cloudpickle: Path) -> None:
    if workdir is not None:
        if taken := [name for name in OWN if os.path.lexists(workdir / name)]:
            raise BadInput(
                f"the folder contains {taken[0]}, but gpurun itself creates a file with this name",
                where=str(workdir),
                hint=f"rename {taken[0]}",
            )
        shutil.copytree(workdir, folder, symlinks=True, dirs_exist_ok=True)
    (folder / gpurun_call.CALL).write_bytes(data)
    (folder / "call.json").write_text(json.dumps({"python": "{}.{}".format(*sys.version_info[:2])}))
    shutil.copyfile(Path(gpurun_call.__file__), folder / "gpurun_call.py")
    shutil.copytree(cloudpickle, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__"))


def _what_stays(cloudpickle: Any, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Name the one variable or argument that cannot be pickled, if there is exactly one."""
    parts: dict[str, Any] = {}
    with suppress(TypeError, ValueError):  # no function, or one with an empty cell
        used = inspect.getclosurevars(function)
        parts = {f"the function's variable {name}": value for name, value in {**used.globals, **used.nonlocals}.items()}
    parts |= {f"argument {number}": value for number, value in enumerate(args)}
    parts |= {f"argument {name}": value for name, value in kwargs.items()}
    for where, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001  its class is the user's
            return f"{where}: "
    return ""


_PACKING = threading.Lock()
"""cloudpickle has one list of modules by value for all threads."""


@contextmanager
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Pickle modules that the image does not have by value, with their content."""
    here = Path.cwd()
    mine = [module for module in list(sys.modules.values()) if _is_own(module, here)]
    known = set(cloudpickle.list_registry_pickle_by_value())
    new = [module for module in mine if module.__name__ not in known]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: object, here: Path) -> bool:
    """Return whether a module is a file below a folder into which no package was installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not file or module.__name__.partition(".")[0] in ("__main__", "gpurun"):
        return False
    path = Path(file).absolute()
    if not path.is_relative_to(here) or "site-packages" in path.parts:
        return False
    return not any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


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
    found = load_inventory(find_inventory(inventory, os.environ))
    with ExitStack() as folders:
        spec, said = _spec(call, found, dict(settings), folders, is_plan=True)
        plan = planned(spec, found, said, os.environ).document
    return dict(json.loads(json_text(plan)))


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
    Waiter(store.home).resume()
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
    found = load_inventory(find_inventory(named, os.environ))
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

"""Launchers start the ranks of a gang. Each launcher is one value. Pure.

No code outside this room knows a launcher's name. To add a launcher: write a file or a few lines here, add its name to
`_TABLE`, a recipe, and a row to docs/launchers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpurun.errors import BadInput
from gpurun.jobs.spec import HorovodKnobs, JobSpec
from gpurun.launch.launchers.direct import DEEPSPEED, JAX, TASKS, TORCHRUN
from gpurun.launch.launchers.horovod import GLOO, MPI
from gpurun.launch.launchers.launcher import Launcher, PlacedGang, Typed
from gpurun.launch.launchers.mpirun import MPIRUN
from gpurun.launch.launchers.tensorflow import TENSORFLOW

__all__ = ["ALONE", "NAMES", "Launcher", "PlacedGang", "launcher_of", "settled"]

_TABLE: Mapping[str, Launcher] = {
    each.name: each for each in (GLOO, MPIRUN, TORCHRUN, DEEPSPEED, JAX, TENSORFLOW, TASKS)
}
NAMES = tuple(_TABLE)
ALONE = TASKS.name
"""The launcher of a program that needs nothing of its image and joins no others."""


def launcher_of(spec: JobSpec) -> Launcher:
    """Return the launcher of a job.

    Raises:
        BadInput: there is no such launcher.
    """
    found = _TABLE.get(spec.launcher)
    if found is None:
        raise BadInput(f"there is no launcher {spec.launcher!r}", hint=f"there are: {', '.join(NAMES)}")
    return MPI if found is GLOO and spec.controller == "mpi" else found


def settled(spec: JobSpec, *, is_named: bool) -> tuple[JobSpec, str]:
    """Return the final spec, and a note for the user ("" = none).

    If the user's command begins with a launcher, removes that launcher's flags for hosts and ranks, which gpurun
    chooses.

    Args:
        is_named: a recipe or a flag names the launcher.

    Raises:
        BadInput: there is no such launcher, or it does not support something in the spec.
    """
    said = ""
    for each in _TABLE.values():
        if each.typed is not None and (words := _behind(each.typed, spec.command)) is not None:
            name = spec.launcher if is_named else each.name
            spec = replace(spec, launcher=name, command=_without(each.typed, words))
            said = f"gpurun starts the ranks ({name}); each runs: {' '.join(spec.command)}"
            break
    launcher = launcher_of(spec)
    if launcher.interpreter and spec.command[0].endswith(".py"):
        spec = replace(spec, command=(*launcher.interpreter, *spec.command))
    _check(spec, launcher)
    spec = replace(spec, reforms=spec.min_gpus is not None and launcher.elastic == "anew")
    return (spec if launcher.with_roles is None else launcher.with_roles(spec)), said


def _behind(typed: Typed, command: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the words after a launcher, called by its name or as a Python module; None if the command begins
    otherwise.
    """
    program = command[0].rpartition("/")[2]
    if program == typed.program:
        return command[1:]
    words = command[2:] if command[1:2] == ("-u",) else command[1:]
    is_module = program.startswith("python") and typed.module != "" and words[:2] == ("-m", typed.module)
    return words[2:] if is_module else None


def _without(typed: Typed, behind: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a rank: the words after the launcher, without the launcher's flags."""
    words, found = list(behind), dict[str, str]()
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if flag in typed.alone and not equals:
            found[flag] = ""
        elif flag in typed.with_value and (equals or words):
            found[flag] = value if equals else words.pop(0)
        else:
            raise BadInput(
                f"{typed.program}: gpurun does not know what to do with {flag}",
                hint=f"leave out {typed.program} and its flags: gpurun starts a rank for each GPU",
            )
    rest = tuple(words) if typed.rest is None else typed.rest(found, tuple(words))
    if not words:
        raise BadInput(f"{typed.program}: there is no command behind it")
    return rest


def _check(spec: JobSpec, launcher: Launcher) -> None:
    if spec.min_gpus is not None and launcher.elastic == "no":
        if spec.launcher == GLOO.name:
            raise BadInput(
                "an elastic gang (min_gpus) cannot use the controller mpi", hint="Horovod's elastic mode is Gloo's"
            )
        raise BadInput(f"the launcher {launcher.name} cannot be elastic (min_gpus)", hint="its gang has one size")
    if spec.launcher != GLOO.name and (spec.controller != "gloo" or spec.horovod != HorovodKnobs()):
        raise BadInput(
            f"'controller' and 'horovod' are for the launcher {GLOO.name}, not for {launcher.name}",
            hint="leave them out",
        )
    if spec.roles is not None and launcher.with_roles is None:
        able = ", ".join(each.name for each in _TABLE.values() if each.with_roles is not None)
        raise BadInput(f"the ranks of the launcher {launcher.name} have no roles", hint=f"those of {able} have")

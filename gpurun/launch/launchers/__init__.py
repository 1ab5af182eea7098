"""Launchers start the ranks of a gang. Each launcher is one value. Pure.

No code outside this room knows a launcher's name. To add a launcher: write a file or a few lines here, add its name to
`_TABLE`, its command line to `lines.table`, a recipe, and a row to docs/launchers.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpurun.jobs.spec import Disagreement, HorovodKnobs, JobSpec
from gpurun.launch.launchers.direct import DEEPSPEED, JAX, SRUN, TASKS, TORCHRUN
from gpurun.launch.launchers.horovod import GLOO, MPI
from gpurun.launch.launchers.launcher import Launcher, PlacedGang, with_own_variables
from gpurun.launch.launchers.mpirun import MPIRUN
from gpurun.launch.launchers.replacing import typed_line
from gpurun.launch.launchers.tensorflow import TENSORFLOW

__all__ = ["ALONE", "NAMES", "Launcher", "PlacedGang", "launcher_of", "settled"]

_TABLE: Mapping[str, Launcher] = {
    each.name: each for each in (GLOO, MPIRUN, TORCHRUN, DEEPSPEED, JAX, TENSORFLOW, SRUN, TASKS)
}
NAMES = tuple(_TABLE)
ALONE = TASKS.name
"""The launcher of a program that needs nothing of its image and joins no others."""

_LIKELY: Mapping[str, str] = {
    **dict.fromkeys(("pytorch", "torch", "ddp", "fsdp", "elastic", "lightning", "torch.distributed"), TORCHRUN.name),
    **dict.fromkeys(("slurm", "sbatch"), SRUN.name),
    **dict.fromkeys(("mpi", "openmpi", "ompi", "mpiexec", "mpi4py"), MPIRUN.name),
    **dict.fromkeys(("tf", "keras", "ps"), TENSORFLOW.name),
    **dict.fromkeys(("hvd", "horovodrun", "gloo"), GLOO.name),
    **dict.fromkeys(("none", "copies", "local"), ALONE), "ds": DEEPSPEED.name,
}  # fmt: skip
"""What other programs and people call gpurun's launchers."""


def launcher_of(spec: JobSpec) -> Launcher:
    """Return the launcher of a job.

    Raises:
        BadInput: there is no such launcher.
    """
    found = _TABLE.get(spec.launcher)
    if found is None:
        hint = f"{_likely(spec.launcher)} launchers are: {', '.join(NAMES)}"
        raise Disagreement(f"there is no launcher {spec.launcher!r}", "launcher", hint=hint)
    return MPI if found is GLOO and spec.controller == "mpi" else found


def _likely(name: str) -> str:
    """Return which launcher a person may mean, before the list of all."""
    wanted = name[:40].lower()
    if wanted == "accelerate":
        return "write `accelerate launch …` as the command, or choose torchrun. The"
    found = _LIKELY.get(wanted) or next(iter(difflib.get_close_matches(wanted, NAMES, n=1)), "")
    return f"did you mean {found}? The" if found else "the"


def settled(
    spec: JobSpec, *, is_named: bool, runs_itself: Callable[[JobSpec], bool] = lambda _: False
) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the final spec, and lines that tell the user how gpurun read the command.

    If a launcher is in the user's command, gpurun takes its place (`typed_line`).

    Args:
        is_named: a recipe or a flag names the launcher.
        runs_itself: whether the first word of a job's command is an executable file that names its interpreter.

    Raises:
        BadInput: there is no such launcher, it does not support something in the spec, or gpurun cannot run the
            command as it is meant.
    """
    launcher_of(spec)
    if spec.one_per_host and not is_named:
        spec = replace(spec, launcher=ALONE)
    spec, said = typed_line(spec, is_named=is_named)
    launcher = launcher_of(spec)
    if launcher.interpreter and spec.command[0].endswith(".py"):
        starter = launcher.by_itself if runs_itself(spec) else launcher.interpreter
        spec = replace(spec, command=(*starter, *spec.command))
    _check(spec, launcher)
    spec = replace(spec, reforms=spec.min_gpus is not None and launcher.elastic == "anew")
    spec, about_env = with_own_variables(spec if launcher.with_roles is None else launcher.with_roles(spec), launcher)
    return spec, (*said, *about_env)


def _check(spec: JobSpec, launcher: Launcher) -> None:
    if spec.min_gpus is not None and launcher.elastic == "no":
        if spec.launcher == GLOO.name:
            what = "an elastic job (min_gpus) cannot use the controller mpi"
            raise Disagreement(what, "min_gpus", hint="remove min_gpus, or use `controller: gloo`")
        what = f"a job with the launcher {launcher.name} cannot be elastic (min_gpus)"
        raise Disagreement(what, "min_gpus", hint="remove min_gpus, or choose another launcher")
    if spec.launcher != GLOO.name and (spec.controller != "gloo" or spec.horovod != HorovodKnobs()):
        raise Disagreement(
            f"only the launcher {GLOO.name} uses 'controller' and 'horovod', but the job's launcher is {launcher.name}",
            "horovod" if spec.controller == "gloo" else "controller",
            hint=f"remove 'controller' and 'horovod', or choose --launcher {GLOO.name}",
        )  # fmt: skip
    if spec.one_per_host and launcher.one_per_gpu:
        raise Disagreement(
            f"the launcher {launcher.name} does not support one_per_host: {launcher.one_per_gpu}",
            "one_per_host",
            hint=f"remove one_per_host, or choose --launcher {ALONE}, which runs the command once on each host",
        )
    if spec.roles is not None and launcher.with_roles is None:
        able = ", ".join(each.name for each in _TABLE.values() if each.with_roles is not None)
        what = f"only the launcher {able} supports 'roles', but the job's launcher is {launcher.name}"
        raise Disagreement(what, "roles", hint=f"remove 'roles', or choose --launcher {able}")

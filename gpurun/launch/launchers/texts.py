"""Run a shell's text that starts launchers once on each host, and only on hosts where that is right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.direct import SRUN as BY_SLURM
from gpurun.launch.launchers.direct import TASKS
from gpurun.launch.launchers.lines.mpi import MPIRUN
from gpurun.launch.launchers.lines.script import ScriptLaunch
from gpurun.launch.launchers.lines.table import SRUN
from gpurun.quantities.counts import count

VARIABLES = "$NNODES, $NODE_RANK, $MASTER_ADDR and $MASTER_PORT"


def once_on_hosts(
    spec: JobSpec, launches: Sequence[ScriptLaunch], where: str, *, by_srun: bool = False
) -> tuple[JobSpec, str]:
    """Return the job that runs its command once on each host, and what a person is told.

    Args:
        launches: the launchers that the command starts; one at least.
        where: the text that starts them, for people: ``train.sh``, or ``the command``.
        by_srun: ``srun`` stands in front, so the text finds Slurm's variables, too.

    Raises:
        BadInput: the text starts its processes on other hosts than gpurun can give it.
    """
    names = ", ".join(dict.fromkeys(each.typed.name for each in launches))
    refuse_left(launches, where)
    if slurms := [each for each in launches if each.typed is SRUN or each.typed.is_queue]:
        found = max((each for each in slurms if each.typed is SRUN), key=lambda each: len(each.line), default=None)
        srun = found.line if found is not None else "PROGRAM ARGUMENTS"
        besides = "".join(f"\n    {each}" for each in (found.besides if found is not None else ()))
        raise BadInput(
            f"{where} calls {slurms[0].typed.name}, but gpurun itself queues jobs and starts ranks",
            hint=f"write the line that starts the ranks as the command: gpurun submit -n {spec.gpus} … -- {srun}\n    "
            f"gpurun reads the line, and starts the ranks without srun{besides}",
        )
    if any(each.names_hosts for each in launches):
        raise BadInput(
            f"{where} names hosts for {names}, but gpurun chooses the hosts",
            hint=f"use {VARIABLES} in {where}: gpurun sets these variables on each host\n    "
            f"or write the launcher's line as the command: "
            f"gpurun submit -n {spec.gpus} … -- {next(each.line for each in launches if each.names_hosts)}",
        )
    each_host, why = _gpus_of_a_host(spec, launches, where)
    given = spec.constraints.gpus_per_host
    if each_host is not None and given not in (None, each_host):
        raise BadInput(
            f"{where} starts {names} for {count(each_host, 'GPU')} on each host, but gpus_per_host is {given}",
            hint=f"remove gpus_per_host, or change the numbers in {where}",
        )
    constraints = replace(spec.constraints, gpus_per_host=each_host if each_host is not None else given)
    said = f"{where} starts {names}, so gpurun runs {where} once on each host{why}"
    launcher = BY_SLURM.name if by_srun else TASKS.name
    return replace(spec, launcher=launcher, one_per_host=True, constraints=constraints), said


def refuse_left(launches: Sequence[ScriptLaunch], where: str) -> None:
    """Refuse a text that ends while a launcher runs in the background: the job would end with it, and succeed."""
    if left := next((each for each in launches if each.is_left), None):
        raise BadInput(
            f"{where} starts {left.typed.name} in the background (&) and does not wait, so the job would end at once",
            hint=f"remove the & (and nohup), or write `wait` at the end of {where}",
        )


def _gpus_of_a_host(spec: JobSpec, launches: Sequence[ScriptLaunch], where: str) -> tuple[int | None, str]:
    """Return the GPUs of the job on each of its hosts, and why; None if they may be as many as gpurun likes."""
    hosts = max((each.hosts for each in launches if each.hosts is not None), default=None)
    numbers = [(each.per_host, each) for each in launches if each.per_host is not None]
    numbers = [(number, each) for number, each in numbers if each.typed is not MPIRUN or number > spec.gpus]
    per_host = (
        max([number for number, _ in numbers] + [sum(number for number, each in numbers if each.at_once)]) or None
    )
    total = hosts * per_host if hosts is not None and per_host is not None else None
    wanted = per_host if total is None else total
    if wanted is not None and (spec.gpus % wanted if total is None else spec.gpus != wanted):
        on = "on each host" if hosts is None else "on one host" if hosts == 1 else f"on {hosts} hosts"
        some = count(wanted, "process", "processes")
        taken = next((each.line for number, each in numbers if number == per_host and each.typed.launcher), "")
        line = f"\n    or write the launcher's own line as the command: gpurun submit -n {wanted} … -- {taken}"
        raise BadInput(
            f"{where} starts {some} {on}, but the job has {count(spec.gpus, 'GPU')} and starts one process for each "
            "GPU",
            hint=f"use gpurun submit -n {wanted}, or change the numbers in {where}"
            + (line if taken and "…" not in taken else ""),
        )
    if hosts is not None and spec.gpus % hosts:
        raise BadInput(
            f"{where} starts its processes on {hosts} hosts: {count(spec.gpus, 'GPU')} cannot be divided by {hosts}",
            hint=f"choose another number of GPUs with -n, or change the numbers in {where}",
        )
    if hosts == 1:
        return spec.gpus, (
            f"; {where} is written for one host, so the job stays on one host (for more hosts, use {VARIABLES})"
        )
    if hosts is not None:
        return spec.gpus // hosts, f": {hosts} hosts"
    return per_host, "" if per_host is None else f", with {count(per_host, 'GPU')} on each"

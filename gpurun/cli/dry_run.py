"""``--dry-run``: show what ``submit``, ``sweep run`` or ``scale run`` would execute now, with these leases."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from gpurun.cli.printing import duration, print_json, printable, say_problem
from gpurun.cli.shares import lines
from gpurun.cli.why import print_explanation
from gpurun.errors import BadInput
from gpurun.head.planned import expected, planned
from gpurun.jobs.words import quoted
from gpurun.launch.plan import HostPlan, Plan
from gpurun.launch.rank import RANK_SCRIPT
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.spec import JobSpec
    from gpurun.scheduler.model import Placement


def show_plan(
    spec: JobSpec, inventory: Inventory, said: Sequence[str], *, as_json: bool, more: Mapping[str, Any] | None = None
) -> None:
    """Print the plan of a job that would start now, or why it would wait (exit 0 either way).

    Args:
        said: how gpurun read the command, which a person has seen already.
        more: further keys of the JSON document.

    An image that the head does not have is a warning here; `submit` would refuse the job.

    Raises:
        BadInput, HostNotReady: the environment of the recipe's `python` cannot be planned.
    """
    found = planned(spec, inventory, said, os.environ)
    if problem := found.image_problem:
        say_problem(BadInput(f"submit would refuse this job: {problem}", hint=problem.hint))
    if as_json:
        print_json({**found.document, **(more or {})})
        return
    if "environment" in found.document:
        typer.echo(_environment_line(found.document))
    if found.waits is not None:
        print_explanation(found.waits, "the job")
    if found.start is not None:
        _print(spec, inventory, *found.start)


def _environment_line(told: dict[str, Any]) -> str:
    what = told["environment"]
    does = "is already built, with" if what["built"] else "will be built once, on the head, with"
    return printable(f"{what['image']} on {what['base']} {does}: {', '.join(what['requirements'])}")


def _print(spec: JobSpec, inventory: Inventory, placement: Placement, plan: Plan) -> None:
    typer.echo(f"{spec.name}: {count(spec.gpus, 'GPU')} ({placement.generation}) in {', '.join(placement.racks)}")
    if spec.rehearse_s is not None and spec.gpus > 1:
        typer.echo(
            f"  before the job starts, one rank rehearses on one GPU for {duration(spec.rehearse_s)}, "
            "or until its first step"
        )
    for grant in placement.grants:
        gpus = f"GPUs {','.join(str(gpu) for gpu in grant.gpus)}" if grant.gpus else "parameter servers, no GPU"
        typer.echo(f"  {grant.host} ({inventory.by_name[grant.host].rack}): {gpus}")
    for line in lines(expected(spec, placement.grants, inventory, os.environ)):
        typer.echo(f"  {line}")
    typer.echo("fabric settings, each with its source:")
    for setting in plan.first.settings:
        typer.echo(f"  {setting.name}={setting.value}  ({setting.source}: {setting.reason})")
    whole: list[HostPlan] = []
    for host in plan.hosts:
        like, changes = _alike(host, whole)
        if like is None:
            whole.append(host)
            typer.echo(f"on {host.host}:\n  {_shown(host.run)}")
        else:
            typer.echo(f"on {host.host}: the same as on {like}{', but ' if changes else ''}{_shown(changes)}")
        for told in host.ranks:
            typer.echo(f"  a rank on {host.host} gets {' '.join(f'{name}={value}' for name, value in told.items())}")
    if plan.has_launcher:
        typer.echo(f"in the container on {plan.first.host}:\n  {_shown(plan.launch)}")
    typer.echo(f"gpurun's script {RANK_SCRIPT} runs this command for each rank:\n  {_shown(spec.command)}")


def _alike(host: HostPlan, shown: Sequence[HostPlan]) -> tuple[str | None, tuple[str, ...]]:
    """Return a fully printed host with nearly the same argv, and the words that differ; None if there is none."""
    for other in shown:
        changed = tuple(word for old, word in zip(other.run, host.run, strict=False) if old != word)
        if len(other.run) == len(host.run) and len(changed) <= len(host.run) // 4:
            return other.host, changed
    return None, ()


def _shown(argv: tuple[str, ...]) -> str:
    """Return an argv as a person would type it. Leaves `$(id -u)` and `$HOME` for the host's shell to expand."""
    return " ".join(word if word.startswith(("$", "type=bind,source=$")) else quoted(word) for word in argv)

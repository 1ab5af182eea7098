"""``--dry-run``: show what ``submit``, ``sweep run`` or ``scale run`` would execute now, with these leases."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import typer

from gpurun.cli.printing import print_json, say_problem
from gpurun.cli.shares import lines
from gpurun.cli.why import print_explanation
from gpurun.content.tree import Copied, LeftOut
from gpurun.documents.plain import printable
from gpurun.errors import BadInput
from gpurun.head.submit import PlanShape, expected, planned
from gpurun.jobs.spec import given_again, quoted
from gpurun.launch.plan import HostPlan, Plan
from gpurun.launch.rank import RANK_SCRIPT
from gpurun.quantities import count, duration, plural, size_text

if TYPE_CHECKING:
    from gpurun.head.submit import EnvironmentShape
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.spec import JobSpec, Placement
    from gpurun.studies.campaign_plan import RefusedSize


# Say what a person may not expect of a job's code: what is left out, links that lead nowhere, a large folder. Pure.


LARGE_BYTES = 100 << 20
"""So large a folder is named: the head keeps a copy of it for each submission, and each host gets it."""
MOST_NAMED = 3


def words(workdir: str, copied: Copied, left: LeftOut) -> tuple[str, ...]:
    """Return what to tell about a workdir; nothing if it holds no surprise."""
    return tuple(filter(None, (_left_out(left), _leading_out(copied, left), _large(workdir, copied))))


def _left_out(left: LeftOut) -> str:
    if not left.names:
        return ""
    least = "" if left.is_all else "at least "
    size = f"{least}{_files(left.files)}, {size_text(left.size_bytes)}"
    given, line = given_again(left.names[0], left.names)
    return (
        f"workdir: .gitignore leaves out {_few(left.names)} ({size}). If ranks need {given}, add a line "
        f"such as `{line}` at the end of .gitignore, or submit with --data NAME={given}: ranks read /data/NAME"
    )


def _leading_out(copied: Copied, left: LeftOut) -> str:
    out = [f"{path} → {target}" for path, target in sorted(copied.links.items()) if _leads_out(path, target, left)]
    if not out:
        return ""
    verb = "points outside the copied files" if len(out) == 1 else "point outside the copied files"
    return (
        f"workdir: {_few(out)} {verb}, so ranks do not find the linked files. Copy the linked files into the workdir, "
        "or give the files with --data"
    )


def _leads_out(path: str, target: str, left: LeftOut) -> bool:
    if target.startswith("/"):
        return True
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    is_left = any(meant == name or meant.startswith(f"{name}/") for name in left.names)
    return meant == ".." or meant.startswith("../") or is_left


def _large(workdir: str, copied: Copied) -> str:
    total = sum(copied.sizes.values())
    if total < LARGE_BYTES:
        return ""
    below: dict[str, int] = {}
    for path, size in copied.sizes.items():
        top = path.split("/", 1)[0] + ("/" if "/" in path else "")
        below[top] = below.get(top, 0) + size
    biggest = sorted(below.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMED]
    named = ", ".join(f"{name} {size_text(size)}" for name, size in biggest)
    return (
        f"workdir: {workdir} has {size_text(total)} in {_files(len(copied.sizes))} ({named}). The head keeps a "
        "copy for each submission. List files that ranks do not need in .gitignore, and give data with --data"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _files(count: int) -> str:
    return f"{count:,} {plural(count, 'file')}"


class StudyShape(TypedDict, total=False):
    """What a sweep or a campaign adds to a plan.

    Attributes:
        trials: the number of trials; only for `gpurun sweep run`.
        runs: the number of runs; only for `gpurun scale run`.
        refused: the sizes that cannot run; only for `gpurun scale run`.
    """

    trials: int
    runs: int
    refused: tuple[RefusedSize, ...]


class DryRunShape(PlanShape, StudyShape):
    """The plan of `gpurun submit`, of one trial of `gpurun sweep run`, or of the largest run of `gpurun scale run`."""


def show_plan(
    spec: JobSpec, inventory: Inventory, said: Sequence[str], *, as_json: bool, more: StudyShape | None = None
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
        document: DryRunShape = {**found.document, **(more or {})}
        print_json(document)
        return
    if "environment" in found.document:
        typer.echo(_environment_line(found.document["environment"]))
    if found.waits is not None:
        print_explanation(found.waits, "the job")
    if found.start is not None:
        _print(spec, inventory, *found.start)


def _environment_line(what: EnvironmentShape) -> str:
    does = "is already built, with" if what["built"] else "will be built once, on the head, with"
    return printable(f"{what['image']} on {what['base']} {does}: {', '.join(what['requirements'])}")


def _print(spec: JobSpec, inventory: Inventory, placement: Placement, plan: Plan) -> None:
    typer.echo(f"{spec.name}: {count(spec.gpus, 'GPU')} ({placement.generation}) in {', '.join(placement.racks)}")
    if spec.rehearse_s is not None and spec.gpus > 1:
        typer.echo(
            f"  before the job starts, one rank rehearses on one GPU for {duration(spec.rehearse_s)}, "
            "or until its first step"
        )
    if spec.retry is not None:
        typer.echo(f"  {spec.retry.words}")
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

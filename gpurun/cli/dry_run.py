"""``--dry-run``: show what ``submit``, ``sweep run`` or ``scale run`` would execute now, with these leases."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from gpurun.cli.printing import duration, print_json, printable, say_problem
from gpurun.cli.shares import expected, lines
from gpurun.cli.why import print_explanation
from gpurun.errors import BadInput, GpurunError
from gpurun.head.wish import NO_JOB
from gpurun.jobs.words import quoted
from gpurun.launch.plan import HostPlan, Plan, make_plan
from gpurun.launch.rank import RANK_SCRIPT
from gpurun.leases.allocate import SSH_PORTS, snapshot
from gpurun.leases.look import look
from gpurun.node.gpu.claim_rules import Claimant
from gpurun.quantities.counts import count
from gpurun.scheduler.explain import explain
from gpurun.scheduler.gangs import new_gang
from gpurun.scheduler.model import Placement
from gpurun.scheduler.schedule import schedule
from gpurun.state import clock
from gpurun.state.home import home
from gpurun.state.identity import known_id
from gpurun.state.people import myself

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.spec import Environment, JobSpec


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
    image = _environment(spec, spec.python, inventory) if spec.python else _image_problem(spec, inventory)
    rest = {"said": list(said), **image, **(more or {})}
    if "environment" in image and not as_json:
        typer.echo(_environment_line(image))
    now_s = clock.now_s()
    gang = new_gang(spec.wants, job=NO_JOB, submitted_s=now_s)
    seen = snapshot(look(home(os.environ), now_s=now_s), inventory, extra=(gang,))
    decisions = schedule(seen)
    placement = next((placement for started, placement in decisions.starts if started.id == gang.id), None)
    if placement is None:
        explanation = explain(decisions, seen, gang.id)
        if as_json:
            waits = asdict(explanation)
            print_json({
                "job": _job(spec), "placement": None, "wait": waits, "containers": {}, "launch": [], "ranks": {},
                **rest,
            })  # fmt: skip
        else:
            print_explanation(explanation, "the job")
        return
    state = home(os.environ)
    who = Claimant(NO_JOB, 1, known_id(state) or "", myself(), os.getuid(), os.uname().nodename)
    plan = make_plan(
        claimant=who, spec=spec, grants=placement.grants, inventory=inventory, accounts={},
        ssh_port=SSH_PORTS[0],
    )  # fmt: skip
    if as_json:
        print_json({**_document(spec, inventory, placement, plan), **rest})
    else:
        _print(spec, inventory, placement, plan)


def _image_problem(spec: JobSpec, inventory: Inventory) -> dict[str, Any]:
    """Warn that `submit` would refuse the job if the head does not have the image."""
    from gpurun.images.engine import Engine

    try:
        Engine(inventory.docker_host).image(spec.image)
    except GpurunError as problem:
        say_problem(BadInput(f"submit would refuse this job: {problem}", hint=problem.hint))
        return {"image_problem": str(problem)}
    return {}


def _environment(spec: JobSpec, python: Environment, inventory: Inventory) -> dict[str, Any]:
    """Return what gpurun would build on top of the image, for a recipe with `python`."""
    from gpurun.environments.build import lookup, planned
    from gpurun.images.engine import Engine

    engine = Engine(inventory.docker_host)
    plan = planned(python, spec.image, engine, os.environ)
    found = lookup(engine, plan)
    return {"environment": {
        "image": plan.reference, "base": spec.image, "base_id": plan.base.id, "key": plan.key,
        "built": found is not None, "requirements": list(plan.requirements.lines), "index": plan.settings.named,
    }}  # fmt: skip


def _environment_line(told: dict[str, Any]) -> str:
    what = told["environment"]
    does = "is there, with" if what["built"] else "is built on the head, once, with"
    return printable(f"{what['image']} on {what['base']} {does}: {', '.join(what['requirements'])}")


def _document(spec: JobSpec, inventory: Inventory, placement: Placement, plan: Plan) -> dict[str, Any]:
    hosts = [
        {"host": grant.host, "rack": inventory.by_name[grant.host].rack, "gpus": list(grant.gpus)}
        for grant in placement.grants
    ]
    return {
        "job": _job(spec),
        "placement": {"generation": placement.generation, "racks": list(placement.racks), "hosts": hosts},
        "containers": {host.host: list(host.run) for host in plan.hosts},
        "shares": {host: asdict(share) for host, share in expected(spec, placement.grants, inventory).items()},
        "launch": list(plan.launch),
        "ranks": {host.host: [dict(told) for told in host.ranks] for host in plan.hosts},
        "settings": {
            host.host: [
                {"name": s.name, "value": s.value, "reason": s.reason, "source": s.source} for s in host.settings
            ]
            for host in plan.hosts
        },
    }


def _job(spec: JobSpec) -> dict[str, Any]:
    from msgspec import to_builtins

    return dict(to_builtins(spec))


def _print(spec: JobSpec, inventory: Inventory, placement: Placement, plan: Plan) -> None:
    typer.echo(f"{spec.name}: {count(spec.gpus, 'GPU')} ({placement.generation}) in {', '.join(placement.racks)}")
    if spec.rehearse_s is not None and spec.gpus > 1:
        typer.echo(f"  before that one rank rehearses on one GPU, for {duration(spec.rehearse_s)} or up to a step")
    for grant in placement.grants:
        gpus = f"GPUs {','.join(str(gpu) for gpu in grant.gpus)}" if grant.gpus else "parameter servers, no GPU"
        typer.echo(f"  {grant.host} ({inventory.by_name[grant.host].rack}): {gpus}")
    for line in lines(expected(spec, placement.grants, inventory)):
        typer.echo(f"  {line}")
    typer.echo("settings, with where they come from:")
    for setting in plan.first.settings:
        typer.echo(f"  {setting.name}={setting.value}  ({setting.source}: {setting.reason})")
    whole: list[HostPlan] = []
    for host in plan.hosts:
        like, changes = _alike(host, whole)
        if like is None:
            whole.append(host)
            typer.echo(f"on {host.host}:\n  {_shown(host.run)}")
        else:
            typer.echo(f"on {host.host}: as on {like}{', but ' if changes else ''}{_shown(changes)}")
        for told in host.ranks:
            typer.echo(f"  a rank there is told {' '.join(f'{name}={value}' for name, value in told.items())}")
    if plan.has_launcher:
        typer.echo(f"in the container on {plan.first.host}:\n  {_shown(plan.launch)}")
    typer.echo(f"each rank runs, by {RANK_SCRIPT}:\n  {_shown(spec.command)}")


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

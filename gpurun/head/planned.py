"""What a submit would do now, without doing it: for ``--dry-run`` and ``gpurun.submit(…, dry_run=True)``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import to_builtins

from gpurun.environments.build import lookup
from gpurun.environments.build import planned as planned_environment
from gpurun.errors import GpurunError
from gpurun.facts.hardware import DockerFacts
from gpurun.head.wish import NO_JOB
from gpurun.images.engine import Engine
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Environment, Grant, JobSpec
from gpurun.launch.plan import Plan, make_plan
from gpurun.launch.share import HostShare, shares
from gpurun.leases.allocate import SSH_PORTS, snapshot
from gpurun.leases.look import look
from gpurun.node.gpu.claim_rules import Claimant
from gpurun.scheduler.explain import Explanation, explain
from gpurun.scheduler.gangs import new_gang
from gpurun.scheduler.model import Placement
from gpurun.scheduler.schedule import schedule
from gpurun.state import clock
from gpurun.state.home import home
from gpurun.state.identity import known_id
from gpurun.state.machines import read_machines
from gpurun.state.people import myself


@dataclass(frozen=True)
class Planned:
    """A job that is not submitted.

    Attributes:
        document: all of it, as ``--dry-run --json`` prints it.
        image_problem: why `submit` would refuse the job: the head does not have the image, or has no Docker.
        start: where the job would start now, and how.
        waits: why it would wait; None = it would start.
    """

    document: dict[str, Any]
    image_problem: GpurunError | None
    start: tuple[Placement, Plan] | None
    waits: Explanation | None


def planned(spec: JobSpec, inventory: Inventory, said: Sequence[str], environ: Mapping[str, str]) -> Planned:
    """Plan a job with the leases as they are now.

    Args:
        said: how gpurun read the command, which a person has seen already.

    Raises:
        BadInput, HostNotReady: the environment of the recipe's `python` cannot be planned.
    """
    problem = None if spec.python else _image_problem(spec, inventory)
    rest: dict[str, Any] = {"said": list(said)}
    rest |= _environment(spec, spec.python, inventory, environ) if spec.python else {}
    rest |= {} if problem is None else {"image_problem": str(problem)}
    state, now_s = home(environ), clock.now_s()
    gang = new_gang(spec, job=NO_JOB, submitted_s=now_s)
    seen = snapshot(look(state, now_s=now_s), inventory, extra=(gang,))
    decisions = schedule(seen)
    placement = next((placement for started, placement in decisions.starts if started.id == gang.id), None)
    if placement is None:
        waits = explain(decisions, seen, gang.id)
        empty: dict[str, Any] = {"placement": None, "wait": asdict(waits), "containers": {}, "launch": [], "ranks": {}}
        return Planned({"job": _job(spec), **empty, **rest}, problem, None, waits)
    who = Claimant(NO_JOB, 1, known_id(state) or "", myself(), os.getuid(), os.uname().nodename)
    plan = make_plan(
        claimant=who, spec=spec, grants=placement.grants, inventory=inventory, accounts={}, ssh_port=SSH_PORTS[0]
    )
    document = {**_document(spec, inventory, placement, plan, environ), **rest}
    return Planned(document, problem, (placement, plan), None)


def expected(
    spec: JobSpec, grants: Sequence[Grant], inventory: Inventory, environ: Mapping[str, str]
) -> dict[str, HostShare]:
    """Return host → share of a gang that has not started yet, by what this user knows of the hosts."""
    machines = read_machines(home(environ), os.getuid())
    there = [grant for grant in grants if grant.host in inventory.by_name]
    known = {}
    for grant in there:
        machine = machines.get(inventory.by_name[grant.host].machine)
        if machine is not None and machine.memory_mib is not None:
            known[grant.host] = DockerFacts(memory_bytes=machine.memory_mib << 20, cores=machine.cores)
    return shares(spec, there, inventory, known=known)


def _image_problem(spec: JobSpec, inventory: Inventory) -> GpurunError | None:
    """Return why `submit` would refuse the job because of its image: a plan is made without it."""
    try:
        Engine(inventory.docker_host).image(spec.image)
    except GpurunError as problem:
        return problem
    return None


def _environment(
    spec: JobSpec, python: Environment, inventory: Inventory, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return what gpurun would build on top of the image, for a recipe with `python`."""
    engine = Engine(inventory.docker_host)
    plan = planned_environment(python, spec.image, engine, environ)
    found = lookup(engine, plan)
    return {"environment": {
        "image": plan.reference, "base": spec.image, "base_id": plan.base.id, "key": plan.key,
        "built": found is not None, "requirements": list(plan.requirements.lines), "index": plan.settings.named,
    }}  # fmt: skip


def _document(
    spec: JobSpec, inventory: Inventory, placement: Placement, plan: Plan, environ: Mapping[str, str]
) -> dict[str, Any]:
    hosts = [
        {"host": grant.host, "rack": inventory.by_name[grant.host].rack, "gpus": list(grant.gpus)}
        for grant in placement.grants
    ]
    return {
        "job": _job(spec),
        "placement": {"generation": placement.generation, "racks": list(placement.racks), "hosts": hosts},
        "containers": {host.host: list(host.run) for host in plan.hosts},
        "shares": {host: asdict(share) for host, share in expected(spec, placement.grants, inventory, environ).items()},
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
    return dict(to_builtins(spec))

"""The site's programs around an attempt: ``prolog`` before its containers, ``epilog`` after them, on each host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from gpurun.doctor.hooks import ANSWER_S, limit_s
from gpurun.errors import GpurunError
from gpurun.inventory.model import Inventory
from gpurun.jobs.events import EventLog
from gpurun.leases.lease import Lease
from gpurun.remote.agent import Agent
from gpurun.supervisor.links import Links


def run_prologs(links: Links, inventory: Inventory, lease: Lease, hosts: Collection[str]) -> Mapping[str, GpurunError]:
    """Run the prolog on each of `hosts` that has one; return the hosts where it failed. Idempotent: a host does not
    repeat a prolog that has succeeded for this attempt.
    """
    programs = {host: program for host in hosts if (program := inventory.by_name[host].prolog)}
    if not programs:
        return {}
    limit = limit_s()

    def run(agent: Agent) -> None:
        about = _arguments(lease, agent.host, programs[agent.host], limit)
        agent.call("hooks.prolog", timeout_s=limit + ANSWER_S, **about)

    return links.each(run, programs).failed


def epilog_of(lease: Lease, host: str, program: tuple[str, ...]) -> dict[str, Any]:
    """Return the argument of ``gang.fence`` for a host's epilog."""
    return _arguments(lease, host, program, limit_s())


def epilog_failures(events: EventLog) -> Callable[[str, str], None]:
    """Return the function that writes an event for a host whose epilog failed; ignores a job that is removed."""

    def said(host: str, why: str) -> None:
        with suppress(FileNotFoundError):
            events.emit("host", host=host, state="epilog failed", reason=why)

    return said


def _arguments(lease: Lease, host: str, program: tuple[str, ...], limit: float) -> dict[str, Any]:
    gpus = [gpu for grant in lease.grants if grant.host == host for gpu in grant.gpus]
    whose = {"job": lease.job, "attempt": lease.attempt, "user": lease.owner, "gpus": gpus}
    return {"argv": list(program), "limit_s": limit, **whose}

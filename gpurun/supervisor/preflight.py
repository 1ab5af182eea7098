"""Before a gang starts: probe its hosts, let them connect to each other, and check that they have what the job
needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gpurun.doctor.gpu_checks import described, foreign_on
from gpurun.doctor.preflight import Preflight, preflight
from gpurun.errors import HostFailure
from gpurun.facts.claims import printable
from gpurun.facts.hardware import GpuProcess, Hardware
from gpurun.head.looking import note_survey
from gpurun.jobs.record import GpuHolder
from gpurun.supervisor.ends import End, GangEnd, failed
from gpurun.supervisor.host_claims import refused_end, report_refusals
from gpurun.supervisor.job import SupervisedJob

MOST_NAMED = 2
"""So many processes on a GPU are named; the others are counted."""


def examine(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Probe new hosts, keep the results for the plan, and refuse hosts that would make the gang fail.

    Raises:
        GangEnd: something would make it fail or hang. If only processes are in the way, the gang waits for them as for
            another job's claims.
    """
    new = {
        grant.host: grant.gpus for grant in job.lease.grants if grant.host in hosts and grant.host not in job.hardware
    }
    if not new:
        return
    begun_s = time.time()
    alone = len(job.lease.grants) == 1 and not job.spec.is_live_elastic
    members = [grant.host for grant in job.lease.grants if grant.host in job.hardware]
    found = preflight(job.links.fleet, job.inventory, new, is_alone=alone, members=members)
    job.hardware = {**job.hardware, **found.hardware}
    # Who waits for GPUs need not ask these hosts again, and knows which machines they are.
    note_survey(job.home, job.inventory, [job.inventory.by_name[host] for host in new], found.survey, begun_s)
    for finding in found.other:
        job.note(f"{', '.join(finding.hosts)}: {finding.evidence} (→ {finding.remedy})")
    if not found.blocking:
        return
    refused = {
        host: _processes_on(found.hardware[host], {*range(job.inventory.by_name[host].gpus), *new[host]})
        for host in sorted(found.strangers)
    }
    report_refusals(job, refused)
    others = found.without_strangers
    raise GangEnd(replace(_end_by(others), refused=refused) if others.blocking else refused_end(refused))


def _end_by(found: Preflight) -> End:
    """Return the end by bad hosts."""
    worst, bad = found.blocking[0], sorted(found.bad_hosts)
    failures = {host: HostFailure(found.bad_hosts[host], kind="preflight", host=host) for host in bad}
    error = HostFailure(
        f"{worst.check}: {worst.evidence}", kind="preflight", host=bad[0] if bad else None, hint=worst.remedy
    )
    end = failed(error).end
    return replace(end, suspects=tuple(bad), by_host=failures) if bad else end


def _processes_on(found: Hardware, gpus: set[int]) -> tuple[GpuHolder, ...]:
    """Return the processes on a host's GPUs that no gpurun job started. Those on several GPUs are named once."""
    held: dict[tuple[int, ...], tuple[list[GpuProcess], set[int]]] = {}
    for gpu in found.gpus:
        if gpu.index in gpus and (foreign := foreign_on(gpu)):
            held.setdefault(tuple(each.pid for each in foreign), (foreign, set()))[1].add(gpu.index)
    return tuple(_holder(processes, on) for processes, on in held.values())


def _holder(processes: Sequence[GpuProcess], gpus: set[int]) -> GpuHolder:
    more = f" and {len(processes) - MOST_NAMED} more" if len(processes) > MOST_NAMED else ""
    # without the memory: on each of several GPUs, a process uses another amount
    named = ", ".join(described(replace(each, memory_mib=None)) for each in processes[:MOST_NAMED])
    return GpuHolder(
        tuple(sorted(gpus)), user=printable(processes[0].user), why="no gpurun job started this process",
        process=printable(named + more),
    )  # fmt: skip

"""Before a gang starts: probe its hosts, let them connect to each other, and check that they have what the job
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpurun.doctor.preflight import preflight
from gpurun.errors import HostFailure
from gpurun.jobs.states import State
from gpurun.supervisor.ends import GangEnd, failed
from gpurun.supervisor.job import SupervisedJob

MOST_PLACEMENTS = 5
"""A gang is placed elsewhere because of what pre-flight finds at most this often; then it fails and says why."""


def examine(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Probe new hosts, keep the results for the plan, and refuse hosts that would make the gang fail.

    Raises:
        GangEnd: something would make it fail or hang. The gang is queued again and avoids those hosts.
    """
    new = {
        grant.host: grant.gpus for grant in job.lease.grants if grant.host in hosts and grant.host not in job.hardware
    }
    if not new:
        return
    found = preflight(job.links.fleet, job.inventory, new)
    job.hardware = {**job.hardware, **found.hardware}
    for finding in found.other:
        job.note(f"{', '.join(finding.hosts)}: {finding.evidence} (→ {finding.remedy})")
    if not found.blocking:
        return
    worst = found.blocking[0]
    bad = tuple(sorted(found.bad_hosts))
    error = HostFailure(f"{worst.check}: {worst.evidence}", host=bad[0] if bad else None, hint=worst.remedy)
    end = replace(failed(error).end, suspects=bad)
    placements = job.record.placements + 1
    if bad and placements < MOST_PLACEMENTS:
        job.amend(placements=placements)
        end = replace(end, outcome=State.QUEUED)
    raise GangEnd(end)

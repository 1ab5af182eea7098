"""STOPPING: the ladder, the outputs, the fence; then the lease is removed and the job has its outcome.

The ladder ends a gang: SIGTERM to every rank → the grace period, in which ranks may save a checkpoint → the
containers are killed and removed → every host proves that nothing of the job is left. Only then are its GPUs
free. A host that cannot be reached keeps them; it is asked again and again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpurun.errors import GpurunError, HostFailure
from gpurun.jobs.states import State
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs import collect_outputs

FENCE_TIMEOUT_S = 60.0
RETRY_FIRST_S = 1.0
RETRY_MOST_S = 30.0
POLL_S = 0.2


def stop(job: SupervisedJob, *, ladder: bool) -> State:
    """End the gang and free its GPUs. Idempotent: a supervisor that died in here is followed by another.

    Args:
        ladder: ranks may be running: give them notice first.
    """
    if ladder:
        _give_notice(job)
    collected = False
    delay_s = RETRY_FIRST_S
    pending = set(job.hosts)
    while pending:
        job.links.open(sorted(pending))
        collected = collected or collect_outputs(job)
        pending = set(_fence(job, pending))
        if pending:
            time.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MOST_S)
    return _finish(job)


def _give_notice(job: SupervisedJob) -> None:
    """SIGTERM to the ranks, then wait until the launcher has ended or the grace is over."""
    deadline = time.monotonic() + job.spec.grace_s
    job.links.open(timeout_s=5.0)
    told = job.links.each(lambda agent: agent.call("gang.signal", job=job.lease.job, name="TERM", timeout_s=10.0))
    if not any(reply.value for reply in told.ok.values()):
        return
    job.note(f"SIGTERM sent; {job.spec.grace_s:g} s of grace")
    while time.monotonic() < deadline:
        states = job.links.each(lambda agent: agent.call("gang.inspect", job=job.lease.job).value, [job.hosts[0]])
        if not any(c["status"] == "running" for c in states.ok.get(job.hosts[0], [])):
            return
        time.sleep(POLL_S)


def _fence(job: SupervisedJob, hosts: set[str]) -> Mapping[str, GpurunError]:
    """Fence `hosts`; those that could not be, with why."""
    results = job.links.each(
        lambda agent: agent.call("gang.fence", job=job.lease.job, timeout_s=FENCE_TIMEOUT_S).value, sorted(hosts)
    )
    unproven: dict[str, GpurunError] = dict(results.failed)
    for host, rest in results.ok.items():
        if any(rest.values()):
            unproven[host] = HostFailure(f"something of the job is still there: {rest}", host=host)
    for host, error in unproven.items():
        job.events.emit("host", host=host, state="not fenced", reason=error.message)
    return unproven


def _finish(job: SupervisedJob) -> State:
    """Free the GPUs, then say so."""
    record = job.folder.record()
    outcome = record.outcome or State.FAILED
    job.leases.release(job.lock)
    now = job.clock()
    if outcome is State.QUEUED:
        job.folder.clear_request()
        return job.move(State.QUEUED, queued_s=now, granted=(), started_s=None, outcome=None)
    state = job.move(outcome, ended_s=now)
    job.store.retire(job.lease.job)
    return state

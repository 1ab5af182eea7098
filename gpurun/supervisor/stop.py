"""STOPPING: stop the ranks, copy the outputs, fence the hosts; then remove the lease and write the outcome.

The order is: SIGTERM to every rank → the grace period, in which ranks may save a checkpoint → kill the containers,
which ends the log → remove the containers → check on every host that nothing of the job is left. Only then its GPUs are
free. If the check fails on a host, the host's GPUs stay in a lost lease and the host is cordoned. The job continues
without it, and gpurun checks the host again until it succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from gpurun.errors import OUTLIVED, GpurunError, words_of
from gpurun.jobs.states import State
from gpurun.jobs.store import finish
from gpurun.leases.allocator import allocator_lock
from gpurun.quantities.times import duration
from gpurun.remote.agent import Agent
from gpurun.state import durable
from gpurun.state.path import may_pass
from gpurun.supervisor.cordoning import cordon_lost, cordon_suspect
from gpurun.supervisor.ending import Ending
from gpurun.supervisor.fence import fence
from gpurun.supervisor.hooks import epilog_failures
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.last_lines import LOG_SILENT_S, end_output
from gpurun.supervisor.outputs import collect_autotune, collect_outputs

RETRY_S = 1.0
RETRY_MOST_S = 60.0
POLL_S = 0.2
QUICK_S, ANSWER_S = 3.0, 10.0
"""How long a host may take to answer: as long as the grace, within these bounds. One that hangs adds little to it."""


def stop(job: SupervisedJob) -> State:
    """Stop the gang and free its GPUs. Idempotent: if the supervisor dies during this, the next one continues."""
    damage = cordon_suspect(job, job.record.first_failure)
    ending = Ending.of(job.record, job.hosts)
    answering = {host for host in job.hosts if host not in ending.suspects or job.links.is_open(host)}
    if job.record.ladder:
        _give_notice(job, sorted(answering))
    unproven: Mapping[str, GpurunError] = {}
    while ending.asked:
        job.links.open(sorted(ending.asked & answering), timeout_s=5.0)
        ending = ending.after_lines(_end_log(job, ending.lines))
        if ending.outputs:
            collect_autotune(job)
            ending = ending.after_outputs(collect_outputs(job))
        ending = ending.now_asked(time.monotonic())
        unproven = _ask_for_proof(job, ending.proof)
        ending = ending.after_fence(unproven)
        if ending.is_over:
            break
        time.sleep(RETRY_S)
    if damage is not None and (damage := cordon_suspect(job, job.record.first_failure)) is not None:
        raise damage  # its GPUs would go to the next gang
    if ending.kept:
        kept = ", ".join(sorted(ending.kept))
        job.note(
            f"{kept}: the last outputs of this attempt are still on the host, because the head could not copy them"
        )
    return _finish(job, unproven)


def _ask_for_proof(job: SupervisedJob, hosts: Collection[str]) -> Mapping[str, GpurunError]:
    """Fence hosts after everything copied is synced on the head, because the fence removes it from the hosts."""
    durable.sync_file(job.folder.log)
    if not hosts:
        return {}
    unproven = fence(
        job.links, job.lease, hosts, state=job.state_id, containers=job.record.reached == "containers",
        said=epilog_failures(job.events),
    )  # fmt: skip
    for host, error in unproven.items():
        job.events.emit("host", host=host, state="not fenced", reason=error.message)
    return unproven


def _give_notice(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Send SIGTERM to the ranks on `hosts`, then wait until all have ended or the grace period is over.

    Does not wait if no rank runs. A rank that starts now finds the notice and ends immediately.
    """
    job.links.open(hosts, timeout_s=5.0)
    job.follow_log(host for host in hosts if host in job.members)
    patience_s = min(ANSWER_S, max(QUICK_S, job.spec.grace_s))

    def tell(agent: Agent) -> float | None:
        """Return when the ranks there got SIGTERM; None without ranks."""
        told = agent.call(
            "gang.signal", job=job.lease.job, name="TERM", attempt=job.lease.attempt, timeout_s=patience_s
        )
        return time.monotonic() if told.value else None

    told_s = {host: at_s for host, at_s in job.links.each(tell, hosts).ok.items() if at_s is not None}
    if told_s:
        job.note(f"gpurun sent SIGTERM; ranks have {duration(job.spec.grace_s)} to end")
    while told_s := {host: at_s for host, at_s in told_s.items() if time.monotonic() < at_s + job.spec.grace_s}:
        left = job.links.each(
            lambda agent: agent.call("ranks.count", job=job.lease.job, timeout_s=patience_s).value, told_s
        )
        if not any(left.ok.values()):  # what ran below a shell may outlive it by its own grace
            return
        time.sleep(POLL_S)


def _end_log(job: SupervisedJob, hosts: Collection[str]) -> set[str]:
    """Kill what still runs on `hosts` after the grace period, and copy the rest of its output.

    The fence removes the log from the hosts together with the containers. So this also asks a host that answers late.

    Returns:
        The hosts that have nothing more to copy.
    """
    there = sorted(host for host in hosts if job.links.is_open(host))
    if there:
        end_output(job, there)
    ended = {host for host in there if job.links.is_open(host)}
    job.links.open(sorted({*there} - ended), timeout_s=5.0)  # what broke the copy must not keep the proof away
    if job.hosts[0] in there and not job.log_copy.wait_for_launcher(LOG_SILENT_S):
        ended.discard(job.hosts[0])
    return ended


def _finish(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> State:
    """Free the GPUs, except those of unfenced hosts, and write the outcome immediately, before another process
    could.
    """
    job.log_copy.close()
    if unproven:
        cordon_lost(job, unproven)
    pause_s = RETRY_S
    while True:
        try:
            _give_back(job, unproven)
        except OUTLIVED as error:
            if not may_pass(error):
                raise
            job.note(f"gpurun could not record the job's end and retries in {duration(pause_s)}: {words_of(error)}")
        else:
            job.told()
            return job.record.state
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_MOST_S)


def _give_back(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> None:
    """Free the GPUs and write the outcome. Each step can be repeated after one that failed."""
    with allocator_lock(job.home, patience_s=None):
        job.gives_back = True
        if unproven:
            job.lost = job.leases.abandon(job.lock, job.lease, set(unproven))
        else:
            job.leases.release(job.lock)
        job.record = finish(job.store, job.record, now_s=job.clock())

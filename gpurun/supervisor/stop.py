"""STOPPING: stop the ranks, copy the outputs, fence the hosts; then remove the lease and write the outcome.

The order is: SIGTERM to every rank → the grace period, in which ranks may save a checkpoint → kill the containers,
which ends the log → remove the containers → check on every host that nothing of the job is left. Only then its GPUs are
free. If the check fails on a host, the host's GPUs stay in a lost lease and the host is cordoned. The job continues
without it, and gpurun checks the host again until it succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.doctor.findings import one_line
from gpurun.doctor.host_checks import ANSWER_S, limit_s
from gpurun.errors import OUTLIVED, GpurunError, HostFailure, StateDiskError, StateError, StateUnavailable, words_of
from gpurun.facts import Hardware
from gpurun.head.looking import ID
from gpurun.inventory.model import Inventory
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import FirstFailure, JobRecord, State, unknown_spec
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, finish
from gpurun.launch.container import container_name
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import lease_hosts
from gpurun.leases.store import AllocatorLock, LeaseLock, LeaseStore
from gpurun.quantities import duration
from gpurun.remote.agent import Agent
from gpurun.state import durable
from gpurun.state.hosts import Cordon, Cordons, KnownAs, cordons_on, lift_cordons, put_cordon
from gpurun.state.paths import may_pass
from gpurun.state.sharing import StateDirectory
from gpurun.supervisor.hang import furthest
from gpurun.supervisor.job import SupervisedJob, claimant_of
from gpurun.supervisor.links import Links, cluster_of
from gpurun.supervisor.log_copy import LogCopy
from gpurun.supervisor.outputs.outputs import bring_late, collect_autotune, collect_outputs
from gpurun.supervisor.outputs.progress import new_checkpoint
from gpurun.supervisor.ranks import RankReports, Seating
from gpurun.supervisor.verdict.ends import Ending, judged_retry, with_only_copies, with_steps

# The site's programs around an attempt: ``prolog`` before its containers, ``epilog`` after them, on each host.


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


# The fence: check on every host of a lease that nothing of its attempt is left. Only then its GPUs become free.


FENCE_TIMEOUT_S = 60.0


def fence(
    links: Links, lease: Lease, hosts: Iterable[str], *, state: str, containers: bool = True, outputs: bool = False,
    said: Callable[[str, str], object] = lambda *_: None,
) -> Mapping[str, GpurunError]:  # fmt: skip
    """Fence `hosts` of a lease; return the hosts where the fence failed, with the reasons.

    Also removes what earlier attempts left. Keeps what belongs to a later attempt.

    Args:
        state: the id of the state directory: the hosts release the attempt's claims last.
        containers: there may be containers, so Docker must answer, and no process may use the lease's GPUs.
        outputs: remove the outputs of the attempt, too.
        said: called with each host whose epilog failed, and why. That keeps no GPU.
    """
    gpus = {grant.host: list(grant.gpus) for grant in lease.grants}
    claimant = claimant_of(lease, state)._asdict()

    def ask(agent: Agent) -> dict[str, Any]:
        program = links.epilogs.get(agent.host)
        more: dict[str, Any] = {"epilog": epilog_of(lease, agent.host, program)} if program else {}
        reply = agent.call(
            "gang.fence", job=lease.job, attempt=lease.attempt, containers=containers, outputs=outputs,
            gpus=gpus[agent.host] if containers else None, claimant=claimant,
            timeout_s=FENCE_TIMEOUT_S + (limit_s() if program else 0), **more,
        )  # fmt: skip
        return {**reply.value}

    results = links.each(ask, sorted(hosts))
    unproven: dict[str, GpurunError] = dict(results.failed)
    for host, rest in results.ok.items():
        if why := rest.pop("epilog", ""):
            said(host, one_line(why))
        if any(rest.values()):
            unproven[host] = HostFailure(what_is_left(rest), host=host)
    return unproven


def what_is_left(rest: Mapping[str, Any]) -> str:
    """Describe why a fence failed, from the answer of `gpurun.node.job.gang.fence`."""
    left = [
        f"GPU {one['gpu']} is held by pid {one['pid']} of {one['user'] or 'an unknown user'}"
        f"{', container ' + one['container'] if one['container'] else ''} ({one['command'][:120] or 'no command line'})"
        for one in rest["users"]
    ]
    if rest["gpu_problem"]:
        left.append(rest["gpu_problem"])
    left += [f"container {ident[:12]} still exists" for ident in rest["containers"]]
    left += [f"process {command[:120]!r} still runs" for command in rest["processes"]]
    if rest["folder"]:
        left.append("the job's folder still exists")
    left += [f"the claim {name}, which reserves a GPU on the host, still exists" for name in rest["claims"]]
    return "; ".join(left)


# Cordon hosts whose hardware failed, and hosts that could not be fenced.


def cordon_suspect(job: SupervisedJob, failure: FirstFailure | None) -> StateError | None:
    """Cordon the host whose hardware failed the gang, until a person has looked at it.

    Returns:
        The damage of the cordons file if it prevents this. The gang ends anyway.
    """
    if failure is None or failure.host is None or not failure.cordon:
        return None
    why = f"{failure.reason}, in {job.lease.job}"
    try:
        new = _cordon(job, {failure.host: Cordon("cordoned", "gpurun", job.clock(), why, evidence=failure.evidence)})
    except StateUnavailable:
        raise
    except StateError as error:
        return error
    if new:
        job.events.emit("host", host=failure.host, state="cordoned", reason=failure.reason, evidence=failure.evidence)
    return None


def cordon_lost(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> None:
    """Cordon hosts that could not be fenced."""
    why = f"gpurun could not check that {job.lease.job} left nothing on the host (the fence)"
    _cordon(
        job,
        {host: Cordon("lost", "gpurun", job.clock(), why, evidence=error.message) for host, error in unproven.items()},
    )
    job.note(
        f"{', '.join(sorted(unproven))}: lost; the GPUs stay leased until a fence, the check that the "
        "job left nothing on the host, succeeds"
    )


def _with_id(known: KnownAs, hardware: Mapping[str, Hardware]) -> KnownAs:
    """Return by what a machine is known, with the id that it gave to pre-flight if the lease has none.

    An id that several hosts of the gang gave says nothing.
    """
    said = [each.machine_id for each in hardware.values()]
    found = hardware[known.host].machine_id if known.host in hardware else ""
    is_its = ID.fullmatch(found) is not None and said.count(found) == 1
    return replace(known, id=found) if is_its and not known.id else known


def _cordon(job: SupervisedJob, wanted: Mapping[str, Cordon]) -> bool:
    """Cordon hosts that have no cordon yet; return False if all have one.

    If another user keeps the lock of the cordons, the hosts stay in use and the job says so, because a gang's other
    GPUs must not wait for a cordon.
    """
    try:
        with Cordons(job.home).changing() as cordons:
            known = {each.host: _with_id(each, job.hardware) for each in lease_hosts(job.lease)}
            new = wanted.keys() - cordons_on(cordons, known.values()).keys()
            for host in sorted(new):
                put_cordon(cordons, known.get(host, KnownAs(host)), wanted[host])
            return bool(new)
    except StateDiskError:
        raise
    except StateUnavailable as error:
        hosts = sorted(wanted)
        job.note(
            f"gpurun could not cordon {', '.join(hosts)}: {error}; run `gpurun inventory cordon {','.join(hosts)}`"
        )
        return False


# Copy the last output of ranks before a fence removes it from their host.


REST_S = 600.0
"""How long what ranks have printed may still be copied, while it comes; their GPUs are held meanwhile."""
ASKED_REST_S = 20.0
"""The same where a person or another gang waits for the GPUs."""
LOG_SILENT_S = 5.0
"""The containers were killed: how long its log may be silent before the fence removes what is left of it."""


def end_output(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Kill what still runs of the attempt on `hosts`, and copy the rest of its ranks' output."""
    job.follow_log(hosts)
    is_asked = job.record.outcome in (State.CANCELLED, State.QUEUED) and job.record.unjudged is None
    _end(job.log_copy, job.links, job.lease, hosts, ASKED_REST_S if is_asked else REST_S)


def _end(log_copy: LogCopy, links: Links, lease: Lease, hosts: Collection[str], rest_s: float) -> None:
    path = f"/containers/{container_name(lease.job, lease.attempt)}/kill"
    links.each(lambda agent: agent.call("docker.request", method="POST", path=path), hosts)
    log_copy.take_rest(hosts, rest_s)


def end_late_output(folder: JobFolder, lease: Lease, links: Links, hosts: Collection[str]) -> None:
    """Do the same as `end_output`, for hosts that answer after the job's end.

    Only one process may write a log. So this does nothing if the job will run again, or has run again.

    Raises:
        StateError: the log cannot be written, or the disk failed.
    """
    try:
        record = folder.record()
    except StateUnavailable:  # it says nothing about the job, and the fence removes the lines
        raise
    except StateError:  # a person has removed the job
        return
    is_over = record.state.ended and record.attempt == lease.attempt and not lease.found
    there = sorted(host for host in hosts if links.is_open(host))
    if not there or not is_over or record.reached != "containers" or not record.granted:
        return
    job, first = lease.job, record.granted[0].host
    log_copy = LogCopy(
        links, first, job=job, attempt=lease.attempt, container=container_name(job, lease.attempt),
        path=folder.log, clock=time.time, reports=RankReports(_seating(folder, record)), limit=_limit(folder),
    )  # fmt: skip
    try:
        log_copy.start()
        log_copy.follow(there)
        _end(log_copy, links, lease, there, REST_S)
        if first in there:
            log_copy.wait_for_launcher(LOG_SILENT_S)
    finally:
        log_copy.close()
    durable.sync_file(folder.log)


def _limit(folder: JobFolder) -> int:
    try:
        return folder.spec().log_limit
    except StateError:
        return JobSpec.log_limit_mib << 20


def _seating(folder: JobFolder, record: JobRecord) -> Seating:
    try:
        return Seating.of(record.granted, folder.spec())
    except StateError:  # damaged: its ranks are where they began
        return Seating.of(record.granted, unknown_spec(record))


# Lost leases: try to fence hosts again until each fence succeeds; then their GPUs are free.


LOST_RETRY_FIRST_S = 5.0
LOST_RETRY_MOST_S = 60.0


def lose_rest(home: Path, lease: Lease, lock: LeaseLock) -> tuple[Lease, LeaseLock]:
    """Turn the lease of an ended attempt into a lost lease: its hosts are fenced before its GPUs become free.

    gpurun removes an attempt's lease before the attempt ends. So a person or a backup has put this lease back.
    """
    with AllocatorLock(home).held(patience_s=None):
        return LeaseStore(home).abandon(lock, lease, {grant.host for grant in lease.grants})


def keep_asking(home: Path, lease: Lease, lock: LeaseLock) -> None:
    """Hold a lost lease until every one of its hosts has been fenced. Then its GPUs are free.

    If a person uncordons such a host, the job may run there again. The fence leaves that later attempt alone.
    """
    folder = JobStore(home).get(lease.job)
    links = Links(cluster_of(folder, lease)[0], [grant.host for grant in lease.grants])
    events = EventLog(folder.events, clock=time.time)
    proof = f"attempt {lease.attempt} left nothing on the host"
    pending = set(links.targets)
    delay_s = LOST_RETRY_FIRST_S
    try:
        while pending:
            links.open(sorted(pending), timeout_s=10.0)
            answering = {host for host in pending if links.is_open(host)}
            end_late_output(folder, lease, links, pending)
            links.open(sorted(answering), timeout_s=10.0)  # what broke the copy must not keep the proof away
            keep = with_only_copies(None if lease.found else _record(folder), lease, pending)
            said = epilog_failures(events)
            unproven = set(
                fence(links, lease, pending - keep, state=StateDirectory(home).id(), outputs=True, said=said)
            )
            if keep:
                unproven.update(fence(links, lease, keep, state=StateDirectory(home).id(), outputs=False, said=said))
            fenced = pending - unproven
            for host in sorted(fenced):
                with suppress(FileNotFoundError):  # a person may have removed the job since
                    events.emit("host", host=host, state="fenced", reason=proof)
            pending -= fenced
            if pending:
                time.sleep(delay_s)
                delay_s = min(delay_s * 2, LOST_RETRY_MOST_S)
        found_again(home, lease, links.targets)
        LeaseStore(home).release(lock)
        bring_late(home, lease, links, list(links.targets))
    finally:
        links.close()


def _record(folder: JobFolder) -> JobRecord | None:
    try:
        return folder.record()
    except StateUnavailable:  # it says nothing about the job, whose outputs may be on its hosts alone
        raise
    except StateError:  # a person has removed the job
        return None


def found_again(home: Path, lease: Lease, hosts: Collection[str]) -> None:
    """Uncordon hosts of a lease that were lost and have been fenced."""
    fenced = [each for each in lease_hosts(lease) if each.host in hosts]
    with Cordons(home).changing() as cordons:
        found = cordons_on(cordons, fenced)
        for each in fenced:
            if each.host in found and found[each.host].state == "lost":
                lift_cordons(cordons, each)


RETRY_S = 1.0
RETRY_MOST_S = 60.0
POLL_S = 0.2
QUICK_S, MOST_PATIENCE_S = 3.0, 10.0
"""How long a host may take to answer: as long as the grace, within these bounds. One that hangs adds little to it."""


def stop(job: SupervisedJob) -> State:
    """Stop the gang and free its GPUs. Idempotent: if the supervisor dies during this, the next one continues."""
    damage = cordon_suspect(job, job.record.first_failure)
    ending = Ending.of(job.record, job.hosts)
    answering = {host for host in job.hosts if host not in ending.suspects or job.links.is_open(host)}
    if job.record.ladder:
        _give_notice(job, sorted(answering))
    if job.record.unjudged is not None:
        _note_progress(job, sorted(answering))
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
    if job.record.unjudged is not None:
        _judge_retry(job)
    return _finish(job, unproven)


def _note_progress(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Record what ranks have reported after SIGTERM, before the fence removes their reports."""
    job.links.open(hosts, timeout_s=5.0)
    before = job.record.setback
    if before is not None and (now := with_steps(before, furthest(job))) != before:
        job.amend(setback=now)


def _judge_retry(job: SupervisedJob) -> None:
    """Decide whether the job is retried, now that the head has all outputs that it can get. After a crash, the next
    supervisor decides the same.
    """
    record, retry = job.record, job.spec.retry
    assert record.unjudged is not None
    if retry is None or record.setback is None:  # the spec is damaged
        job.amend(outcome=record.unjudged.outcome, unjudged=None)
        return
    found = judged_retry(record, retry, new_checkpoint(job.outputs, job.folder.path), now_s=job.clock())
    job.amend(
        outcome=found.outcome, reason=found.reason, setback=found.setback, restart=found.restart, unjudged=None,
        retries=record.retries + (found.restart is not None),
    )  # fmt: skip


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
    patience_s = min(MOST_PATIENCE_S, max(QUICK_S, job.spec.grace_s))

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
    with AllocatorLock(job.home).held(patience_s=None):
        job.gives_back = True
        if unproven:
            job.lost = job.leases.abandon(job.lock, job.lease, set(unproven))
        else:
            job.leases.release(job.lock)
        job.record = finish(job.store, job.record, now_s=job.clock())

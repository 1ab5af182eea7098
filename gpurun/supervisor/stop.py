"""STOPPING: the ladder, the outputs, the fence; then the lease is removed and the job has its outcome.

The ladder ends a gang: SIGTERM to every rank → the grace period, in which ranks may save a checkpoint → the containers
are killed, and with them the log ends → the containers are removed → every host proves that nothing of the job
is left. Only then are its GPUs free. A host that cannot prove it keeps them in a lost lease and is cordoned; the job
goes on without it, and the host is asked again until it answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpurun.errors import GpurunError, HostFailure, StateDiskError, StateError, StateUnavailable
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import FirstFailure
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore, finish
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.remote.agent import Agent
from gpurun.state import durable
from gpurun.state.cordons import Cordon, changing_cordons
from gpurun.state.identity import state_id
from gpurun.supervisor.frozen import cluster_of
from gpurun.supervisor.host_claims import claimant_of
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.last_lines import LOG_SILENT_S, end_late_output, end_output
from gpurun.supervisor.links import Links
from gpurun.supervisor.outputs import bring_late, collect_autotune, collect_outputs

FENCE_TIMEOUT_S = 60.0
GIVE_UP_S = 10.0
"""How long a host is asked for its proof, and at least twice, before its GPUs count as lost."""
RETRY_S = 1.0
LOST_RETRY_FIRST_S = 5.0
LOST_RETRY_MOST_S = 60.0
POLL_S = 0.2


def stop(job: SupervisedJob) -> State:
    """End the gang and free its GPUs. Idempotent: a supervisor that died in here is followed by another."""
    damage = cordon_suspect(job, job.record.first_failure)
    suspects = {host for host in job.hosts if host in job.record.avoid}
    answering = [host for host in job.hosts if host not in suspects or job.links.is_open(host)]
    if job.record.ladder:
        _give_notice(job, answering)
    logged: set[str] = set()
    unproven: Mapping[str, GpurunError] = {}
    pending = set() if job.record.reached == "nothing" else set(job.hosts)
    with_outputs = pending
    first_asked_s = None
    while waited_for := pending | with_outputs:
        job.links.open(sorted(waited_for.intersection(answering)), timeout_s=5.0)
        logged |= _end_log(job, pending - logged)
        if with_outputs:
            collect_autotune(job)
            with_outputs = collect_outputs(job)
        last = first_asked_s is not None and time.monotonic() - first_asked_s > GIVE_UP_S
        first_asked_s = first_asked_s or time.monotonic()
        durable.sync_file(job.folder.log)  # the fence removes the hosts' copy
        containers = job.record.reached == "containers"
        unproven = fence(job.links, job.lease, pending, state=job.state_id, containers=containers) if pending else {}
        for host, error in unproven.items():
            job.events.emit("host", host=host, state="not fenced", reason=error.message)
        pending = set(unproven)
        if last or pending | with_outputs <= suspects:
            break
        time.sleep(RETRY_S)
    if damage is not None and (damage := cordon_suspect(job, job.record.first_failure)) is not None:
        raise damage  # its GPUs would go to the next gang
    if kept := sorted(with_outputs - pending):
        job.note(f"{', '.join(kept)}: the last outputs of this attempt could not be copied and are still there")
    return _finish(job, unproven)


def fence(
    links: Links, lease: Lease, hosts: Iterable[str], *, state: str, containers: bool = True, outputs: bool = False
) -> Mapping[str, GpurunError]:
    """Fence `hosts` of a lease; those that could not prove that nothing of its attempt is left, with why.

    What earlier attempts left goes too; what a later one has stays.

    Args:
        state: the id of the state directory: the hosts release the attempt's claims last.
        containers: there may be some, so Docker must answer, and no process may hold the lease's GPUs.
        outputs: remove the outputs of the attempt too.
    """
    gpus = {grant.host: list(grant.gpus) for grant in lease.grants}
    claimant = claimant_of(lease, state)._asdict()

    def ask(agent: Agent) -> Mapping[str, Any]:
        reply = agent.call(
            "gang.fence", job=lease.job, attempt=lease.attempt, containers=containers, outputs=outputs,
            gpus=gpus[agent.host] if containers else None, claimant=claimant, timeout_s=FENCE_TIMEOUT_S,
        )  # fmt: skip
        return reply.value  # type: ignore[no-any-return]

    results = links.each(ask, sorted(hosts))
    unproven: dict[str, GpurunError] = dict(results.failed)
    for host, rest in results.ok.items():
        if any(rest.values()):
            unproven[host] = HostFailure(what_is_left(rest), host=host)
    return unproven


def what_is_left(rest: Mapping[str, Any]) -> str:
    """What keeps a host from being fenced, in words: `gpurun.node.fence.fence`'s answer."""
    left = [
        f"GPU {one['gpu']} is held by pid {one['pid']} of {one['user'] or 'an unknown user'}"
        f"{', container ' + one['container'] if one['container'] else ''} ({one['command'][:120] or 'no command line'})"
        for one in rest["users"]
    ]
    if rest["gpu_problem"]:
        left.append(rest["gpu_problem"])
    left += [f"container {ident[:12]} is still there" for ident in rest["containers"]]
    left += [f"process {command[:120]!r} is still there" for command in rest["processes"]]
    if rest["folder"]:
        left.append("the job's folder is still there")
    left += [f"the claim {name} is still there" for name in rest["claims"]]
    return "; ".join(left)


def lose_rest(home: Path, lease: Lease, lock: LeaseLock) -> tuple[Lease, LeaseLock]:
    """Make the lease of an attempt that is over a lost lease: its hosts are fenced before its GPUs are free.

    An attempt is over after its lease is removed. So a person or a backup put this lease back.
    """
    with allocator_lock(home, patience_s=None):
        return LeaseStore(home).abandon(lock, lease, {grant.host for grant in lease.grants})


def keep_asking(home: Path, lease: Lease, lock: LeaseLock) -> None:
    """Hold a lost lease until every one of its hosts has been fenced; then its GPUs are free again.

    The job may run again on such a host, uncordoned by a person. The fence leaves that later attempt alone.
    """
    folder = JobStore(home).get(lease.job)
    links = Links(cluster_of(folder, lease)[0], [grant.host for grant in lease.grants])
    events = EventLog(folder.events, clock=time.time)
    proof = f"nothing of attempt {lease.attempt} is left there"
    pending = set(links.targets)
    delay_s = LOST_RETRY_FIRST_S
    try:
        while pending:
            links.open(sorted(pending), timeout_s=10.0)
            end_late_output(folder, lease, links, pending)
            keep = _with_only_copies(folder, lease, pending)
            unproven = set(fence(links, lease, pending - keep, state=state_id(home), outputs=True))
            if keep:
                unproven.update(fence(links, lease, keep, state=state_id(home), outputs=False))
            fenced = pending - unproven
            for host in sorted(fenced):
                with suppress(FileNotFoundError):  # a person may have removed the job since
                    events.emit("host", host=host, state="fenced", reason=proof)
            pending -= fenced
            if pending:
                time.sleep(delay_s)
                delay_s = min(delay_s * 2, LOST_RETRY_MOST_S)
        found_again(home, links.targets)
        LeaseStore(home).release(lock)
        bring_late(home, lease, links, list(links.targets))
    finally:
        links.close()


def _with_only_copies(folder: JobFolder, lease: Lease, hosts: set[str]) -> set[str]:
    """Those of the lost hosts that may have the only copy of something that the job's last attempt wrote."""
    if lease.found:
        return hosts
    try:
        record = folder.record()
    except StateError:  # a person has removed the job
        return set()
    has_gone_on = record.attempt > lease.attempt or record.state.holds_gpus
    return set() if has_gone_on or record.outputs_left is None else hosts.intersection(record.outputs_left.hosts)


def found_again(home: Path, hosts: Iterable[str]) -> None:
    """Hosts that counted as lost have been fenced: they may get gangs again."""
    with changing_cordons(home) as cordons:
        for host in hosts:
            if host in cordons and cordons[host].state == "lost":
                del cordons[host]


def cordon_suspect(job: SupervisedJob, failure: FirstFailure | None) -> StateError | None:
    """Give the host whose hardware failed the gang no new ones, until a person has looked at it.

    Returns:
        Why it could not be done yet: the cordons are damaged. The gang is ended all the same.
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


def _cordon(job: SupervisedJob, wanted: Mapping[str, Cordon]) -> bool:
    """Cordon hosts that have no cordon yet; False if all have one.

    Another user may keep the lock of the cordons. Then the hosts stay in use, and the job says so: a gang's other GPUs
    do not wait for a cordon.
    """
    try:
        with changing_cordons(job.home) as cordons:
            new = {host: cordon for host, cordon in wanted.items() if host not in cordons}
            cordons.update(new)
            return bool(new)
    except StateDiskError:
        raise
    except StateUnavailable as error:
        job.note(f"{', '.join(sorted(wanted))}: not cordoned: {error}; `gpurun inventory cordon` does it")
        return False


def _give_notice(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """SIGTERM to the ranks on `hosts`, then wait until all of them have ended or the grace is over.

    Where no rank runs there is nothing to wait for; one that starts now finds the notice and ends at once.
    """
    deadline = time.monotonic() + job.spec.grace_s
    job.links.open(hosts, timeout_s=5.0)
    job.follow_log(host for host in hosts if host in job.members)
    told = job.links.each(
        lambda agent: agent.call(
            "gang.signal", job=job.lease.job, name="TERM", attempt=job.lease.attempt, timeout_s=10.0
        ),
        hosts,
    )
    with_ranks = [host for host, reply in told.ok.items() if reply.value]
    if not with_ranks:
        return
    job.note(f"SIGTERM sent; {job.spec.grace_s:g} s of grace")
    while time.monotonic() < deadline and not _have_ended(job, with_ranks):
        time.sleep(POLL_S)


def _have_ended(job: SupervisedJob, hosts: Sequence[str]) -> bool:
    """Whether nothing of any rank is left on `hosts`: what ran below a shell may outlive it by its own grace."""
    left = job.links.each(lambda agent: agent.call("ranks.count", job=job.lease.job, timeout_s=10.0).value, hosts)
    return not any(left.ok.values())


def _end_log(job: SupervisedJob, hosts: Iterable[str]) -> set[str]:
    """Kill what the grace did not end on `hosts`, and copy the last of what it printed.

    The fence removes the log from the hosts together with the containers. So a host that answers late is asked, too.

    Returns:
        The hosts that have nothing more to copy.
    """
    if job.record.reached != "containers":
        return set(hosts)
    there = sorted(host for host in hosts if job.links.is_open(host))
    if there:
        end_output(job, there)
    ended = {host for host in there if job.links.is_open(host)}
    if job.hosts[0] in there and not job.log_copy.wait_for_launcher(LOG_SILENT_S):
        ended.discard(job.hosts[0])
    return ended


def cordon_lost(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> None:
    """Give hosts that gave no proof no new gangs."""
    why = f"could not be fenced after {job.lease.job}"
    _cordon(
        job,
        {host: Cordon("lost", "gpurun", job.clock(), why, evidence=error.message) for host, error in unproven.items()},
    )
    job.note(f"{', '.join(sorted(unproven))}: lost; its GPUs stay taken until it has been fenced")


def _finish(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> State:
    """Free the GPUs, but those of hosts that gave no proof, and say so: at once, or somebody else would say it."""
    job.log_copy.close()
    if unproven:
        cordon_lost(job, unproven)
    with allocator_lock(job.home, patience_s=None):
        job.gives_back = True
        if unproven:
            job.lost = job.leases.abandon(job.lock, job.lease, set(unproven))
        else:
            job.leases.release(job.lock)
        job.record = finish(job.store, job.record, now_s=job.clock())
    job.told()
    return job.record.state

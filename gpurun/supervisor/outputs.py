"""A job's outputs: on the first host while an attempt runs, with a copy on the head that follows it.

``outputs:`` of a recipe is a folder in the container that survives a restart, wherever the gang then runs. It is
brought to the head now and then, so that a first host that dies takes little with it, and when the attempt ends; and
sent to the next one's first host, where rank 0 reads it. What could not be brought is in the job's record, and the
hosts that have it keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gpurun.errors import GpurunError, HostFailure, StateDiskError, StateError
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import OutputsLeft
from gpurun.jobs.store import JobStore
from gpurun.launch.docker import AUTOTUNE_FILE
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.lease import Lease
from gpurun.node import contents
from gpurun.remote.agent import Agent
from gpurun.state import durable
from gpurun.state.path import told
from gpurun.supervisor.ends import failed
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import Links
from gpurun.supervisor.outputs_copy import HeadCopy, list_outputs
from gpurun.supervisor.outputs_plan import HostOutputs, Unbrought, is_changing, lacking, left_of

TRIES = 3
AGAIN_S = 0.5
"""The gang has ended: whoever still changes a file gets this time to finish."""


def send_outputs(job: SupervisedJob) -> None:
    """Give the first host what earlier attempts left. Only what it lacks is sent; what is newer there stays.

    Raises:
        GangEnd: the host failed.
    """
    if job.spec.outputs is None:
        return
    try:
        with job.outputs.alone():
            _send(job, job.links.agent(job.hosts[0]))
    except OSError as error:
        raise failed(told(error, job.folder.path / "outputs", "read")) from error
    except GpurunError as error:
        raise failed(error) from error


def _send(job: SupervisedJob, agent: Agent) -> None:
    job.outputs.settle()
    mine = job.outputs.entries()
    if not mine:
        return
    theirs = list_outputs(agent, job.lease.job, force=True)
    sent = lacking(mine, {} if theirs is None else theirs.entries)
    if not sent:
        return
    payload = contents.packed(job.outputs.contents_of(sent))
    written = None
    for reply in agent.stream("outputs.write", job=job.lease.job, attempt=job.lease.attempt, payload_in=payload):
        written = reply.value
    files = sum(entry.kind == "file" for entry in sent)
    if not isinstance(written, dict) or written.get("files") != files:
        raise HostFailure("it did not get all outputs of earlier attempts: a file changed meanwhile", host=agent.host)


def collect_outputs(job: SupervisedJob) -> set[str]:
    """Bring the outputs to the head and remove them from the hosts. Idempotent.

    What the head has is replaced only by a whole newer copy, which a power loss does not take back: it is the only one
    once the hosts' are removed. Of a host that cannot be reached the head keeps what it has. The job's record says
    what is not on the head.

    Returns:
        The hosts that may still have some: a copy broke off, a file could not be read, or the host did not answer.
    """
    if job.spec.outputs is None:
        return set()
    remover = _remover(job.lease.job, job.lease.attempt)
    if job.record.reached != "containers":  # nothing ran: a host has at most a part of what it was sent
        return set() if job.record.outputs_left else set(job.links.each(remover, job.hosts).failed)
    unbrought: Sequence[Unbrought] = ()
    with job.outputs.alone():
        for _ in range(TRIES):
            writers = job.hosts if _is_shared(job) else job.hosts[:1]
            unbrought = _bring(job.outputs, job.links, job.lease.job, writers, onto=_is_shared(job), force=True)
            if not is_changing(unbrought):
                break
            time.sleep(AGAIN_S)
    left = left_of(unbrought)
    if left != job.record.outputs_left:
        job.amend(outputs_left=left)
        if left is not None:
            job.note(left.words(job.lease.job))
    kept = () if left is None else left.hosts
    results = job.links.each(remover, [host for host in job.hosts if host not in kept])
    return {*kept, *results.failed}


def collect_leaving(
    job: SupervisedJob, leaving: Collection[str], *, cancelled: Callable[[], bool] = lambda: False
) -> Sequence[Unbrought]:
    """Bring to the head what hosts that leave a gang have of its outputs, and remove it there. Idempotent.

    The members' outputs are brought too: of a file that several hosts have, the one that was written last counts.

    Returns:
        What `leaving` have and the head has not. These hosts keep all of their outputs.

    Raises:
        StateDiskError: the head's disk is full or broken; nothing was removed.
    """
    if job.spec.outputs is None or not leaving:
        return ()
    with job.outputs.alone():
        hosts = [*(host for host in job.members if job.links.is_open(host)), *leaving]
        unbrought = _bring(job.outputs, job.links, job.lease.job, hosts, onto=True, force=False, cancelled=cancelled)
    left = [each for each in unbrought if each.host in leaving and each.is_lost]
    kept = {each.host for each in left}
    remover = _remover(job.lease.job, job.lease.attempt)
    removed = job.links.each(remover, [host for host in leaving if host not in kept])
    return [*left, *(Unbrought(host, "", error.message) for host, error in removed.failed.items())]


def bring_late(home: Path, lease: Lease, links: Links, hosts: Collection[str]) -> None:
    """Bring the outputs of hosts that were lost and have been fenced, and remove them there.

    Does nothing when a later attempt has started: it went on from the head's copy.
    """
    folder = JobStore(home).get(lease.job)
    with suppress(GpurunError):
        if folder.spec().outputs is not None and not lease.found:
            bring_left(folder, lease.attempt, links, hosts)


def bring_left(folder: JobFolder, attempt: int, links: Links, hosts: Collection[str]) -> None:
    """Bring what hosts have kept of an attempt's outputs, and remove it there; the job's record says what is left.

    Does nothing when a later attempt has started, or nothing is left.

    Raises:
        StateError: the head could not write it.
    """
    copy, job = HeadCopy(folder), folder.id
    with copy.alone():
        record = folder.record()
        left = record.outputs_left
        if record.attempt != attempt or left is None or not left.hosts:
            return
        unbrought = _bring(copy, links, job, sorted(hosts), onto=True, force=True)
        others = [Unbrought(host, "", "did not answer") for host in left.hosts if host not in hosts]
        now_left = left_of([*unbrought, *others])
        with allocator_lock(folder.path.home, patience_s=None):
            record = folder.record()
            if record.attempt == attempt:
                folder.write(record.but(outputs_left=now_left, reason=_reason(record.reason, left, now_left, job)))
    kept = () if now_left is None else now_left.hosts
    links.each(_remover(job, attempt), [host for host in hosts if host not in kept])


def _reason(reason: str, before: OutputsLeft, now: OutputsLeft | None, job: str) -> str:
    """A job's reason without the words of what has come meanwhile."""
    words = now.words(job) if now is not None and now.hosts else ""
    return reason.replace(before.words(job), words).removesuffix("; ")


def _bring(
    copy: HeadCopy, links: Links, job: str, hosts: Sequence[str], *, onto: bool, force: bool,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sequence[Unbrought]:  # fmt: skip
    """Bring what hosts have; one that fails or lies holds up no other. What could not be brought."""
    silent = [host for host in hosts if not links.is_open(host)]
    unbrought = [Unbrought(host, "", "did not answer, so it may have newer ones") for host in silent]
    asked = links.each(
        lambda agent: list_outputs(agent, job, force=force), [host for host in hosts if host not in silent]
    )
    unbrought += [Unbrought(host, "", error.message) for host, error in asked.failed.items()]
    there = [said for said in asked.ok.values() if said is not None]
    found = {said.host: said for said in there if said.entries}
    unbrought += [each for said in there if not said.entries for each in said.unbrought]
    while found:
        onto = onto or len(found) < len(hosts)
        try:
            brought = copy.replace(
                {host: links.agent(host) for host in found}, in_order(found.values()), onto=onto, force=force,
                cancelled=cancelled,
            )  # fmt: skip
            return [*unbrought, *brought]
        except HostFailure as error:
            if error.host not in found:
                raise
            unbrought.append(Unbrought(error.host or "", "", error.message))
            del found[error.host or ""]
        except StateDiskError:
            raise
        except StateError as error:
            return [*unbrought, *(Unbrought(host, "", f"{error}") for host in found)]
    return unbrought


def in_order(found: Iterable[HostOutputs]) -> list[HostOutputs]:
    """Hosts' outputs, the last one written to last."""
    return sorted(found, key=lambda each: (each.newest_ns, each.host))


def collect_autotune(job: SupervisedJob) -> None:
    """Keep what Horovod's autotune found, if it ran; to lose it only costs time."""
    if not job.spec.horovod.autotune:
        return
    with suppress(HostFailure):
        found = job.links.agent(job.hosts[0]).call("gang.run_file", job=job.lease.job, name=AUTOTUNE_FILE)
        durable.write_bytes(job.folder.path / AUTOTUNE_FILE, found.payload)


def copy_outputs(job: SupervisedJob, *, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Bring what has changed while the gang runs, if anything has.

    Raises:
        HostFailure: a host failed or lies, or it was cancelled; the copy that was there stays.
        StateError: the head could not write it.
    """
    asked = job.links.each(lambda agent: list_outputs(agent, job.lease.job), _writers(job))
    for error in asked.failed.values():
        raise error
    found = in_order(said for said in asked.ok.values() if said is not None and said.entries)
    if found and tuple(found) != job.outputs.seen:
        agents = {each.host: job.links.agent(each.host) for each in found}
        with job.outputs.alone():
            job.outputs.replace(agents, found, onto=_is_shared(job), cancelled=cancelled)


def _remover(job: str, attempt: int) -> Callable[[Agent], object]:
    return lambda agent: agent.call("outputs.remove", job=job, attempt=attempt, timeout_s=600.0)


def _is_shared(job: SupervisedJob) -> bool:
    """Whether several hosts write outputs, one after the other: one that has left takes nothing with it."""
    return job.spec.min_gpus is not None


def _writers(job: SupervisedJob) -> Sequence[str]:
    """The hosts that write outputs: rank 0 is on the first, in an elastic gang on another if it is lost there."""
    return job.members if _is_shared(job) else job.hosts[:1]

"""A job's outputs: on its hosts during an attempt, with a copy on the head.

``outputs:`` of a recipe is a folder in the container that survives a restart on any hosts. gpurun copies every host's
outputs to the head repeatedly, so that a dying host loses little, and again at the end of the attempt. It sends them to
the next attempt's hosts: to all, or only to rank 0's if the launcher's programs distribute them. The job's record lists
outputs that could not be copied; their hosts keep them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.errors import OUTLIVED, GpurunError, HostFailure, StateError, StateUnavailable, words_of
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.store import JobStore
from gpurun.launch.container import AUTOTUNE_FILE
from gpurun.leases.lease import Lease
from gpurun.leases.store import AllocatorLock
from gpurun.node.folder import contents
from gpurun.node.folder.contents import Listed
from gpurun.node.job.rules import BESIDE, is_beside
from gpurun.remote.agent import Agent
from gpurun.state import durable
from gpurun.state.paths import state_error
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import Links
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.keeping import is_complete
from gpurun.supervisor.outputs.listing import HostOutputs, Unbrought, list_outputs
from gpurun.supervisor.outputs.plan import IN_THE_WAY, is_changing, lacking, left_of
from gpurun.supervisor.outputs.progress import note_begin
from gpurun.supervisor.verdict.ends import failed

GONE = "has no folder of outputs any more"
TRIES = 3
AGAIN_S = 0.5
"""The gang has ended. Processes that still change a file get this time to finish."""


def send_outputs(job: SupervisedJob) -> None:
    """Send hosts the outputs of earlier attempts: the last whole copy, and nothing else may be there.

    Without one, sends only what they lack, and keeps newer files there.

    Raises:
        GangEnd: a host failed.
    """
    if not job.spec.keeps_outputs:
        return
    readers = job.hosts if job.launcher.all_read_outputs else job.hosts[:1]
    try:
        with job.outputs.alone():
            is_whole = job.outputs.restore()
            if is_whole:
                job.links.each(_remover(job.lease.job, job.lease.attempt, empties=True), job.hosts).raise_first()
                _tell_of_removed(job)
            mine = job.outputs.entries()
            if job.spec.retry is not None:
                note_begin(job.outputs, job.folder.path)
            has_files = any(entry.kind != "dir" for entry in mine.values())
            if has_files and not is_whole and job.record.outputs_left is None:
                job.outputs.keeper.keep(job.outputs.versions)  # until the gang has something newer that is whole
            there = job.links.each(lambda agent: _send(job, agent, mine), readers if mine else ()).raise_first()
            job.outputs.gave(mine, [there[host] for host in readers if host in there])
    except OSError as error:
        raise failed(state_error(error, job.folder.path / "outputs", "read")) from error
    except GpurunError as error:
        raise failed(error) from error


def _tell_of_removed(job: SupervisedJob) -> None:
    left = job.record.outputs_left
    if left is not None and (removed := [host for host in job.hosts if host in left.hosts]):
        job.note(
            f"gpurun removed outputs of an earlier attempt from {', '.join(removed)}: the head has no copy of these "
            "outputs, and all hosts get the last whole copy"
        )


def _send(job: SupervisedJob, agent: Agent, mine: Mapping[str, Listed]) -> HostOutputs:
    mine, names = job.outputs.of_host(mine, agent.host)
    theirs = list_outputs(agent, job.lease.job, force=True) or HostOutputs(agent.host, {})
    sent = lacking(mine, theirs.entries)
    if not sent:
        return theirs
    payload = contents.packed(job.outputs.contents_of(sent, names))
    written = None
    for reply in agent.stream("outputs.write", job=job.lease.job, attempt=job.lease.attempt, payload_in=payload):
        written = reply.value
    files = sum(entry.kind == "file" for entry in sent)
    if not isinstance(written, dict) or written.get("files") != files:
        raise HostFailure(
            "the host did not get all outputs of earlier attempts: a file changed during the copy", host=agent.host
        )
    return list_outputs(agent, job.lease.job, force=True) or theirs


def collect_outputs(job: SupervisedJob) -> set[str]:
    """Copy the outputs to the head and remove them from the hosts. Idempotent.

    Replaces a file on the head only by a complete and durable newer copy, because that is the only copy once the hosts'
    are removed. If a host cannot be reached, the head keeps what it has. The job's record lists what is not on the
    head.

    Returns:
        The hosts that may still have outputs: a copy was interrupted, a file was unreadable, or the host did not
            answer.
    """
    if not job.spec.keeps_outputs:
        return set()
    remover = _remover(job.lease.job, job.lease.attempt)
    if job.record.reached != "containers":  # nothing ran: a host has at most a part of what it was sent
        return set() if job.record.outputs_left else set(job.links.each(remover, job.hosts).failed)
    unbrought: Sequence[Unbrought] = ()
    with job.outputs.alone():
        for _ in range(TRIES):
            unbrought = _bring(job.outputs, job.links, job.lease.job, job.hosts, onto=_comes_and_goes(job), force=True)
            if job.outputs.keeper.make_room(unbrought):
                continue
            if not is_changing(unbrought):
                break
            time.sleep(AGAIN_S)
        if is_complete(unbrought, frozenset()):
            job.outputs.keeper.forget()
    job.outputs.tell_of_versions()
    for text in job.outputs.keeper.notes():
        job.note(text)
    left = left_of(unbrought)
    if left != job.record.outputs_left:
        job.amend(outputs_left=left)
        if left is not None:
            job.note(left.words(job.lease.job, is_over=job.record.outcome is not State.QUEUED))
    kept = () if left is None else left.hosts
    stay = {*kept, *(each.host for each in unbrought if each.why == GONE)}
    job.outputs.listed = {host: said for host, said in job.outputs.listed.items() if host in stay}
    results = job.links.each(remover, [host for host in job.hosts if host not in kept])
    return {*kept, *results.failed}


def collect_leaving(
    job: SupervisedJob, leaving: Collection[str], *, cancelled: Callable[[], bool] = lambda: False
) -> Sequence[Unbrought]:
    """Copy the outputs of hosts that leave a gang to the head, and remove them there. Idempotent.

    Also copies the members' outputs: what hosts have under one name is compared.

    Returns:
        Outputs of `leaving` that the head does not have. These hosts keep all of their outputs.

    Raises:
        StateUnavailable: the head's disk is full or broken, or this machine is short of something; nothing was removed.
    """
    if not job.spec.keeps_outputs or not leaving:
        return ()
    with job.outputs.alone():
        hosts = [*(host for host in job.members if job.links.is_open(host)), *leaving]
        unbrought = _bring(job.outputs, job.links, job.lease.job, hosts, onto=True, force=False, cancelled=cancelled)
    for host in leaving:
        job.outputs.listed.pop(host, None)
    left = [each for each in unbrought if each.host in leaving and each.is_lost]
    kept = {each.host for each in left}
    remover = _remover(job.lease.job, job.lease.attempt)
    removed = job.links.each(remover, [host for host in leaving if host not in kept])
    return [*left, *(Unbrought(host, "", error.message) for host, error in removed.failed.items())]


def bring_late(home: Path, lease: Lease, links: Links, hosts: Collection[str]) -> None:
    """Copy the outputs of hosts that were lost and have been fenced, and remove them there.

    Does nothing if a later attempt has started, because it began from the head's copy.
    """
    folder = JobStore(home).get(lease.job)
    with suppress(GpurunError):
        spec = folder.spec()
        if spec.keeps_outputs and not lease.found:
            bring_left(folder, lease.attempt, links, hosts, limit=spec.outputs_limit, workdir_limit=spec.workdir_limit)


def bring_left(
    folder: JobFolder, attempt: int, links: Links, hosts: Collection[str], *, limit: int | None = None,
    workdir_limit: int | None = None,
) -> None:  # fmt: skip
    """Copy outputs of an attempt that hosts have kept, and remove them there. Updates the job's record.

    Does nothing if a later attempt has started, or nothing is left.

    Args:
        limit: largest size of the head's copy in bytes. None: a person asks for the outputs, so the job's limit does
            not apply.
        workdir_limit: the same for what ranks wrote beside their code.

    Raises:
        StateError: the head could not write them.
    """
    copy, job = HeadCopy(folder, limit, workdir_limit=workdir_limit), folder.id
    with copy.alone():
        record = folder.record()
        left = record.outputs_left
        if record.attempt != attempt or left is None or not left.hosts:
            return
        unbrought = _bring(copy, links, job, sorted(hosts), onto=True, late=True, force=True)
        others = [Unbrought(host, "", "did not answer") for host in left.hosts if host not in hosts]
        now_left = left_of([*unbrought, *others])
        with AllocatorLock(folder.path.home).held(patience_s=None):
            record = folder.record()
            if record.attempt == attempt:
                folder.write(record.but(outputs_left=now_left, reason=_reason(record.reason, left, now_left, job)))
    kept = () if now_left is None else now_left.hosts
    links.each(_remover(job, attempt), [host for host in hosts if host not in kept])


def _reason(reason: str, before: OutputsLeft, now: OutputsLeft | None, job: str) -> str:
    """Return a job's reason without the words about outputs that have arrived since."""
    words = now.words(job) if now is not None and now.hosts else ""
    return reason.replace(before.words(job), words).removesuffix("; ")


def _bring(
    copy: HeadCopy, links: Links, job: str, hosts: Sequence[str], *, onto: bool, force: bool, late: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sequence[Unbrought]:  # fmt: skip
    """Copy the hosts' outputs; a host that fails or lies does not delay others. Returns what could not be copied."""
    silent = [host for host in hosts if not links.is_open(host)]
    unbrought = [Unbrought(host, "", "did not answer, so this host may have newer outputs") for host in silent]
    asked = links.each(_lister(copy, job, force=force), [host for host in hosts if host not in silent])
    unbrought += [
        Unbrought(host, "", error.message, is_lost=error.message != GONE) for host, error in asked.failed.items()
    ]
    there = [said for said in asked.ok.values() if said is not None]
    found = {said.host: said for said in there if said.entries}
    unbrought += [each for said in there if not said.entries for each in said.unbrought]
    while found:
        onto = onto or len(found) < len(hosts)
        try:
            brought = copy.replace(
                {host: links.agent(host) for host in found}, list(found.values()), onto=onto, late=late,
                force=force, cancelled=cancelled,
            )  # fmt: skip
            return [*unbrought, *brought]
        except HostFailure as error:
            if error.host not in found:
                raise
            unbrought.append(Unbrought(error.host or "", "", error.message))
            del found[error.host or ""]
        except StateUnavailable:  # a full disk, or no descriptor for a moment: it may come
            raise
        except StateError as error:
            return [*unbrought, *(Unbrought(host, "", f"{error}") for host in found)]
    return unbrought


def collect_autotune(job: SupervisedJob) -> None:
    """Keep the values that Horovod's autotune found. Losing them only costs time."""
    if not job.spec.horovod.autotune:
        return
    with suppress(HostFailure):
        found = job.links.agent(job.hosts[0]).call("gang.run_file", job=job.lease.job, name=AUTOTUNE_FILE)
        durable.write_bytes(job.folder.path / AUTOTUNE_FILE, found.payload)


def copy_outputs(
    job: SupervisedJob, *, cancelled: Callable[[], bool] = lambda: False, at_rest: bool = False
) -> Sequence[Unbrought]:
    """Copy changed outputs while the gang runs, and keep the copy if it is whole.

    Args:
        at_rest: copy only if the outputs are at rest (`keeping`).

    Returns:
        What stays on its host: it does not fit on the head, or another host has a folder in its place.

    Raises:
        HostFailure: a host failed or sent an invalid answer, or the copy was cancelled. Files that arrived stay.
        StateError: the head could not write it.
    """
    look_s, copy = time.monotonic(), job.outputs
    asked = job.links.each(_lister(copy, job.lease.job), job.members)
    found = [said for said in asked.ok.values() if said is not None and said.entries]
    unbrought: Sequence[Unbrought] = ()
    if not asked.failed and copy.keeper.look(look_s, found):
        with copy.alone():
            copy.keeper.keep(copy.versions)
    if found and tuple(found) != copy.seen and not (at_rest and not copy.keeper.looks.is_at_rest):
        agents = {each.host: job.links.agent(each.host) for each in found}
        with copy.alone():
            onto = _comes_and_goes(job) or bool(asked.failed)
            unbrought = copy.replace(agents, found, onto=onto, cancelled=cancelled)
            copy.keeper.make_room(unbrought)
            if asked.failed:
                copy.seen = ()  # the next copy, of all hosts, may be whole
            else:
                copy.keeper.copied(look_s, unbrought)
                if copy.keeper.has_one_file:
                    copy.keeper.keep(copy.versions)
    for error in asked.failed.values():
        raise error
    return [each for each in unbrought if each.no_room or each.why == IN_THE_WAY]


def _lister(copy: HeadCopy, job: str, *, force: bool = False) -> Callable[[Agent], HostOutputs | None]:
    """Return a function that lists a host's outputs. Unchanged parts of the list need not travel again.

    A folder that was there and is gone has failed: the head's copy may be all that is left of it.
    """

    def ask(agent: Agent) -> HostOutputs | None:
        before = copy.listed.get(agent.host)
        said = list_outputs(agent, job, force=force, before=before)
        if said is not None:
            if before is not None and BESIDE in before.entries and BESIDE not in said.entries:
                raise HostFailure(GONE, host=agent.host)
            copy.listed[agent.host] = said
        elif before is not None:
            raise HostFailure(GONE, host=agent.host)
        return said

    return ask


def _remover(job: str, attempt: int, *, empties: bool = False) -> Callable[[Agent], object]:
    return lambda agent: agent.call("outputs.remove", job=job, attempt=attempt, empties=empties, timeout_s=600.0)


def _comes_and_goes(job: SupervisedJob) -> bool:
    """Return whether hosts join and leave the gang, so that gpurun must copy a leaving host's outputs."""
    return job.spec.min_gpus is not None


# Copy a running gang's outputs to the head repeatedly, so that a dying host loses only the latest.


LOOKS = 12
"""After a copy, so many looks at most wait for a moment at which nothing changes."""
MOST_TOLD = 5
"""So many files are named that a restart will lack."""
REST = 4
"""After a copy that took long, this many times as long nothing is copied: training needs the network, too."""


class OutputsWatch:
    """Copies in a separate thread, which must have ended before anything else touches the outputs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job without outputs."""
        if not self._job.spec.keeps_outputs:
            return []
        return [threading.Thread(target=self._follow, name="outputs", daemon=True)]

    def _follow(self) -> None:
        every_s, keeper = self._job.spec.outputs_every_s, self._job.outputs.keeper
        told, unfit_told = "", _UnfitTold(self._job.note)
        copy_s, looks, wait_s = time.monotonic() + every_s, 0, every_s
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            is_due = began >= copy_s
            try:
                unfit = copy_outputs(self._job, cancelled=self._stop.is_set, at_rest=not is_due)
                told = ""
                unfit_told.tell(unfit)
            except OUTLIVED as error:
                why = error.message if isinstance(error, GpurunError) else words_of(error)
                if why != told and not self._stop.is_set():
                    self._job.note(f"the head's copy of the outputs is not up to date: {why}")
                told = why
            for text in keeper.notes():
                self._job.note(text)
            now = time.monotonic()
            rest_s = REST * (now - began)
            if is_due:
                copy_s, looks = now + max(every_s, rest_s), 0
            wait_s = copy_s - now
            if (look_s := keeper.next_look_s) is not None and looks < LOOKS:
                looks += 1
                wait_s = min(wait_s, max(look_s, rest_s) if look_s else 0.0)
            wait_s = max(0.0, wait_s)


class _UnfitTold:
    """Says while the gang runs what stays on its host."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._told: set[str] = set()

    def tell(self, unfit: Sequence[Unbrought]) -> None:
        """Say once that some outputs stay, and of the first files beside the code, that a restart lacks them."""
        for each in unfit:
            is_ours = is_beside(each.path)
            key = each.path if is_ours else ""
            if key in self._told or len(self._told) > MOST_TOLD:
                continue
            self._told.add(key)
            if is_ours:
                name = replace(each, path=each.path[len(BESIDE) + 1 :] or BESIDE).words
                self._note(
                    f"a restarted job does not get a file that ranks wrote beside the code on {each.host}: {name}"
                )
            else:
                self._note(f"gpurun does not copy some outputs to the head while the job runs: {each.words}")


# Record when a gang last saved its work, as its ranks report (`gpurun.runtime.checkpointed`).


EVERY_S = 20.0
FIRST_LOOK_S, PAUSE_SHARE = 1.0, 0.05
"""The first time until the next look, and its share of the time that the gang has run."""
ASK_TIMEOUT_S = 10.0
TOLD_S = 2.0
"""An age travels and is rounded: a checkpoint that seems newer by less is the one already known."""


class CheckpointWatch:
    """Asks the gang's hosts in a separate thread; only the main loop writes the job's record."""

    def __init__(
        self, job: SupervisedJob, stop: threading.Event,
        heard: Callable[[Mapping[str, Mapping[str, Any]]], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin nothing yet.

        Args:
            heard: called with each host's answer.
        """
        self._job = job
        self._stop = stop
        self._heard = heard
        self._saved_s: float | None = None

    def thread(self) -> threading.Thread:
        """Return the thread, not started."""
        return threading.Thread(target=self._follow, name="checkpoints", daemon=True)

    def keep(self) -> None:
        """Write a checkpoint into the job's record if it is newer."""
        saved_s, known_s = self._saved_s, self._job.record.checkpoint_s
        if saved_s is not None and (known_s is None or saved_s > known_s + TOLD_S):
            self._job.amend(checkpoint_s=saved_s)

    def look(self) -> None:
        """Ask every host that answers. The report of one rank is enough."""
        hosts = [host for host in self._job.hosts if self._job.links.is_open(host)]
        told = self._job.links.each(
            lambda agent: agent.call("gang.progress", job=self._job.lease.job, timeout_s=ASK_TIMEOUT_S).value, hosts
        )
        ages = [said["checkpoint_age_s"] for said in told.ok.values() if said["checkpoint_age_s"] is not None]
        if ages:
            self._saved_s = self._job.clock() - max(0.0, min(ages))
        self._heard(told.ok)

    def _pause_s(self) -> float:
        """Return the time until the next look: a gang that began just now is about to report its first step."""
        return min(EVERY_S, max(FIRST_LOOK_S, PAUSE_SHARE * (self._job.ran_s or 0.0)))

    def _follow(self) -> None:
        while not self._stop.wait(self._pause_s()):
            with suppress(*OUTLIVED):  # the head has no thread for a moment
                self.look()

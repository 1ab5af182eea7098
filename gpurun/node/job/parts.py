"""The parts of a job on this host: its folder and containers, and the lock under which one operation changes them.

Agents of an earlier supervisor may still work here, and a host that is not fenced yet may get the job's next attempt.
So `gang.prepare`, `gang.create`, `gang.fence` and `outputs.remove` hold one lock for each job. The job's folder says
which attempt owns it, the outputs and the processes.

The lock is a file next to the job's folder, which its holder removes. A waiting process then finds another file, or
none, under its name and starts again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import urllib.parse
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from gpurun.node import docker
from gpurun.node.agent import processes, serve
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.claim_rules import Card, read_claimant
from gpurun.node.docker import of_jobs
from gpurun.node.folder.below import NO_LOCKS

# Find the parts of a job on this host without a record of who started it: folders, containers, processes, GPUs.


LABEL = "gpurun.job"
CARDS_FILE = "cards.json"
"""In a job's folder: which GPUs it was given, by UUID and PCI address: indices shift when one is lost."""
MAIN_FILE = "main.json"
"""In a job's folder: its container's main process."""
AGENT_FILE = "agent.json"
"""In a job's folder: the first agent that prepared it. Every process of the job is younger."""
_JOB = re.compile(r"j-[0-9a-f]{8}\Z")
# An sshd's listener and sessions, or a docker client, by the way ps shows them.
_STARTED = re.compile(r"(^|/)(sshd|docker)\b")


def job_folder(job: str) -> str:
    """Return the folder of a job's files on this host.

    Raises:
        OpError: ``bad-request`` for a text that is not a job's id, because it becomes part of a path that is removed.
    """
    return os.path.join(serve.root(), "jobs", _checked(job))


def outputs_folder(job: str) -> str:
    """Return the folder of a job's outputs on this host."""
    return os.path.join(serve.root(), "outputs", _checked(job))


def layer_folder(job: str) -> str:
    """Return the folder of what the job's ranks write beside their code (`gpurun.node.job.layer`).

    It is beside the outputs if `kept_layer` made it there: then it stays until the head has everything. Otherwise, it
    goes with the job's folder.
    """
    kept = kept_layer(job)
    return kept if os.path.isdir(kept) else os.path.join(job_folder(job), "beside")


def kept_layer(job: str) -> str:
    """Return where that folder is if the head copies it."""
    return outputs_folder(job) + ".beside"


def _checked(job: str) -> str:
    if not _JOB.match(job):
        raise OpError("bad-request", "%r is not a job's id" % job)
    return job


def note_agent(job: str, is_new: bool) -> None:
    """Record this process as the one that prepares the existing folder, unless an older one has.

    After a reboot the clock of `Process.started` begins anew: then the smaller number is right, too.

    Args:
        is_new: nobody has used the folder. In a used one without a record, processes may be older than this one.
    """
    path = os.path.join(job_folder(job), AGENT_FILE)
    before, me = processes.noted(path), processes.read_process(os.getpid())
    if me is not None and (is_new if before is None else me.started < before[1]):
        processes.note_process(path, me)


def began(job: str) -> int:
    """Return a `Process.started` before which no process of the job started; 0 if unknown."""
    agent = processes.noted(os.path.join(job_folder(job), AGENT_FILE))
    return 0 if agent is None else agent[1]


def has_job_ended(job: str) -> bool:
    """Return whether the container's main process, recorded at its start, is gone. Does not ask Docker."""
    main = processes.noted(os.path.join(job_folder(job), MAIN_FILE))
    now = processes.read_process(main[0]) if main else None
    return main is not None and (now is None or now.started != main[1])


def is_ending(job: str) -> bool:
    """Return whether the container's main process, recorded at its start, is gone, or on its way: the kernel has begun
    to end it, and ends everything else in the container before it.
    """
    main = processes.noted(os.path.join(job_folder(job), MAIN_FILE))
    return main is not None and processes.is_ending(*main)


def container_of_main(job: str) -> str:
    """Return the id of the container whose main process was recorded at its start; "" if unknown or gone."""
    main = processes.noted(os.path.join(job_folder(job), MAIN_FILE))
    now = processes.read_process(main[0]) if main else None
    return processes.container_of(now.pid) if main and now and now.started == main[1] else ""


def containers_of(connection: docker.Connection, job: str, attempt: Optional[int] = None) -> List[Dict[str, Any]]:
    """Return the job's containers as Docker lists them, in any state.

    Args:
        attempt: only those of this and earlier attempts. A label that is not a number counts as earlier.

    Raises:
        OpError: with Docker's message.
    """
    filters = urllib.parse.quote('{"label":["%s=%s"]}' % (LABEL, _checked(job)))
    status, answer = docker.exchange(connection, "GET", "/containers/json?all=1&filters=" + filters)
    found = docker.parse_answer(answer)
    if status != 200 or not isinstance(found, list):
        raise docker.failure(status, answer, "listing the job's containers")
    found = [each for each in found if attempt is None or read_claimant(each.get("Labels")).attempt <= attempt]
    return of_jobs(found, lambda path: docker.exchange(connection, "GET", path))


def processes_of(job: str, everybody: bool = False) -> List[processes.Process]:
    """Return the processes that gpurun started for the job outside containers.

    Args:
        everybody: those of every account of this host, not only of ours.
    """
    below = "/jobs/%s/" % _checked(job) if everybody else job_folder(job) + "/"
    found = processes.of_job([below, "gpurun-%s-" % job])
    found = [process for process in found if everybody or process.uid == os.getuid()]
    # A program in a container can choose any process name, for example that of another job's sshd.
    here = processes.container_of(os.getpid())
    found = [process for process in found if processes.container_of(process.pid) == here]
    return [process for process in found if _is_started_by_gpurun(process, found)]


def _is_started_by_gpurun(process: processes.Process, found: List[processes.Process]) -> bool:
    """Return whether gpurun started it or an ancestor of it. A person's editor on the job's files does not count."""
    by_pid = {one.pid: one for one in found}
    current: Optional[processes.Process] = process
    while current is not None:
        if _STARTED.search(current.command.split(" ")[0].rstrip(":")):
            return True
        current = by_pid.get(current.parent)
    return False


def cards_of_gpus(job: str, gpus: List[int]) -> List[Card]:
    """Return the job's GPUs with the UUIDs recorded when it started here, if there are any."""
    known = known_cards(job)
    return [(gpu, known.get(gpu, {}).get("uuid", "")) for gpu in gpus]


def known_cards(job: str) -> Dict[int, Dict[str, str]]:
    """Return GPU index → ``{"uuid", "pci_bus"}``, as recorded when the job was created here; empty if it was not."""
    try:
        with open(os.path.join(job_folder(job), CARDS_FILE), encoding="utf-8") as stream:
            return {int(index): {**facts} for index, facts in json.load(stream).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


ATTEMPT_FILE = "attempt"
"""In a job's folder: the number of the attempt that it belongs to."""
_POLL_S = 0.05
_DIGITS = 9


class Held(NamedTuple):
    """A job's lock.

    Attributes:
        descriptor: holds the lock until every copy of it is closed, also copies in children; -1 if no lock is possible
            here.
    """

    descriptor: int


@contextmanager
def hold_job(call: Call, job: str, required: bool = True) -> Iterator[Held]:
    """Hold a job's lock; wait for its present holder.

    Args:
        required: raise if the lock cannot be made. A fence works without: on a full disk nothing can be made, so no
            other operation can be running.

    Raises:
        Cancelled: nobody waits for the operation any more.
        OSError: no lock is possible, and it is `required`.
    """
    path = lock_file(job)
    try:
        descriptor = _lock(call, path)
    except OSError:
        if required:
            raise
        descriptor = -1
    try:
        yield Held(descriptor)
    finally:
        if descriptor >= 0:
            _forget(path)
            os.close(descriptor)


@contextmanager
def held_by(call: Call, job: str, attempt: int) -> Iterator[None]:
    """Hold a job's lock while its folder belongs to an attempt.

    So data that an agent receives after its head is gone change nothing if a fence, or a later attempt, has come.

    Raises:
        OpError: ``fenced``: the folder does not belong to the attempt.
    """
    with hold_job(call, job):
        if owner(job) != attempt:
            raise OpError(
                "fenced", "gpurun has already ended (fenced) this attempt on the host, or a later attempt has begun"
            )
        yield


def lock_file(job: str) -> str:
    """Return the lock's path. It contains the host's name, because hosts may share homes."""
    return os.path.join(os.path.dirname(job_folder(job)), ".%s.%s.lock" % (job, os.uname().nodename))


def _lock(call: Call, path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not _try(descriptor) or _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            try:
                call.wait(_POLL_S)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    """Take the lock; return False if this file system has no locks. Raises BlockingIOError if another process
    holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _forget(path: str) -> None:
    """Remove the lock's file while it is held. If it stays, the next process takes it."""
    try:
        os.unlink(path)
    except OSError:
        pass


def owner(job: str) -> int:
    """Return the attempt that owns the job's folder; 0 if none does. The caller holds the lock."""
    try:
        with open(os.path.join(job_folder(job), ATTEMPT_FILE), encoding="ascii") as stream:
            text = stream.read(20).strip()
        return int(text) if text.isdigit() and len(text) <= _DIGITS else 0
    except (OSError, ValueError):
        return 0


def own(job: str, attempt: int) -> None:
    """Make an attempt the owner of the existing folder, unless a later one owns it. The caller holds the lock."""
    now = owner(job)
    note_agent(job, is_new=not now and not known_cards(job))
    if now >= attempt:
        return
    path = os.path.join(job_folder(job), ATTEMPT_FILE)
    with open(path + ".new", "w", encoding="ascii") as stream:
        stream.write("%d\n" % attempt)
    os.replace(path + ".new", path)

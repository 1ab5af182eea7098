"""The lock of a job on this host: one operation at a time changes the job's files, and only for its newest attempt
here.

Agents of an earlier supervisor may still work here, and a host that is not fenced yet may get the job's next attempt.
So `gang.prepare`, `gang.create`, `gang.fence` and `outputs.remove` hold one lock for each job. The job's folder says
which attempt owns it, the outputs and the processes.

The lock is a file next to the job's folder, which its holder removes. A waiting process then finds another file, or
none, under its name and starts again.
"""

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import Iterator, NamedTuple

from gpurun.node.agent.call import Call, OpError
from gpurun.node.job import job_parts

ATTEMPT_FILE = "attempt"
"""In a job's folder: the number of the attempt that it belongs to."""
_POLL_S = 0.05
_DIGITS = 9
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Held(NamedTuple):
    """A job's lock.

    Attributes:
        descriptor: holds the lock until every copy of it is closed, also copies in children; -1 if no lock is possible
            here.
    """

    descriptor: int


@contextmanager
def held(call: Call, job: str, required: bool = True) -> Iterator[Held]:
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
    with held(call, job):
        if owner(job) != attempt:
            raise OpError(
                "fenced", "gpurun has already ended (fenced) this attempt on the host, or a later attempt has begun"
            )
        yield


def lock_file(job: str) -> str:
    """Return the lock's path. It contains the host's name, because hosts may share homes."""
    return os.path.join(os.path.dirname(job_parts.folder(job)), ".%s.%s.lock" % (job, os.uname().nodename))


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
        if error.errno not in _NO_LOCKS:
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
        with open(os.path.join(job_parts.folder(job), ATTEMPT_FILE), encoding="ascii") as stream:
            text = stream.read(20).strip()
        return int(text) if text.isdigit() and len(text) <= _DIGITS else 0
    except (OSError, ValueError):
        return 0


def own(job: str, attempt: int) -> None:
    """Make an attempt the owner of the existing folder, unless a later one owns it. The caller holds the lock."""
    now = owner(job)
    job_parts.note_agent(job, is_new=not now and not job_parts.known_cards(job))
    if now >= attempt:
        return
    path = os.path.join(job_parts.folder(job), ATTEMPT_FILE)
    with open(path + ".new", "w", encoding="ascii") as stream:
        stream.write("%d\n" % attempt)
    os.replace(path + ".new", path)

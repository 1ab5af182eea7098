"""One operation at a time changes what a job has on this host, and only for the newest attempt that came here.

Agents of an earlier supervisor may still work here, and a host whose fence is still due may get the job's next attempt.
So `gang.prepare`, `gang.create`, `gang.fence` and `outputs.remove` hold one lock for each job. The job's folder says
which attempt owns it, the outputs and the processes.

The lock is a file beside the job's folder, which goes with the lock: whoever waited for it finds another file, or none,
under its name and starts anew.
"""

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import Iterator, NamedTuple

from gpurun.node import job_parts
from gpurun.node.call import Call, OpError

ATTEMPT_FILE = "attempt"
"""In a job's folder: the number of the attempt that it belongs to."""
_POLL_S = 0.05
_DIGITS = 9
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Held(NamedTuple):
    """A job's lock.

    Attributes:
        descriptor: holds the lock until every copy of it is closed, also those that children inherit; -1 if there is no
            lock to be had here.
    """

    descriptor: int


@contextmanager
def held(call: Call, job: str, required: bool = True) -> Iterator[Held]:
    """Hold a job's lock; wait for whoever holds it.

    Args:
        required: raise what keeps the lock from being made. A fence works without: nothing can be made on a full disk,
            so nobody can be in the middle of it.

    Raises:
        Cancelled: nobody waits for the operation any more.
        OSError: there can be no lock, and it is `required`.
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
    """Hold a job's lock for as long as its folder belongs to an attempt.

    What an agent still receives after its head is gone changes nothing then: a fence, or a later attempt, has come.

    Raises:
        OpError: ``fenced``: it does not.
    """
    with held(call, job):
        if owner(job) != attempt:
            raise OpError("fenced", "the attempt was fenced here, or a later one has come")
        yield


def lock_file(job: str) -> str:
    """The lock's path, which names the host, too: homes may be shared between hosts."""
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
    """Take the lock; False if this file system has no locks. Raises BlockingIOError if somebody else holds it."""
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
    """Remove the lock's file while it is held. One that stays is taken by the next."""
    try:
        os.unlink(path)
    except OSError:
        pass


def owner(job: str) -> int:
    """The attempt that the job's folder belongs to; 0 if none does. The caller holds the lock."""
    try:
        with open(os.path.join(job_parts.folder(job), ATTEMPT_FILE), encoding="ascii") as stream:
            text = stream.read(20).strip()
        return int(text) if text.isdigit() and len(text) <= _DIGITS else 0
    except (OSError, ValueError):
        return 0


def own(job: str, attempt: int) -> None:
    """Give the job's folder, which exists, to an attempt, unless a later one has it. The caller holds the lock."""
    if owner(job) >= attempt:
        return
    path = os.path.join(job_parts.folder(job), ATTEMPT_FILE)
    with open(path + ".new", "w", encoding="ascii") as stream:
        stream.write("%d\n" % attempt)
    os.replace(path + ".new", path)

"""Every error that a person can meet, each with its exit code.

An error says what failed, where (host, rank, job, file), why, and what to do next (`hint`). The command
line prints it once and exits with `exit_code`; nothing else in gpurun decides an exit code.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

EXIT_CODES: Mapping[int, str] = {
    0: "The command succeeded. For `submit --follow`, `follow` and `wait`, the job succeeded, too.",
    1: "The job failed, was cancelled, or ran out of time.",
    2: "Bad input: a recipe, an inventory, an option or an image.",
    3: "The hosts of the inventory can never satisfy the request.",
    4: "A host or the network failed.",
    5: "gpurun's state is locked, damaged or inconsistent, or the disk for state or output is full.",
    124: "The time of `wait --timeout` ran out.",
    130: "The command was interrupted, for example by Ctrl-C.",
}
"""What each exit code of the command line means. `exec`, `ssh` and `lab run` exit as the program does."""


class GpurunError(Exception):
    """Base of all errors gpurun raises on purpose.

    Args:
        message: what failed and why, one sentence, no trailing full stop needed.
        host: the host it happened on, if one did.
        job: the job's id, if it belongs to one.
        where: a finer place, such as ``inventory.yaml:12:7`` or ``rank 3``.
        hint: what the person can do now.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        host: str | None = None,
        job: str | None = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.host = host
        self.job = job
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.job, self.host, self.where) if part)
        return f"{place}: {self.message}" if place else self.message


class JobFailed(GpurunError):
    """The job ran and failed: a rank exited non-zero, or it was timed out or cancelled."""

    exit_code = 1


class BadInput(GpurunError):
    """A recipe, inventory, flag or argument is wrong; nothing was started."""

    exit_code = 2


class NotYours(BadInput):
    """The job is another user's; nothing was done to it."""


class NeverFits(GpurunError):
    """The inventory can never satisfy this request."""

    exit_code = 3


class HostFailure(GpurunError):
    """A host or the network failed, or a host is not what the inventory says.

    Args:
        kind: one word for the class of the failure, such as ``no-space``; default: what the type of the error says.
    """

    exit_code = 4
    kind = ""

    def __init__(
        self, message: str, *, kind: str | None = None, host: str | None = None, job: str | None = None,
        where: str | None = None, hint: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, host=host, job=job, where=where, hint=hint)
        if kind:
            self.kind = kind


class HostUnreachable(HostFailure):
    """gpurun could not open an SSH session to the host, or lost an open one."""

    kind = "unreachable"


class HostKeyMismatch(HostFailure):
    """The host's key is unknown, or differs from the key in known_hosts. gpurun does not connect."""

    kind = "host-key"


class AuthenticationFailed(HostFailure):
    """The host refused every key that gpurun offered."""

    kind = "login"


class HeadShort(HostFailure):
    """This machine lacks descriptors, memory or threads to connect to the host. It says nothing about the host."""

    kind = "head-short"


class HostNotReady(HostFailure):
    """The host answers but lacks something a job needs: Docker, python3, disk space."""


class NoRoom(HostNotReady):
    """Something that the job needs does not fit on the host's disk.

    Attributes:
        lacks_mib: how much more space it needs there.
    """

    kind = "no-space"
    lacks_mib = 0


class StateError(GpurunError):
    """State is locked, inconsistent or unreadable; its GPUs stay leased."""

    exit_code = 5


class StateUnavailable(StateError):
    """The state directory cannot be used at the moment, for a reason outside the job. Retry later."""


class StateDiskError(StateUnavailable):
    """The disk of the state directory is full or failed. The write changed nothing."""


class UnsafeState(StateError):
    """The state directory is not safe: its file system does not lock, or its modes let other users write."""


OUTLIVED = (GpurunError, OSError, MemoryError, RuntimeError)
"""What processes and threads that live on must outlive. If no thread can start, Python raises RuntimeError."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def is_short(error: BaseException) -> bool:
    """Return whether an error says that this machine lacks descriptors, memory, threads or processes."""
    if isinstance(error, OSError):
        return error.errno in _SHORT
    if isinstance(error, RuntimeError):
        return "start new thread" in str(error)  # Python has no type for it
    return isinstance(error, MemoryError)


def messages_of(failed: Mapping[str, GpurunError]) -> dict[str, str]:
    """Return what went wrong with each of these hosts or jobs, without hints."""
    return {name: error.message for name, error in failed.items()}


def words_of(error: BaseException) -> str:
    """Return what an error says. Python's MemoryError says nothing."""
    return str(error) or ("no memory is left" if isinstance(error, MemoryError) else type(error).__name__)

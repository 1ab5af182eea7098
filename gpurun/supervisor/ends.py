"""The end of an attempt: decided once, kept through STOPPING, and used for the job's outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpurun.errors import GpurunError, HostFailure, HostUnreachable, StateUnavailable
from gpurun.jobs.record import FirstFailure, GpuHolder, Restart
from gpurun.jobs.states import State


@dataclass(frozen=True)
class End:
    """The end of an attempt.

    Attributes:
        outcome: the job's state once every host is fenced; QUEUED = the job will restart.
        code: the exit code of ``submit --follow`` and ``wait``.
        exit_code: the job's own exit code, if a rank has ended.
        ladder: ranks may still be running, and get SIGTERM and their grace period before SIGKILL.
        suspects: hosts at fault.
        by_host: host → its failure that ended the attempt; "" = the head's. `gpurun.supervisor.unstarted` decides what
            follows if the gang has not run.
        refused: host → who holds the gang's GPUs there; the gang is placed again, and no host is at fault.
        restart: when the queued job may be placed again, if not at once.
    """

    outcome: State
    reason: str
    code: int
    exit_code: int | None = None
    failure: FirstFailure | None = None
    ladder: bool = False
    suspects: tuple[str, ...] = ()
    by_host: Mapping[str, HostFailure] = field(default_factory=dict)
    refused: Mapping[str, tuple[GpuHolder, ...]] = field(default_factory=dict)
    restart: Restart | None = None


class GangEnd(Exception):
    """Raised by a step to end the attempt; `end` says how."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


def failed(error: GpurunError, *, ladder: bool = False, more: str = "") -> GangEnd:
    """Return the end of an attempt that failed with an error; if it names a host, that host is at fault.

    Args:
        more: what to add to the error's message.

    Raises:
        StateUnavailable: the error is one. A full disk of the head ends no gang.
    """
    if isinstance(error, StateUnavailable):
        raise error
    hint = f" ({error.hint})" if error.hint else ""
    kind = "host-lost" if isinstance(error, HostUnreachable) else ""
    failure = FirstFailure(reason=f"{error.message}{more}", host=error.host, kind=kind)
    by_host = {error.host or "": error} if isinstance(error, HostFailure) else {}
    end = End(
        State.FAILED, f"{error}{more}{hint}", error.exit_code, failure=failure, ladder=ladder,
        suspects=tuple(filter(None, by_host)), by_host=by_host,
    )  # fmt: skip
    return GangEnd(end)

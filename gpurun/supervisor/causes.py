"""Turn what hosts saw into causes: which host and rank is at fault, and which cause came first. Pure.

One failure causes many others: a GPU falls off the bus, its rank dies, the other ranks time out, the launcher names the
first of them. The cause is the earliest thing that a host saw and that explains the failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpurun.doctor.xids import Blame, xid
from gpurun.facts.kernel_log import OomLine, XidLine, parse, same_gpu
from gpurun.jobs.record import FirstFailure
from gpurun.jobs.spec import Grant
from gpurun.jobs.states import State
from gpurun.quantities.counts import count
from gpurun.supervisor.ends import End

Kind = Literal["xid", "gpu-lost", "ecc", "oom", "disk-full", "pids", "engine", "host-lost"]
_NO_SPACE = ("No space left on device", "ENOSPC", "Disk quota exceeded")
TAIL_LINES = 200
HINTS = ("xid", "pids")
"""A cause of these kinds that is the program's own only adds a hint to what the launcher says."""


@dataclass(frozen=True)
class Cause:
    """Something that a host saw.

    Attributes:
        at_s: when, on the head's monotonic clock, seconds.
        blame: as in `gpurun.doctor.xids.Xid`.
        fatal: the attempt cannot continue.
        evidence: what the host saw, word for word.
        advice: the manufacturer's advice, if there is any.
    """

    at_s: float
    host: str
    kind: Kind
    text: str
    evidence: str
    blame: Blame
    fatal: bool = False
    gpu: int | None = None
    rank: int | None = None
    advice: str = ""

    @property
    def reason(self) -> str:
        """Return one sentence with rank, host, cause and advice."""
        gpu = "" if self.gpu is None else f"GPU {self.gpu}: "
        rank = "" if self.rank is None else f" (rank {self.rank})"
        advice = f"; NVIDIA advises: {self.advice}" if self.advice else ""
        return f"{self.host}: {gpu}{self.text}{rank}{advice}"


def rank_of(grants: Sequence[Grant], host: str, gpu: int) -> int | None:
    """Return the rank that has a GPU; None if the gang does not have it."""
    rank = 0
    for grant in grants:
        for mine in grant.gpus:
            if (grant.host, mine) == (host, gpu):
                return rank
            rank += 1
    return None


def cause_of(
    item: Mapping[str, Any], host: str, grants: Sequence[Grant], containers: Iterable[str], now_s: float
) -> Cause | None:
    """Return the cause in a report of `gpurun.node.job.health` on a host, if it concerns the gang.

    Args:
        containers: ids of the gang's containers on that host.
        now_s: the head's monotonic clock.
    """
    at_s = now_s - float(item.get("age_s", 0.0))
    gpu = item.get("gpu")
    rank = None if gpu is None else rank_of(grants, host, gpu)
    match item["kind"]:
        case "kernel":
            return _of_line(item, host, grants, containers, at_s)
        case "xid":
            return _xid(at_s, host, int(item["xid"]), f"NVML reports Xid {item['xid']} on GPU {gpu}", gpu, rank)
        case "lost":
            return Cause(
                at_s, host, "gpu-lost", f"the GPU is lost: {item['text']}", item["text"], "hardware", True, gpu, rank
            )
        case "ecc":
            errors = count(item["count"] - item["before"], "uncorrectable memory error")
            text = f"the GPU had {errors} since the attempt began"
            said = f"uncorrected volatile ECC errors of GPU {gpu}: {item['before']} → {item['count']}"
            return Cause(at_s, host, "ecc", text, said, "hardware", True, gpu, rank)
        case "disk" | "memory" | "pids" | "filled":
            return _of_use(item, host, at_s)
    return None


def _of_use(item: Mapping[str, Any], host: str, at_s: float) -> Cause:
    """Return the cause in what a host counted of the gang's own container, or of its disks."""
    if item["kind"] == "disk":
        said = f"{item['free_bytes'] >> 20} MiB free at {item['path']}"
        return Cause(at_s, host, "disk-full", f"{item['what']} is full", said, "host")
    if item["kind"] == "memory":
        had, used = item["limit_bytes"], item["peak_bytes"]
        said = f"oom_kill {item['kills']}, memory.max {had}, memory.peak {used}"
        if item["is_own_limit"] and had:
            return Cause(at_s, host, "oom", _out_of_own_memory(had, used), said, "program")
        return Cause(
            at_s, host, "oom", "the host ran out of memory, so the kernel killed a process of the job", said, "host"
        )
    if item["kind"] == "pids":
        text = f"the job has reached its limit of {item['most']} processes and threads on this host"
        return Cause(at_s, host, "pids", text, f"pids.events: max {item['refused']}", "program")
    text = (
        f"the job filled {item['what']} with {_gib(item['written_bytes'])}, so gpurun ended the job before other jobs "
        "failed. Let the job write less, or write to a mount on a larger disk"
    )
    said = f"{item['free_bytes'] >> 20} MiB free at {item['path']}"
    return Cause(at_s, host, "disk-full", text, said, "program", fatal=True)


def _out_of_own_memory(had_bytes: int, used_bytes: int | None) -> str:
    more_mib = 2 * (had_bytes >> 20)
    return (
        f"out of memory: the job had {_gib(had_bytes)} on this host and used {_gib(used_bytes or had_bytes)}, so the "
        f"kernel killed a process of the job; ask for more memory with --memory {more_mib}MiB (`memory:` in a recipe), "
        "or for more GPUs"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB" if size_bytes >= 1 << 30 else f"{size_bytes >> 20} MiB"


def _of_line(
    item: Mapping[str, Any], host: str, grants: Sequence[Grant], containers: Iterable[str], at_s: float
) -> Cause | None:
    line, said = parse(item["line"]), item["line"]
    if isinstance(line, XidLine):
        for index, bus in item["cards"].items():
            if same_gpu(line.pci, bus):
                gpu = int(index)
                rank = rank_of(grants, host, gpu)
                return None if rank is None else _xid(at_s, host, line.number, said, gpu, rank)
    if isinstance(line, OomLine) and (item["rank"] is not None or line.container in set(containers)):
        memory = item.get("memory") or {}
        is_own = line.limit and memory.get("is_own_limit", True)  # else the limit of a group of containers
        text = f"the {'job' if is_own else 'host'} ran out of memory, so the kernel killed process {line.pid}"
        if is_own and memory.get("limit_bytes"):
            text = _out_of_own_memory(memory["limit_bytes"], memory["peak_bytes"])
        return Cause(at_s, host, "oom", text, said, "program" if is_own else "host", rank=item["rank"])
    return None


def _xid(at_s: float, host: str, number: int, said: str, gpu: int | None, rank: int | None) -> Cause:
    meant = xid(number)
    text = f"Xid {number}: {meant.meaning}"
    return Cause(at_s, host, "xid", text, said, meant.blame, meant.fatal, gpu, rank, meant.advice)


def first_cause(causes: Iterable[Cause], lines: Sequence[str]) -> Cause | None:
    """Return the earliest cause that explains a failed attempt.

    Hardware and memory explain a failure by themselves; a full disk only if a rank complained about it. A program's own
    Xid is the cause only if there is no other, because the driver also logs such Xids after other failures.

    Args:
        lines: the last lines that the gang printed.
    """
    complained = any(word in line for line in lines[-TAIL_LINES:] for word in _NO_SPACE)
    explain = [
        cause
        for cause in causes
        if cause.kind == "oom" or cause.blame == "hardware" or cause.fatal or (cause.kind == "disk-full" and complained)
    ]
    others = [cause for cause in causes if cause.kind in HINTS]
    return min(explain or others, key=lambda cause: cause.at_s, default=None)


def end_of(cause: Cause) -> End:
    """Return how an attempt ends because of a cause, while its ranks may still run."""
    failure = FirstFailure(
        reason=cause.reason, rank=cause.rank, host=cause.host, kind=cause.kind, evidence=cause.evidence,
        cordon=cause.blame == "hardware",
    )  # fmt: skip
    suspects = (cause.host,) if cause.blame in ("hardware", "host") else ()
    return End(State.FAILED, cause.reason, 4 if suspects else 1, failure=failure, ladder=True, suspects=suspects)


def explained(end: End, cause: Cause | None) -> End:
    """Add the cause, if a host saw one, to the end of an attempt that the launcher or a container has ended.

    A program's own Xid only adds a hint to the launcher's message.
    """
    if cause is None or end.outcome is not State.FAILED:
        return end
    if end.failure is not None and cause.blame in ("program", "unclear") and cause.kind in HINTS:
        reason = f"{end.reason} ({cause.reason})"
        return replace(end, reason=reason, failure=replace(end.failure, kind=cause.kind, evidence=cause.evidence))
    before = end.failure or FirstFailure(end.reason)
    if cause.rank is None and before.host == cause.host:
        cause = replace(cause, rank=before.rank)
    by_cause = end_of(cause)
    assert by_cause.failure is not None
    is_whole = cause.kind == "oom" or cause.blame == "program"
    failure = replace(by_cause.failure, exit_code=before.exit_code, excerpt=before.excerpt)
    return replace(
        end, reason=by_cause.reason, code=by_cause.code, failure=failure,
        suspects=by_cause.suspects if is_whole else tuple(sorted({*end.suspects, *by_cause.suspects})),
    )  # fmt: skip

"""Printing for all commands: JSON to stdout, messages to stderr, colours only on a terminal."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypedDict

import typer

from gpurun.documents.plain import json_text, printable
from gpurun.errors import StateDiskError, StateError, StateUnavailable, words_of
from gpurun.quantities import count, duration

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from gpurun.errors import GpurunError
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord, OutputsLeft, Restart, State
    from gpurun.jobs.spec import Grant
    from gpurun.leases.look import HostRow
    from gpurun.state.hosts import Out


def print_json(document: object) -> None:
    """Print one JSON document on stdout, indented on a terminal. What it may contain: `json_text`."""
    sys.stdout.write(json_text(document, indent=2 if sys.stdout.isatty() else None) + "\n")
    sys.stdout.flush()


quiet = False
"""Set by ``gpurun --quiet``: `say` prints nothing."""


def say(text: str) -> None:
    """Print a message for people on stderr."""
    if not quiet:
        typer.echo(text, err=True)


def say_problem(problem: GpurunError) -> None:
    """Print an error and its hint. Escapes control characters: names of files and hosts in it are untrusted."""
    for line in f"gpurun: {problem}".split("\n"):
        typer.echo(printable(line), err=True)
    if problem.hint:
        for line in f"  → {problem.hint}".split("\n"):
            typer.echo(printable(line), err=True)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour text: only on a terminal, and not with NO_COLOR (https://no-color.org) or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class FirstFailureShape(TypedDict):
    """The first failure.

    Attributes:
        rank: the first rank that failed; null if no rank did.
        exit_code: that rank's exit code; 128 + n for signal n.
        excerpt: the last lines that the rank printed; of a gang that hangs, where its ranks stand.
        kind: the class of the cause, such as `rank`, `host-lost`, `oom`, `hang` or `disk-full`.
        evidence: a host's report, verbatim.
    """

    reason: str
    rank: int | None
    host: str | None
    exit_code: int | None
    excerpt: tuple[str, ...]
    kind: str
    evidence: str


class WholeShape(TypedDict):
    """The last whole copy of a job's outputs. A restarted job gets this copy.

    Attributes:
        at_s: when gpurun found the outputs at rest; seconds since 1970.
        step: the last step that the program reported as saved; null if the program reported no step.
        path: the folder with the copy. You may read the copy's files, but not change the files.
    """

    at_s: float
    step: int | None
    path: str


class JobShape(TypedDict):
    """A job. Times are seconds since 1970.

    Attributes:
        hosts: the hosts that the job holds now.
        pool: the job's pool; null: no pool.
        started_s: when RUNNING began; null before.
        exit_code: the exit code of the first rank that failed, or 0.
        reason: why the job is in this state; empty: no reason.
        owner: the user who submitted the job.
        attempt: how often gpurun has started the job.
        restarts: how often gpurun restarted the job after a host's fault.
        retries: how often gpurun retried the job after its program failed, hung or reached its time limit.
        restart: when gpurun starts the job again, and which restart or retry that is; null if none is planned.
        outputs_left: outputs that are not on the head; null if all are.
        whole: the last whole copy of the job's outputs; null if there is none. Only `status JOB` prints this key.
        beside: files on the head that ranks wrote beside their code. Only `status JOB` prints this key.
        warnings: likely problems of the job's last attempt. Only `status JOB` prints this key.
    """

    id: str
    name: str
    state: State
    gpus: int
    hosts: list[str]
    pool: str | None
    priority: int
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    reason: str
    owner: str
    attempt: int
    restarts: int
    retries: int
    grants: tuple[Grant, ...]
    restart: Restart | None
    outputs_left: OutputsLeft | None
    first_failure: FirstFailureShape | None
    whole: NotRequired[WholeShape | None]
    beside: NotRequired[list[str]]
    warnings: NotRequired[list[str]]


def job_json(record: JobRecord) -> JobShape:
    """Return a job as ``status --json`` shows it, with the keys that scripts use most first."""
    failure = record.first_failure
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "gpus": record.gpus,
        "hosts": [grant.host for grant in record.granted],
        "pool": record.pool,
        "priority": record.priority,
        "submitted_s": record.submitted_s,
        "started_s": record.started_s,
        "ended_s": record.ended_s,
        "exit_code": record.exit_code,
        "reason": record.reason,
        "owner": record.owner,
        "attempt": record.attempt,
        "restarts": record.restarts,
        "retries": record.retries,
        "grants": record.granted,
        "restart": record.restart,
        "outputs_left": record.outputs_left,
        "first_failure": None
        if failure is None
        else {
            "reason": failure.reason,
            "rank": failure.rank,
            "host": failure.host,
            "exit_code": failure.exit_code,
            "excerpt": failure.excerpt,
            "kind": failure.kind,
            "evidence": failure.evidence,
        },
    }


class ForeignShape(TypedDict):
    """GPUs that another gpurun, or a process that no gpurun job started, holds on a host.

    Attributes:
        process: the process with its user and pid; empty: a job holds the GPUs.
    """

    gpus: tuple[int, ...]
    job: str
    user: str
    head: str
    process: str


class HostShape(TypedDict):
    """A host and its free GPUs.

    Attributes:
        free: GPUs that no job holds; 0 while the host is out.
        state: `ok`, `cordoned`, `draining`, `drained`, `lost`, `out`, or `unknown` while a lease is damaged.
        seen_s: when this user's processes last checked the host; seconds since 1970; null: never.
        drain: the progress of the drain in words, during a drain.
        out: why the last check found the host broken; only if the host is out.
        foreign: GPUs that another gpurun or a process holds there; only if there are any.
    """

    host: str
    rack: str
    generation: str
    gpus: int
    free: int
    state: str
    seen_s: float | None
    drain: NotRequired[str]
    out: NotRequired[Out]
    foreign: NotRequired[list[ForeignShape]]


class StatusShape(TypedDict):
    """Hosts and jobs. With a JOB, `hosts` is empty."""

    hosts: list[HostShape]
    jobs: list[JobShape]


def host_json(row: HostRow) -> HostShape:
    """Return a host for scripts and tables."""
    shown: HostShape = {
        "host": row.host.name,
        "rack": row.host.rack,
        "generation": row.host.generation,
        "gpus": row.host.gpus,
        "free": row.free,
        "state": row.state,
        "seen_s": row.seen_s,
    }
    if row.state == "draining" and row.shown != row.state:
        shown["drain"] = row.shown
    if row.out is not None:
        shown["out"] = row.out
    if row.foreign:
        shown["foreign"] = [
            {"gpus": each.gpus, "job": each.job, "user": each.user, "head": each.head, "process": each.process}
            for each in row.foreign
        ]
    return shown


class JobsShape(TypedDict):
    """The jobs that were named, in the order of the arguments."""

    jobs: list[JobShape]


class SubmittedShape(TypedDict):
    """The submitted job. With `--follow`, the document shows the job after its end."""

    job: JobShape


def ran_text(folder: JobFolder, record: JobRecord, now_s: float) -> str:
    """Format how long a job's attempt has run; without one that has begun to run, name the last one that did."""
    if record.started_s is not None:
        return duration((record.ended_s or now_s) - record.started_s)
    if record.granted and not record.state.ended:
        return "not yet"
    from gpurun.errors import StateError
    from gpurun.jobs.folder import kept

    try:
        ran = [each.attempt for each, _ in kept(folder) if each.started_s is not None] if record.attempt else []
    except (FileNotFoundError, StateError):  # `gpurun prune` removed it, or it is damaged
        ran = []
    if ran:
        return f"not since attempt {ran[-1]}"
    tried = f", in {count(record.attempt, 'attempt')}" if record.attempt > 1 else ""
    return ("never" if record.state.ended else "not yet") + tried


def waited_s(record: JobRecord, now_s: float) -> float:
    """Return for how many seconds a job has waited, or waited before its last attempt, since it was last queued."""
    is_granted = record.granted_s is not None and record.granted_s >= record.queued_s
    until_s = record.granted_s if is_granted else record.ended_s or now_s
    return max(0.0, (until_s or now_s) - record.queued_s)


# The standard streams of a command, where they are closed, full, or read no further.


OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EUCLEAN, errno.ESTALE)
"""What only files say. Connections say the rest of `DISK_ERRORS`, too; they name no file."""
STDOUT_LOST = (*OF_FILES, errno.EFBIG)
UNREAD = 1


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as by `<&-` or a service manager.

    Stdout of a locale without Unicode prints other characters as escapes, as stderr always does: a job's name is no
    reason to fail. Call this before opening any other file: that file would get the stream's number, and child
    processes would use it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def disk_problem(error: Exception) -> StateDiskError | None:
    """Return the error for people if a disk is full, read-only, broken or away, but not stdout's; else None."""
    from gpurun.state.paths import DISK_ERRORS

    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return None
    if error.filename is None and (error.errno not in OF_FILES or _is_on_disk(sys.stdout)):
        return None
    return StateDiskError(
        f"{'a' if error.filename is None else 'the'} file cannot be read or written: {error.strerror}",
        where=None if error.filename is None else str(error.filename),
        hint="`df -h` shows which disk is full: gpurun also writes caches and temporary files. "
        "`dmesg | tail` may show disk errors",
    )  # fmt: skip


def shortage(error: Exception) -> StateUnavailable | None:
    """Return the error for people if this machine is short of descriptors, locks, memory or processes; else None."""
    from gpurun.state.paths import DISK_ERRORS, may_pass

    if not may_pass(error) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
        return None
    what = error.strerror if isinstance(error, OSError) else words_of(error)
    where = error.filename if isinstance(error, OSError) else None
    return StateUnavailable(
        f"this machine has too little of a resource: {what}", where=None if where is None else str(where),
        hint="try again; `ulimit -a` shows your limits",
    )  # fmt: skip


def _is_on_disk(stream: TextIO | None) -> bool:
    """Return whether a write to a stream may fail because of a disk."""
    if stream is None:
        return False
    try:
        kind = os.fstat(stream.fileno()).st_mode
        return stat.S_ISREG(kind) or (stat.S_ISCHR(kind) and not stream.isatty())
    except (OSError, ValueError):
        return True


@contextmanager
def output_written() -> Iterator[None]:
    """On leaving, write what stdout still buffers. Exit with 1 if nobody reads it, with 5 if its disk is full.

    Without this, Python writes the buffer as it exits: a failure there is a warning, and exit code 120.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has exited, so nobody reads a message
        sys.stdout = None
        sys.exit(UNREAD)
    except OSError as error:
        if error.filename is not None or error.errno not in STDOUT_LOST:
            raise
        sys.stdout = None
        typer.echo(f"gpurun: cannot write to stdout: {error.strerror}", err=True)
        sys.exit(StateError.exit_code)

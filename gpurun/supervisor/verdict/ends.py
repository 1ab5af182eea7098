"""The end of an attempt: decided once, kept through STOPPING, and used for the job's outcome."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpurun.errors import BadInput, GpurunError, HostFailure, HostUnreachable, StateUnavailable
from gpurun.jobs.record import FirstFailure, GpuHolder, JobRecord, Restart, Setback, State, Unjudged
from gpurun.jobs.spec import Retry, RetryOn
from gpurun.leases.lease import Lease
from gpurun.quantities import count


@dataclass(frozen=True)
class End:
    """The end of an attempt.

    Attributes:
        outcome: the job's state once every host is fenced; QUEUED = the job will restart.
        code: the exit code of ``submit --follow`` and ``wait``.
        ladder: ranks may still be running, and get SIGTERM and their grace period before SIGKILL.
        suspects: hosts at fault.
        by_host: host → its failure that ended the attempt; "" = the head's. `causes` decides what
            follows if the gang has not run.
        refused: host → who holds the gang's GPUs there; the gang is placed again, and no host is at fault.
        restart: when the queued job may be placed again, if not at once.
    """

    outcome: State
    reason: str
    code: int
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


# Describe exit codes for people: a program that a signal ended exits with 128 and the signal's number. Pure.


FULL_SHM = "/dev/shm is full: --shm-size (`shm_size` in a recipe) makes it larger"  # noqa: S108 (words)
_MEANT = {
    signal.SIGBUS: f"usually {FULL_SHM}",
    signal.SIGKILL: "a person killed the program, or the kernel killed the program because memory ran out",
    signal.SIGSEGV: "the program used memory that it does not have",
    signal.SIGABRT: "the program aborted, for example after a failed assertion",
    signal.SIGILL: "the program was built for another processor",
    signal.SIGFPE: "the program divided by zero",
    signal.SIGXFSZ: "the program wrote a file larger than its limit",
    signal.SIGPIPE: "the program wrote to a pipe that nobody reads",
}


def code_words(code: int | None) -> str:
    """Describe an exit code: ``exit code 135 (SIGBUS: usually /dev/shm is full: …)``; ``exit code 3``."""
    try:
        sent = signal.Signals((code or 0) - 128)
    except ValueError:
        return f"exit code {code}"
    meant = f": {_MEANT[sent]}" if sent in _MEANT else ""
    return f"exit code {code} ({sent.name}{meant})"


# What the ranks of an attempt have reported: which started, which ended, when and how. Pure.


TOGETHER_S = 0.5
"""Ends closer than this cannot be told apart by time: hosts are asked at intervals, and answers travel."""
IDLE_S = 10.0
"""A host without ranks for so long has left an elastic gang: Horovod never uses a host again on which a rank failed."""
BROKEN_OFF = (128 + 15, 128 + 9)
"""Codes of ranks that something ended from outside; most often because another rank had failed."""


class Rank(NamedTuple):
    """One process of a gang, as its host has reported it. Times are on the head's monotonic clock.

    Attributes:
        id: the host's identifier; unique on the host within an attempt.
        code: exit code, 128 + n for signal n; None while it runs.
        is_cut_off: it did not record its end: it was killed together with gpurun's script.
        with_container: all other processes in its container were killed, too.
    """

    host: str
    id: str
    rank: int
    started_s: float
    ended_s: float | None = None
    code: int | None = None
    is_cut_off: bool = False
    with_container: bool = False

    @property
    def was_broken_off(self) -> bool:
        """Return whether something outside may have ended it."""
        return self.is_cut_off or self.code in BROKEN_OFF


def rank_in_event(ranks: Mapping[tuple[str, str], Rank], host: str, event: object, now_s: float) -> Rank | None:
    """Return the rank in an event of ``ranks.follow``; None if the event has nothing new, or is not valid.

    Args:
        ranks: (host, id) → what is known.
    """
    if not isinstance(event, Mapping) or event.get("kind") not in ("start", "end"):
        return None
    ident, rank, age_s = event.get("id"), event.get("rank"), event.get("age_s")
    if not isinstance(ident, str) or type(rank) is not int or not isinstance(age_s, int | float):
        return None
    at_s = now_s - max(0.0, float(age_s))
    known = ranks.get((host, ident))
    if event["kind"] == "start":
        return None if known else Rank(host, ident, rank, at_s)
    code = event.get("code")
    known = known or Rank(host, ident, rank, at_s)
    if type(code) is not int:
        return None
    is_cut_off = bool(event.get("killed"))
    # A new agent has not seen the container fall, and takes back nothing.
    with_container = is_cut_off and (known.with_container or bool(event.get("container")))
    ended = known._replace(code=code, is_cut_off=is_cut_off, with_container=with_container)
    return None if ended == known else ended._replace(ended_s=at_s if known.ended_s is None else known.ended_s)


def first_failed(ranks: Iterable[Rank]) -> Rank | None:
    """Return the rank that failed first; None if none has.

    If ranks ended at the same time, one that failed by itself comes before one that was killed.
    """
    failed = sorted((rank for rank in ranks if rank.code), key=lambda rank: (rank.ended_s or 0.0, rank.rank))
    if not failed:
        return None
    until_s = (failed[0].ended_s or 0.0) + TOGETHER_S
    together = [rank for rank in failed if (rank.ended_s or 0.0) <= until_s]
    return min(together, key=lambda rank: rank.was_broken_off)


def newest(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the last start of each rank of each host. Ranks of an elastic gang may start again."""
    last: dict[tuple[str, int], Rank] = {}
    for rank in sorted(ranks, key=lambda rank: rank.started_s):
        last[rank.host, rank.rank] = rank
    return list(last.values())


def have_succeeded(ranks: Iterable[Rank], awaited: Collection[int]) -> float | None:
    """Return when the last awaited rank ended with 0; None if not all have."""
    ends = {rank.rank: rank.ended_s for rank in ranks if rank.code == 0 and rank.rank in awaited}
    if len(ends) < len(awaited):
        return None
    return max((end for end in ends.values() if end is not None), default=None)


def hosts_without_ranks(ranks: Sequence[Rank], now_s: float) -> list[str]:
    """Return hosts on which a rank has failed and all have ended, some time ago, while other hosts' ranks continue.

    Leaves out hosts whose ranks have returned 0: the other ranks may take long to save.
    """
    running = {rank.host for rank in ranks if rank.code is None}
    failed = {rank.host for rank in ranks if rank.code}
    last_s: dict[str, float] = {}
    for rank in ranks:
        last_s[rank.host] = max(last_s.get(rank.host, 0.0), rank.ended_s or 0.0)
    return sorted(host for host in failed - running if running and now_s - last_s[host] >= IDLE_S)


def hosts_that_are_done(ranks: Iterable[Rank]) -> set[str]:
    """Return hosts whose ranks have all returned 0."""
    codes: dict[str, set[int | None]] = {}
    for rank in ranks:
        codes.setdefault(rank.host, set()).add(rank.code)
    return {host for host, found in codes.items() if found == {0}}


# Track what hosts of an ending attempt still owe, and when to stop waiting. Pure: no host, no file, no clock.


GIVE_UP_S = 10.0
"""gpurun tries for this time, and at least twice, to fence a host before its GPUs count as lost."""


@dataclass(frozen=True)
class Ending:
    """What the hosts of an ending attempt still owe.

    Attributes:
        suspects: hosts that the job avoids. gpurun asks them, but does not wait for their answers.
        lines: hosts whose ranks' last lines may not all be on the head.
        outputs: hosts with outputs that the head may not have.
        proof: hosts that are not fenced yet.
        first_asked_s: when the first fence began; None before. The copies before it do not use its time.
        is_last: all time is used up: what hosts owe after this round stays owed.
    """

    suspects: frozenset[str]
    lines: frozenset[str]
    outputs: frozenset[str]
    proof: frozenset[str]
    first_asked_s: float | None = None
    is_last: bool = False

    @classmethod
    def of(cls, record: JobRecord, hosts: Collection[str]) -> Ending:
        """Return the initial state for an attempt on `hosts`."""
        owed = frozenset() if record.reached == "nothing" else frozenset(hosts)
        printed = owed if record.reached == "containers" else frozenset()
        suspects = owed.intersection((*record.avoid, *record.failed_to_start))
        return cls(suspects=suspects, lines=printed, outputs=owed, proof=owed)

    @property
    def asked(self) -> frozenset[str]:
        """Return the hosts that owe something that is still awaited."""
        return self.proof | self.outputs

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is awaited."""
        return self.is_last or self.asked <= self.suspects

    @property
    def kept(self) -> frozenset[str]:
        """Return hosts without a process of the job whose outputs are not on the head. They keep their outputs."""
        return self.outputs - self.proof

    def after_lines(self, ended: Collection[str]) -> Ending:
        """Return the state after all lines of `ended` were copied."""
        return replace(self, lines=self.lines.difference(ended))

    def after_outputs(self, left: Collection[str]) -> Ending:
        """Return the state after the outputs were copied, except those of `left`."""
        return replace(self, outputs=frozenset(left))

    def now_asked(self, now_s: float) -> Ending:
        """Return the state when the fence begins."""
        first_s = now_s if self.first_asked_s is None else self.first_asked_s
        return replace(self, first_asked_s=first_s, is_last=now_s - first_s > GIVE_UP_S)

    def after_fence(self, unproven: Collection[str]) -> Ending:
        """Return the state after the fence, which failed on `unproven`. The fence has removed the others' lines."""
        return replace(self, proof=frozenset(unproven), lines=self.lines.intersection(unproven))


def with_only_copies(record: JobRecord | None, lease: Lease, hosts: Collection[str]) -> set[str]:
    """Return hosts of a lost lease that may have the only copy of something that the job's last attempt wrote.

    Args:
        record: None after a person has removed the job.
    """
    if lease.found:
        return set(hosts)
    if record is None or record.outputs_left is None or record.attempt > lease.attempt or record.state.holds_gpus:
        return set()
    return set(record.outputs_left.hosts).intersection(hosts)


# Decide whether a failed attempt is followed by another, and when. Pure.


FIRST_S = 3.0
LONGEST_S = 300.0
JITTER = 0.25
LONG_ENOUGH_S = 600.0
"""If a job's ranks do not report progress, the job counts as having made progress after this time."""

MOST_FRUITLESS = 5
"""So many attempts in a row that achieve nothing end a gang that is formed again."""

WRONG = BadInput.exit_code

NEVER_THE_JOBS = frozenset({"host-lost", "gpu-lost", "ecc", "xid", "engine", "link"})
"""Causes that a job does not bring about: two of them are bad luck."""


def backoff_s(job: str, restart: int) -> float:
    """Return the wait before a job's `restart`-th restart (1, 2, …): 3 s, doubled each time, at most 300 s, ± 25 %.

    The jitter depends on the job's id: always the same for a job, but different for jobs that one switch has failed.
    """
    share = int.from_bytes(hashlib.sha256(f"{job} {restart}".encode()).digest()[:4], "big") / 2**32
    plain_s = min(FIRST_S * 2.0 ** min(restart - 1, 30), LONGEST_S)
    return plain_s * (1 - JITTER + 2 * JITTER * share)


def is_worth_another(record: JobRecord, end: End, *, max_restarts: int | None) -> bool:
    """Return whether an attempt failed by a host's fault and the job may restart; `max_restarts` None = no limit."""
    is_left = max_restarts is None or record.restarts < max_restarts
    return end.outcome is State.FAILED and bool(end.suspects) and is_left


def restart_of(record: JobRecord, *, max_restarts: int | None, now_s: float) -> Restart:
    """Return the next start of a job whose attempt has failed."""
    number = record.restarts + 1
    return Restart(
        at_s=now_s + backoff_s(record.id, number),
        attempt=number + 1,
        of=None if max_restarts is None else max_restarts + 1,
    )


class Reached(NamedTuple):
    """The furthest step that a rank of an attempt reported, and the furthest that a rank reported as saved; None = no
    rank reported one.
    """

    step: int | None = None
    saved: int | None = None


def failure_of(end: End) -> FirstFailure | None:
    """Return why an attempt ended, also if nothing failed."""
    is_over = end.failure is None and end.outcome is State.TIMED_OUT
    return FirstFailure("", kind="time-limit") if is_over else end.failure


def setback_of(
    failure: FirstFailure | None, *, attempt: int, step: int | None, ran_s: float, saved: int | None = None,
    before: Setback | None = None,
) -> Setback:  # fmt: skip
    """Return a description of a failed attempt, to compare with later ones.

    Args:
        step, saved: see `Reached`.
        ran_s: how long it was RUNNING.
        before: the last failed attempt before it.
    """
    failure = failure or FirstFailure("")
    said = failure.reason if failure.kind in ("", "launcher") else ""
    found = Setback(attempt, failure.kind, said, failure.rank, failure.exit_code, None, ran_s)
    if before is not None:
        so_far = _further(before.furthest, before.step)  # an older gpurun wrote only the step
        found = replace(
            found, fruitless=before.fruitless, furthest=so_far, saved=before.saved, futile=before.futile
        )  # fmt: skip
    return with_steps(found, Reached(step, saved))


def with_steps(setback: Setback, reached: Reached) -> Setback:
    """Return a failed attempt after its ranks have reported more."""
    step = _further(setback.step, reached.step)
    return replace(
        setback, step=step, furthest=_further(setback.furthest, step), saved=_further(setback.saved, reached.saved)
    )


def _further(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)


def achieved(before: Setback | None, now: Setback, *, has_saved: bool) -> bool:
    """Return whether an attempt made progress: it saved, ran for long, or came further than the one before."""
    further = now.step is not None and (before is None or before.step is None or now.step > before.step)
    return has_saved or further or now.ran_s >= LONG_ENOUGH_S


def repeats(before: Setback | None, now: Setback) -> bool:
    """Return whether an attempt failed like the one before, without progress in between."""
    if before is None or now.kind in NEVER_THE_JOBS or _way(before) != _way(now):
        return False
    if None not in (before.exit_code, now.exit_code) and before.exit_code != now.exit_code:
        return False  # the code of a container that was gone before it could be asked is not known
    if now.step is not None:
        return before.step is not None and now.step <= before.step
    return now.ran_s < LONG_ENOUGH_S


def _way(setback: Setback) -> tuple[object, ...]:
    return (setback.kind, setback.said, setback.rank)


# Decide whether a job is retried whose program failed, hung or reached its time limit. Pure.


MOST_FUTILE = 2
"""So many ends of the program in a row without progress end the job."""
_NO_FAILURE = frozenset({"", "idle", *NEVER_THE_JOBS - {"xid"}})
"""Kinds of a first failure that are not the program's."""


def programs_end(end: End, *, has_run: bool) -> RetryOn | None:
    """Return how the program ended an attempt; None if something else did: a host, the head, or a person.

    Exit code 2 says that the command or the image is wrong: another attempt would end in the same way. An idle job has
    not failed: a retry would give it the GPUs that its pool took.
    """
    if not has_run or end.suspects or end.code == WRONG:
        return None
    if end.outcome is State.TIMED_OUT:
        return "time_limit"
    if end.outcome is not State.FAILED or end.failure is None or end.failure.kind in _NO_FAILURE:
        return None
    return "hang" if end.failure.kind == "hang" else "failure"


def unjudged_of(record: JobRecord, retry: Retry | None, end: End, cause: RetryOn | None) -> Unjudged | None:
    """Return the retry that may follow an attempt; None if the job does not ask for one, or has used all."""
    if cause is None or retry is None or cause not in retry.on or record.retries >= retry.times:
        return None
    return Unjudged(end.outcome, cause, record.setback)


def has_used_all(record: JobRecord, retry: Retry | None, cause: RetryOn | None) -> bool:
    """Return whether a retry would follow if the job had not used all."""
    return retry is not None and cause in retry.on and 0 < retry.times <= record.retries


def progress_of(setback: Setback, before: Setback | None, written: str) -> str:
    """Return what an attempt achieved, for people; "" = nothing that a later attempt can continue from.

    Args:
        written: a checkpoint in the outputs that earlier attempts had not written; "" = none.
    """
    if setback.saved is not None and (before is None or before.saved is None or setback.saved > before.saved):
        return f"the job saved step {setback.saved}"
    furthest = None if before is None else _further(before.furthest, before.step)
    if setback.step is not None and (furthest is None or setback.step > furthest):
        return f"the job reached step {setback.step}"
    return f"the job saved {written}" if written else ""


@dataclass(frozen=True)
class Judged:
    """What follows an end of the program.

    Attributes:
        outcome: QUEUED = the job is retried.
        reason: why the attempt ended, and why it is retried or not.
        setback: the attempt, with how many before it were futile, too.
        restart: None = the job is not retried.
    """

    outcome: State
    reason: str
    setback: Setback
    restart: Restart | None = None


def judged_retry(record: JobRecord, retry: Retry, written: str, *, now_s: float) -> Judged:
    """Return whether a job is retried, after its outputs are on the head.

    Args:
        record: with the retry that is not decided yet.
        written: see `progress_of`.
        now_s: the head's clock, seconds since the epoch.
    """
    unjudged, setback = record.unjudged, record.setback
    assert unjudged is not None
    assert setback is not None
    before = unjudged.before
    progress = progress_of(setback, before, written)
    setback = replace(setback, futile=0 if progress else 1 + (before.futile if before is not None else 0))
    why = "" if progress or not retry.only_with_progress else _why_futile(unjudged, setback)
    if why:
        return Judged(unjudged.outcome, f"{record.reason}; {why}", setback)
    number = record.retries + 1
    wait_s = backoff_s(record.id, number) if retry.wait_s is None else retry.wait_s
    restart = Restart(now_s + wait_s, number, retry.times, is_retry=True, wait_s=wait_s)
    reason = f"{record.reason}; {progress or 'the attempt made no progress'}"
    return Judged(State.QUEUED, reason, replace(setback, is_retried=True), restart)


def _why_futile(unjudged: Unjudged, setback: Setback) -> str:
    """Return why a job is not retried after an attempt without progress; "" if it is."""
    before = unjudged.before
    if unjudged.cause == "time_limit":
        return "the attempt made no progress, so another one would reach the time limit, too"
    if before is not None and repeats(before, setback):
        return f"attempt {before.attempt} failed the same way, and the job has made no progress since"
    if setback.futile >= MOST_FUTILE:
        return f"{count(setback.futile, 'attempt')} in a row made no progress, so gpurun does not retry the job again"
    return ""

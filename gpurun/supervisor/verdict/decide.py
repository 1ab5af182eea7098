"""Decide the supervisor's next step for a running gang, from what it has seen. Pure: no host, no file, no clock.

The order of the checks is the order of reliability: a rank's own end first, then its container's, then the launcher's.
Reasons from outside (a request, a limit, a silent host) come last.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpurun.jobs.record import CancelRequest, FirstFailure, State
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.launch import output
from gpurun.launch.jobssh import host_of
from gpurun.launch.launchers import launcher_of
from gpurun.launch.launchers.direct import UNTOLD
from gpurun.launch.launchers.launcher import RankSeat, seats_of
from gpurun.launch.rank import RANK_SCRIPT
from gpurun.quantities import duration
from gpurun.scheduler.explain import may_lose
from gpurun.supervisor.verdict.causes import Cause, Failed, end_of, explained, hint_for, path_hint
from gpurun.supervisor.verdict.ends import (
    BROKEN_OFF,
    TOGETHER_S,
    End,
    Rank,
    code_words,
    first_failed,
    have_succeeded,
    hosts_that_are_done,
    hosts_without_ranks,
    newest,
)
from gpurun.supervisor.verdict.hang import Hang

# Everything that is known about a running gang at one moment. Pure.


NO_TOOLS = "the host's disk is full, or no folder in PATH has mkdir and mkfifo"
"""Why a rank's script may have no words about its end."""


@dataclass(frozen=True)
class ContainerEnd:
    """How the job's container on a host ended.

    Attributes:
        seen_s: when the supervisor learned it, on the head's monotonic clock.
        code: its exit code, if known.
        engine_out: the engine's last error, if the engine stopped answering and ended the container.
        ended_ago_s: how long before `seen_s` it ended, by its host's clock.
        memory_bytes: the limit of its memory, if it had one.
        unwritable: why nothing can be written to the job's folder on its host, if so.
    """

    seen_s: float
    code: int | None = None
    is_oom: bool = False
    is_removed: bool = False
    engine_out: str = ""
    ended_ago_s: float | None = None
    memory_bytes: int | None = None
    unwritable: str = ""

    @property
    def is_own_memory(self) -> bool:
        """Return whether it ran out of its own memory, not of its host's."""
        return self.is_oom and bool(self.memory_bytes)

    @property
    def at_s(self) -> float:
        """Return when it ended, as far as that is known."""
        return self.seen_s - (self.ended_ago_s or 0.0)

    @property
    def was_ended(self) -> bool:
        """Return whether something outside is known to have ended it. Its exit code then means nothing."""
        return bool(self.engine_out) or self.is_removed or self.is_oom

    @property
    def was_killed(self) -> bool:
        """Return whether it certainly did not end by itself."""
        return self.was_ended or self.code in (None, *BROKEN_OFF)

    def failure(self, host: str) -> FirstFailure:
        """Return its end as the reason for the gang's end."""
        kind = "engine" if self.engine_out else "oom" if self.is_oom else "container"
        return FirstFailure(reason=self._reason, host=host, exit_code=self.code, kind=kind, evidence=self.engine_out)

    @property
    def _reason(self) -> str:
        if self.engine_out:
            return "the host's Docker engine has stopped, and has stopped the job's container"
        if self.is_removed:
            return "somebody removed the job's container"
        if self.is_own_memory:
            had_mib = (self.memory_bytes or 0) >> 20
            more = f"ask for more memory with --memory {2 * had_mib}MiB"
            return (
                f"out of memory: the job had {had_mib} MiB on this host and used all, so the kernel killed "
                f"the job; {more}"
            )
        if self.is_oom:
            return "the job's container ran out of memory and was killed"
        if self.code == UNTOLD:
            why = self.unwritable or NO_TOOLS
            return f"a rank ended, but could not report its exit code: {why}"
        return "the job's container ended" + (f" with {code_words(self.code)}" if self.code is not None else "")


@dataclass(frozen=True)
class GangSeen:
    """Everything that is known about a running gang at one moment. Times are on the head's monotonic clock.

    Attributes:
        members: the hosts on which ranks should run, in rank order, the launcher's first.
        roles: the roles of the ranks; None if they are all alike, one for each GPU.
        one_per_host: the ranks are one for each host.
        least: how many ranks an elastic gang needs; None for any other gang.
        has_launcher: a process on the first host starts the ranks and ends after them; otherwise gpurun has started
            them.
        drained: hosts of an elastic gang that a person drains.
        exits: containers that have ended, by host, as Docker reported.
        heard_since_s: since when this supervisor has continuously heard some host of the gang or another. Hosts
            reported earlier events one after the other.
        cut_off_s: when the head last heard no host, if ever.
        down_since: unreachable hosts, and since when the supervisor has not heard them.
        returned_s: when an unreachable host was last heard again: it may have more to report.
        mute_since: hosts that have not even accepted a connection of this supervisor, and since when it tries.
        others_answer: whether hosts outside the gang can be reached; None = not tried.
        has_launchers_log: the launcher's output is completely on the head.
        launcher_line_s: when the last of it arrived.
        limit_s: the time limit, if the gang has run for longer.
        hung: why the gang counts as hung.
        rehearsed: why a rehearsal has been long enough; "" if it has not, or if this is no rehearsal.
        idle: the end that the idle rules of the job's pool demand.
    """

    now_s: float
    members: Sequence[Grant]
    least: int | None = None
    has_launcher: bool = True
    heard_since_s: float = 0.0
    cut_off_s: float = -math.inf
    drained: Sequence[str] = ()
    ranks: Sequence[Rank] = ()
    exits: Mapping[str, ContainerEnd] = field(default_factory=dict)
    down_since: Mapping[str, float] = field(default_factory=dict)
    returned_s: float = -math.inf
    mute_since: Mapping[str, float] = field(default_factory=dict)
    others_answer: bool | None = None
    fatal: Cause | None = None
    has_launchers_log: bool = False
    launcher_line_s: float = 0.0
    request: CancelRequest | None = None
    limit_s: float | None = None
    hung: Hang | None = None
    rehearsed: str = ""
    idle: End | None = None
    roles: Roles | None = None
    one_per_host: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts on which ranks should run."""
        return tuple(grant.host for grant in self.members)

    @property
    def first(self) -> str:
        """Return the host of rank 0, and of the launcher if there is one."""
        return self.members[0].host

    @property
    def launcher(self) -> ContainerEnd | None:
        """Return how the launcher's container ended; None if it has not, or there is no launcher."""
        return self.exits.get(self.first) if self.has_launcher else None

    def is_launchers(self, host: str) -> bool:
        """Return whether the container on a host is the launcher's, which ends by itself."""
        return self.has_launcher and host == self.first

    @property
    def world(self) -> int:
        """Return the expected number of ranks."""
        return len(self.seats)

    @cached_property
    def seats(self) -> tuple[RankSeat, ...]:
        """Return the expected ranks, by number."""
        return seats_of(self.members, self.roles, one_per_host=self.one_per_host)

    @property
    def awaited(self) -> frozenset[int]:
        """Return the ranks that must return 0 for success."""
        return frozenset(seat.rank for seat in self.seats if seat.is_awaited)

    @property
    def have_all_ended(self) -> bool:
        """Return whether every expected rank has reported its end."""
        return {seat.rank for seat in self.seats} <= {rank.rank for rank in self.ranks if rank.ended_s is not None}

    @cached_property
    def finished(self) -> frozenset[str]:
        """Return the hosts whose containers no longer matter: all their ranks have returned 0. None once the launcher
        has ended, which may have missed such a container.
        """
        return frozenset(hosts_that_are_done(self.ranks)) if self.launcher is None else frozenset()

    def title_of(self, rank: int | None) -> str:
        """Return a rank's name in messages for people."""
        if rank is None:
            return "a rank"
        return self.seats[rank].title if rank < len(self.seats) else f"rank {rank}"

    def fell_with_others(self, failed: Rank) -> bool:
        """Return whether something else may be the cause: the rank was killed, or a container ended before it.

        Includes a worker's container that ended together with the rank, because no rank and no launcher ends it.
        """
        return failed.was_broken_off or any(
            end.at_s <= (failed.ended_s or 0.0) + (-TOGETHER_S if self.is_launchers(host) else TOGETHER_S)
            for host, end in self.ends.items()
            if host not in self.finished and (not self.is_launchers(host) or end.was_killed)
        )

    @property
    def ends(self) -> Mapping[str, ContainerEnd]:
        """Return containers that have ended, by host: Docker reported their end, or all their processes are gone.

        Docker may report an end much later than the launcher, and without its time. Then the end of the container's
        ranks gives the time.
        """
        ends = {rank.host: ContainerEnd(rank.ended_s or 0.0) for rank in self.ranks if rank.with_container}
        for host, end in self.exits.items():
            is_late = end.ended_ago_s is None and host in ends and ends[host].seen_s < end.seen_s
            ends[host] = replace(end, ended_ago_s=end.seen_s - ends[host].seen_s) if is_late else end
        return ends

    def of_members(self) -> GangSeen:
        """Return the same without hosts that have left."""
        return replace(
            self,
            ranks=[rank for rank in self.ranks if rank.host in self.hosts],
            exits={host: end for host, end in self.exits.items() if host in self.hosts},
            down_since={host: since_s for host, since_s in self.down_since.items() if host in self.hosts},
            drained=[host for host in self.drained if host in self.hosts],
            fatal=self.fatal if self.fatal and self.fatal.host in self.hosts else None,
        )


# Explain how an attempt ended, from ranks, containers, the launcher and what hosts saw. Pure.


SIGKILLED, SIGTERMED = 128 + 9, 128 + 15
NOT_FOUND = 127
"""What a shell exits with that cannot find the program it was to become."""
STOPPED_S = 5.0
"""How long a launcher may outlive the ranks beside it, when something ends them all."""
AFTERMATH_S = 30.0
"""If an elastic gang fails so soon after it lost a host and Gloo's time limit passed, the loss is the cause."""
SUCCEEDED = End(State.SUCCEEDED, "", 0)


def by_launcher(seen: GangSeen, lines: Sequence[output.Line], spec: JobSpec, place: Sequence[str]) -> End:
    """Return how an attempt ended whose launcher has ended: by its ranks' reports, then by the launcher's.

    Args:
        lines: the last lines of the log.
        spec: names the image, in case it lacks the launcher.
        place: the host of each rank, for a gang whose ranks stay where they are.
    """
    launcher = seen.exits[seen.first]
    failed = first_failed(seen.ranks) if seen.least is None else None
    is_unproven = any(rank.code is None and rank.host not in seen.down_since for rank in seen.ranks)
    has_proof = not is_unproven and (not seen.ranks or any(rank.code == 0 for rank in seen.ranks))
    fell = any(rank.host == seen.first and _fell_with(rank, launcher) for rank in seen.ranks)
    if launcher.code == 0 and not launcher.was_ended and failed is None and has_proof and not fell:
        return SUCCEEDED
    return replace(_failed_by_launcher(seen, failed, lines, spec, place), ladder=is_unproven)


def _fell_with(rank: Rank, launcher: ContainerEnd) -> bool:
    """Return whether what killed a rank may also have ended the launcher. The launcher's exit code 0 then means
    nothing.
    """
    return rank.was_broken_off and rank.ended_s is not None and launcher.at_s - rank.ended_s < STOPPED_S


def _failed_by_launcher(
    seen: GangSeen, failed: Rank | None, lines: Sequence[output.Line], spec: JobSpec, place: Sequence[str]
) -> End:
    launcher, named = seen.exits[seen.first], output.first_failure(lines)
    if failed is not None and not seen.fell_with_others(failed):
        return rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank))
    silent = [host for host in seen.hosts if host in seen.down_since]
    accused = None if named is None else _host_of(named, seen, place)
    if accused in silent or (silent and launcher.code == 0 and not launcher.was_ended):
        return unreachable(silent)
    # A launcher that SIGKILL ended before it could say why was killed from outside, as one whose container is gone.
    if launcher.was_ended or (named is None and launcher.code in (None, 0, SIGKILLED)):
        failure = replace(launcher.failure(seen.first), excerpt=output.excerpt_of(lines, None))
        why = f"{seen.first}: {failure.reason}"
        return _by_container(seen.first, launcher, End(State.FAILED, why, 4, failure=failure))
    if named is not None and not (failed is not None and _was_told_to_end(seen, named.rank)):
        return rank_failed(named.rank, _host_of(named, seen, place), named.exit_code, who=seen.title_of(named.rank))
    if failed is not None:
        return rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank))
    return _launcher_failed(int(launcher.code or 1), output.excerpt_of(lines, None), spec)


def _host_of(named: output.Failure, seen: GangSeen, place: Sequence[str]) -> str:
    """Return the host of the rank that the launcher names as the first to fail."""
    at = named.rank or 0
    return host_of(named.host) if named.host is not None else place[at] if at < len(place) else seen.first


def _was_told_to_end(seen: GangSeen, number: int | None) -> bool:
    """Return whether a rank reports that it only obeyed SIGTERM, whatever the launcher says."""
    return any(rank.rank == number and rank.code == SIGTERMED for rank in seen.ranks)


def rank_failed(rank: int | None, host: str, code: int, *, who: str, ladder: bool = False) -> End:
    """Return the end after a rank failed first; `rank` None: the launcher names only the host.

    Args:
        who: the rank's name in messages.
    """
    why = f"{who} on {host} failed first, with {code_words(code)}"
    failure = FirstFailure(reason=why, rank=rank, host=host, exit_code=code, kind="rank")
    return End(State.FAILED, why, 1, failure=failure, ladder=ladder)


def with_last_words(end: End, lines: Sequence[output.Line], spec: JobSpec) -> End:
    """Return the end with the last lines of the rank that failed first, and with what they say to do
    (`gpurun.supervisor.verdict.causes`).

    Args:
        lines: the last lines of the attempt.
    """
    failure = end.failure
    if failure is None or failure.excerpt:
        return end
    if failure.kind == "container" and (replaced := path_hint(spec.env)):
        return _because(
            end, end.reason.replace(NO_TOOLS, f"{replaced}, and no folder in this PATH has mkdir and mkfifo")
        )
    if failure.kind != "rank":
        return end
    failure = replace(failure, excerpt=output.excerpt_of(lines, failure.rank))
    end = replace(end, failure=failure)
    if _lacks_command(failure, spec.command[0]):
        replaced = path_hint(spec.env)
        lacks = f"{replaced}, and no folder in this PATH has" if replaced else f"the image {spec.image} has no"
        return replace(_because(end, f"{lacks} {spec.command[0]}{_instead(spec.command)}: {end.reason}"), code=2)
    printed = [line for line in lines if line.rank == failure.rank]
    hint = hint_for(Failed(failure.exit_code, printed, spec, failure.host or "its host"))
    return _because(end, f"{end.reason}; {hint}") if hint else end


def _instead(command: tuple[str, ...]) -> str:
    """Return what to write for a program that many images lack; "" if gpurun does not know."""
    if command[0] == "python":
        return " (most images have python3, so write python3)"
    line = shlex.quote(shlex.join(command))
    return f" (time is a keyword of bash, so write bash -c {line})" if command[0] == "time" else ""


def _because(end: End, reason: str) -> End:
    return replace(end, reason=reason, failure=None if end.failure is None else replace(end.failure, reason=reason))


def _lacks_command(failure: FirstFailure, command: str) -> bool:
    """Return whether the shell that started the rank reports that the command does not exist, so nothing of it has
    run.
    """
    said = failure.excerpt[-1] if failure.excerpt else ""
    is_shells = said.startswith((f"{RANK_SCRIPT}: ", "sh: ")) and " exec: " in said
    return failure.exit_code == NOT_FOUND and is_shells and said.endswith(f" {command}: not found")


def container_ended(host: str, found: ContainerEnd) -> End:
    """Return the end after the job's container on a host ended."""
    failure = found.failure(host)
    reason = f"{host}: {failure.reason}"
    return _by_container(host, found, End(State.FAILED, reason, 4, failure=failure, ladder=True))


def _by_container(host: str, found: ContainerEnd, end: End) -> End:
    """Return the end with the host as the suspect, unless the job used up the memory of its container."""
    return replace(end, code=1) if found.is_own_memory else replace(end, suspects=(host,))


def unreachable(hosts: Sequence[str]) -> End:
    """Return the end after hosts of the gang were silent for too long; they are the suspects."""
    reason = f"{', '.join(hosts)} cannot be reached any more"
    return End(State.FAILED, reason, 4, failure=host_lost(hosts[0]), ladder=True, suspects=tuple(hosts))


def host_lost(host: str) -> FirstFailure:
    """Return a host's silence as the reason for its ranks' end."""
    return FirstFailure(reason="the host cannot be reached", host=host, kind="host-lost")


def _launcher_failed(code: int, excerpt: tuple[str, ...], spec: JobSpec) -> End:
    said, program = " ".join(excerpt), launcher_of(spec).program
    if code == 127 and program in said and "not found" in said:
        reason = (
            f"the image {spec.image} has no {program}: choose another --launcher, or use an image of recipes/images"
        )
        failure = FirstFailure(reason, exit_code=code, excerpt=excerpt, kind="launcher")
        return End(State.FAILED, reason, 2, failure=failure)
    reason = f"{program} failed with {code_words(code)}: {excerpt[-1] if excerpt else 'it printed nothing'}"
    failure = FirstFailure(reason, exit_code=code, excerpt=excerpt, kind="launcher")
    return End(State.FAILED, reason, 1, failure=failure)


def with_cause(end: End, cause: Cause | None, stopped: Sequence[Cause]) -> End:
    """Return the end of a failed attempt with its cause, if a host saw it.

    Args:
        cause: the first cause in the reports of hosts' hardware and kernels.
        stopped: engines that were stopped, and hosts that are gone.
    """
    if end.outcome is not State.FAILED:
        return end
    if explains_alone(cause) or not stopped:
        return explained(end, cause)
    end = explained(end, stopped[0])
    return replace(end, suspects=tuple(sorted({*end.suspects, *(each.host for each in stopped)})))


def after_loss(end: End, lost: Mapping[str, FirstFailure], since_s: float, gloo_timeout_s: float) -> End:
    """Return the end of an elastic gang that failed soon after it had lost hosts; the loss is then the first failure.

    Horovod can abort every survivor of a lost host: ``terminate called after throwing … gloo::IoException``, exit code
    134. The last survivor may abort only when Gloo gives up: ``Timed out waiting 60000ms for send``. The program is not
    at fault, and starts again from its checkpoint.

    Args:
        lost: the `hosts_at_fault` that the gang lost last.
        since_s: how long before the end it lost them.
        gloo_timeout_s: how long a rank waits for another one.
    """
    if not lost or end.outcome is not State.FAILED or end.suspects or since_s > gloo_timeout_s + AFTERMATH_S:
        return end
    host = min(lost)
    failure = lost[host]
    reason = f"{host}: {failure.reason}; then {end.reason}"
    return replace(end, reason=reason, code=4, failure=failure, suspects=tuple(sorted(lost)))


def hosts_at_fault(failures: Mapping[str, FirstFailure]) -> dict[str, FirstFailure]:
    """Return the lost hosts without those where ranks failed: there the program may be at fault."""
    return {host: failure for host, failure in failures.items() if failure.kind != "rank"}


def explains_alone(cause: Cause | None) -> bool:
    """Return whether a cause explains a failed attempt, whatever happened to the hosts' engines."""
    return cause is not None and (cause.blame == "hardware" or cause.kind in ("oom", "disk-full", "link"))


def asked_end(request: CancelRequest, *, ladder: bool) -> End:
    """Return the requested end."""
    outcome = State.CANCELLED if request.kind == "cancel" else State.QUEUED
    return End(outcome, request.outcome, 1, ladder=ladder)


HOST_LOST_S = 14.0
"""A host that has been silent for this long, while another one is heard, is lost: its gang is ended."""
MUTE_S = 10.0
"""The same for a host that a new supervisor asks for a connection, and that does not even accept one.

gpurun asks a connected host for a sign of life after 4 s of silence (`gpurun.remote.agent`), so it has these 10 s,
too. A new supervisor asks at once. A host that is only slow accepts the connection: its kernel does that.
"""
RETURN_S = 8.0
"""The head was cut off and is back: how long it may take to reach its hosts again, one after the other."""
FOLLOW_S = 4.0
"""A supervisor has just begun, or the head or a host is back: how long hosts may take to tell what went on before."""
SETTLE_S = 1.0
"""A rank has failed: how long the words of other hosts may take to arrive. The first to fail is named then."""
EXPLAIN_S = 5.0
"""Something broke a rank off: how long what did it may take to show itself."""
UNTOLD_S = 20.0
"""The same, while a rank tells nothing at all: it may have failed first, and the launcher may know it."""
DELAYED_S = 6.0
"""The head was cut off for a moment, and does not know it: how long what a host tells may have been on its way."""
LINGER_S = 5.0
"""All ranks have ended: how long the launcher may take to end, too."""
LOG_SILENT_S = 10.0
"""The launcher has ended: how long its log may be silent before it is judged as it is."""
PROOF_S = 14.0
"""The launcher has returned 0: how long ranks may take to prove it. By then a silent host counts as down."""
FORSAKEN_S = 60.0
"""All ranks of an elastic gang have ended: how long its driver may take to start others, or to end."""


@dataclass(frozen=True)
class Lose:
    """Continue the gang without these failed hosts."""

    failures: Mapping[str, FirstFailure]


@dataclass(frozen=True)
class LetGo:
    """Continue the gang without these hosts, which are not to blame."""

    hosts: Sequence[str]


@dataclass(frozen=True)
class Ask:
    """Find out whether any other host answers, because no host of the gang does."""


@dataclass(frozen=True)
class Finish:
    """The attempt has ended.

    Attributes:
        end: the end, as far as it is known.
        by_launcher: the log decides: `by_launcher`.
        is_explained: hosts cannot add a cause (`with_cause`).
    """

    end: End
    by_launcher: bool = False
    is_explained: bool = True


Step = Lose | LetGo | Ask | Finish | None


def decide(seen: GangSeen) -> Step:
    """Return the next step; None = nothing to do."""
    seen = seen.of_members()
    without = _without_some(seen) if seen.launcher is None else None
    if without is not None:
        return without
    step = (
        _by_success(seen) or _by_what_ended(seen) or _by_fatal_cause(seen)
        or _by_request(seen) or _by_limit(seen) or _by_silence(seen) or _by_hang(seen) or _by_idle(seen)
    )  # fmt: skip
    # Once all ranks that matter have returned 0, nothing that happens can undo their work.
    return _success(seen) if isinstance(step, Finish) and _all_succeeded_s(seen) is not None else step


def _without_some(seen: GangSeen) -> Lose | LetGo | None:
    """Return the hosts without which an elastic gang continues. It does not continue after its launcher has ended."""
    if (failures := _losses(seen)) and may_lose(seen.members, failures, seen.least):
        return Lose(failures)
    leaving = [host for host in seen.drained if _is_at_work(seen, host)]
    return LetGo(leaving) if leaving and may_lose(seen.members, leaving, seen.least) else None


def _losses(seen: GangSeen) -> dict[str, FirstFailure]:
    """Return the hosts that an elastic gang has lost, with the reasons."""
    if seen.least is None:
        return {}
    why = "the ranks on this host have ended, but ranks on other hosts still run"
    idle = hosts_without_ranks(seen.ranks, seen.now_s)
    failures = {host: FirstFailure(why, host=host, kind="rank") for host in idle if host != seen.first}
    failures |= {
        host: end.failure(host) for host, end in seen.ends.items()
        if _is_at_work(seen, host) and _is_explained(seen, host)
    }  # fmt: skip
    failures |= {host: host_lost(host) for host in lost_hosts(seen) if _is_at_work(seen, host)}
    if seen.fatal is not None and _is_at_work(seen, seen.fatal.host) and (failure := end_of(seen.fatal).failure):
        failures[seen.fatal.host] = failure
    return failures


def _is_at_work(seen: GangSeen, host: str) -> bool:
    """Return whether ranks of a host certainly have work left."""
    return not _is_new(seen) and host not in hosts_that_are_done(seen.ranks)


def _by_success(seen: GangSeen) -> Step:
    succeeded_s = _all_succeeded_s(seen)
    if succeeded_s is None:
        return None
    is_over = not seen.has_launcher or (seen.launcher is not None and _is_ready(seen, seen.launcher))
    return _success(seen) if is_over or seen.now_s - succeeded_s >= LINGER_S else None


def _success(seen: GangSeen) -> Finish:
    """Finish with success. Ranks that only served the others may still run; they get their grace period, too."""
    return Finish(replace(SUCCEEDED, ladder=not seen.have_all_ended))


def _by_what_ended(seen: GangSeen) -> Step:
    """Decide by ranks, containers and the launcher, once no host can report an earlier failure."""
    if seen.down_since and not seen.down_since.keys() <= {*lost_hosts(seen)}:
        return None
    if seen.now_s - seen.returned_s < FOLLOW_S:
        return None
    return _by_ranks(seen) or _by_containers(seen) or _by_launchers_end(seen) or _by_forsaken_driver(seen)


def _by_ranks(seen: GangSeen) -> Step:
    """Decide by the ranks' own reports. Ranks of an elastic gang come and go; its driver judges them."""
    failed = first_failed(seen.ranks) if seen.least is None else None
    if failed is None or failed.ended_s is None or (seen.ends.keys() - seen.finished and seen.fell_with_others(failed)):
        return None
    if seen.now_s - max(failed.ended_s, seen.heard_since_s) < _settled_s(seen, failed):
        return None
    end = rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank), ladder=True)
    return Finish(end, is_explained=False)


def _all_succeeded_s(seen: GangSeen) -> float | None:
    """Return when the last awaited rank returned 0; None if not all have, or the gang is elastic."""
    return have_succeeded(seen.ranks, seen.awaited) if seen.least is None else None


def _settled_s(seen: GangSeen, failed: Rank) -> float:
    """Return how long to wait for reports of another cause than this rank."""
    if failed.was_broken_off and len({rank.rank for rank in seen.ranks}) < seen.world:
        return UNTOLD_S
    if failed.is_cut_off or failed.code == SIGTERMED:
        return EXPLAIN_S
    is_old = (failed.ended_s or 0.0) < seen.heard_since_s  # the hosts report to a new supervisor one after the other
    return FOLLOW_S if is_old and not seen.have_all_ended else SETTLE_S


def _by_containers(seen: GangSeen) -> Step:
    """Decide by containers. An elastic gang may continue without a host, once it is known whether that host has
    finished.
    """
    host = _fallen(seen)
    if host is None or (seen.least is not None and _is_new(seen)):
        return None
    if seen.now_s - min(end.seen_s for end in seen.ends.values()) < SETTLE_S or not _is_explained(seen, host):
        return None
    return Finish(container_ended(host, seen.ends[host]), is_explained=False)


def _is_explained(seen: GangSeen, host: str) -> bool:
    """Return whether Docker has said why a container ended, such as out of memory, or has had time to say it.

    The launcher's container ends by itself: its exit code explains its end, but only in an elastic gang.
    """
    patience_s = UNTOLD_S if seen.least is not None and seen.is_launchers(host) else EXPLAIN_S
    return host in seen.exits or seen.now_s - seen.ends[host].seen_s >= patience_s


def _fallen(seen: GangSeen) -> str | None:
    """Return the host whose container ended first, if no launcher can say why. The container does not end itself, so
    its end is the cause.

    None if the launcher's container ended before, or if a rank failed by itself before the launcher ended. If all ranks
    of a host have returned 0, the end of its container does not matter.
    """
    launcher, failed = seen.launcher, first_failed(seen.ranks)
    aside = seen.finished if launcher is None else {seen.first}
    ends = [(end.at_s, host) for host, end in seen.ends.items() if host not in aside]
    if not ends:
        return None
    _, host = min(ends)
    is_known = launcher is not None or seen.first in seen.ends or not seen.has_launcher
    has_own_cause = is_known and failed is not None and not seen.fell_with_others(failed)
    return None if has_own_cause or (launcher is not None and _ended_before(seen, launcher, host)) else host


def _ended_before(seen: GangSeen, launcher: ContainerEnd, host: str) -> bool:
    """Return whether the launcher's container certainly ended before a host's container.

    Reports may be delayed by some seconds; while the head is cut off, by more.
    """
    end = seen.ends[host]
    if end.ended_ago_s is not None:
        return launcher.at_s < end.at_s - TOGETHER_S
    return seen.heard_since_s < launcher.at_s < end.at_s - DELAYED_S


def _by_launchers_end(seen: GangSeen) -> Step:
    launcher = seen.launcher
    if launcher is None or not _is_ready(seen, launcher) or _fallen(seen) is not None:
        return None
    if _is_new(seen):  # a worker's container may have ended before, or all ranks have returned 0
        return None
    return Finish(End(State.FAILED, "", 1), by_launcher=True, is_explained=False)


def _by_forsaken_driver(seen: GangSeen) -> Step:
    """Decide about an elastic gang whose ranks have all ended, if its driver neither ends nor starts other ranks.

    A rank without a report has ended if its container has. As for the driver, the work is done if enough ranks have
    returned 0.
    """
    if seen.least is None or seen.launcher is not None:
        return None
    if any(rank.code is None and rank.host not in seen.ends for rank in seen.ranks):
        return None
    ends_s = (seen.ends[rank.host].seen_s if rank.ended_s is None else rank.ended_s for rank in seen.ranks)
    ended_s = max(ends_s, default=seen.now_s)
    if seen.now_s - max(ended_s, seen.heard_since_s, seen.returned_s) < FORSAKEN_S:
        return None
    last = newest(seen.ranks)
    failed = first_failed(rank for rank in last if not rank.was_broken_off) or first_failed(last)
    if failed is None or sum(rank.code == 0 for rank in last) >= seen.least:
        return _success(seen)
    end = rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank), ladder=True)
    return Finish(end, is_explained=False)


def _is_new(seen: GangSeen) -> bool:
    """Return whether earlier failures may not be known yet."""
    return seen.now_s - seen.heard_since_s < FOLLOW_S


def _is_ready(seen: GangSeen, launcher: ContainerEnd) -> bool:
    """Return whether the launcher's output is complete, and ranks have had time to report their ends.

    If the launcher failed, other ranks may continue to run and need not be awaited. If it returned 0, their ends must
    confirm it.
    """
    waited_s = seen.now_s - max(launcher.seen_s, seen.heard_since_s)
    if launcher.engine_out:  # nothing more can come from it
        return True
    if not seen.has_launchers_log:
        return seen.now_s - max(seen.launcher_line_s, launcher.seen_s) >= LOG_SILENT_S
    # A host that was just reached may not have reported its ranks yet. Ranks of an older gpurun tell nothing at all.
    are_told = seen.least is not None or not seen.ranks or len({rank.rank for rank in seen.ranks}) >= seen.world
    if are_told and all(rank.code is not None for rank in seen.ranks):
        return waited_s >= EXPLAIN_S if _may_have_gone_with_its_container(seen) else True
    return waited_s >= (PROOF_S if launcher.code == 0 else SETTLE_S)


def _may_have_gone_with_its_container(seen: GangSeen) -> bool:
    """Return whether Docker may still explain the first failed rank: an agent that has just started cannot."""
    failed = first_failed(seen.ranks)
    return failed is not None and failed.is_cut_off and failed.host not in seen.ends


def _by_fatal_cause(seen: GangSeen) -> Step:
    return Finish(end_of(seen.fatal)) if seen.fatal is not None and _is_at_work(seen, seen.fatal.host) else None


def _by_request(seen: GangSeen) -> Step:
    return Finish(asked_end(seen.request, ladder=True)) if seen.request is not None else None


def _by_limit(seen: GangSeen) -> Step:
    if seen.rehearsed:
        return Finish(End(State.SUCCEEDED, seen.rehearsed, 0, ladder=True))
    if seen.limit_s is None:
        return None
    return Finish(
        End(State.TIMED_OUT, f"the job ran longer than its time limit of {duration(seen.limit_s)}", 1, ladder=True)
    )


def end_from_outside(seen: GangSeen) -> End | None:
    """Return the end that a person or the time limit demands, whatever else was seen."""
    step = _by_request(seen) or _by_limit(seen)
    return step.end if isinstance(step, Finish) else None


def _by_silence(seen: GangSeen) -> Step:
    if _is_cut_off(seen) and seen.others_answer is None:
        return Ask()
    lost = lost_hosts(seen)
    return Finish(unreachable(lost)) if lost else None


def _is_cut_off(seen: GangSeen) -> bool:
    """Return whether the head may hear no host because of its own network."""
    return bool(seen.down_since) and len(seen.down_since) == len(seen.hosts) and not seen.others_answer


def lost_hosts(seen: GangSeen) -> list[str]:
    """Return hosts that have been silent for too long; none while the head is cut off, and for some time after that."""
    if _is_cut_off(seen):
        return []
    mute = {host for host, since_s in seen.mute_since.items() if seen.now_s - max(since_s, seen.cut_off_s) > MUTE_S}
    lost = mute & seen.down_since.keys()
    if seen.now_s - seen.heard_since_s >= RETURN_S:
        silent = {host: seen.now_s - max(since_s, seen.cut_off_s) for host, since_s in seen.down_since.items()}
        lost |= {host for host, silent_s in silent.items() if silent_s > HOST_LOST_S}
    return sorted(lost)


def _by_hang(seen: GangSeen) -> Step:
    """Decide by hang detection."""
    if seen.hung is None or not _is_at_rest(seen):
        return None
    done = sorted(rank.rank for rank in seen.ranks if rank.code == 0 and seen.least is None)
    left = f"; {len(done)} of {seen.world} ranks have already returned 0, including rank {done[0]}" if done else ""
    hung = seen.hung
    failure = FirstFailure(
        f"{hung.reason}{left}", rank=hung.rank, host=hung.host, excerpt=hung.lines, kind="hang", evidence=hung.evidence
    )
    end = End(State.FAILED, f"the job hangs: {failure.reason}", 1, failure=failure, ladder=True)
    return Finish(end, is_explained=False)


def _by_idle(seen: GangSeen) -> Step:
    """Decide by the idle rules."""
    return Finish(seen.idle) if seen.idle is not None and _is_at_rest(seen) else None


def _is_at_rest(seen: GangSeen) -> bool:
    """Return whether a gang may hang or be idle: one that is ending, or that the head could not hear, is not judged."""
    has_failed = seen.least is None and first_failed(seen.ranks) is not None
    return not (seen.down_since or seen.exits or has_failed or seen.now_s - seen.heard_since_s < RETURN_S)

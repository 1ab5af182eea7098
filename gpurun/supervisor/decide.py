"""What the supervisor of a running gang does next, from what has been seen of it. Pure: no host, no file, no clock.

The order of the checks is the order of trust. A rank's own end says most, then its container's, then the launcher's;
what would end the gang from outside (a request, a limit, a host that is silent) comes last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpurun.jobs.record import CancelRequest, FirstFailure
from gpurun.jobs.spec import Grant
from gpurun.jobs.states import State
from gpurun.launch import output
from gpurun.launch.elastic import host_of
from gpurun.scheduler.drain import may_lose
from gpurun.supervisor.causes import Cause, end_of, explained
from gpurun.supervisor.ends import End
from gpurun.supervisor.ranks import Rank, first_failed, have_succeeded, hosts_without_ranks

HOST_LOST_S = 14.0
"""A host that has been silent for this long, while another one is heard, is lost: its gang is ended."""
SETTLE_S = 1.0
"""A rank has failed: how long the words of other hosts may take to arrive. The first to fail is named then."""
EXPLAIN_S = 5.0
"""Something broke a rank off, or ended a container: how long what did it may take to show itself."""
LINGER_S = 5.0
"""All ranks have ended: how long the launcher may take to end, too."""
LOG_SILENT_S = 10.0
"""The launcher has ended: how long its log may be silent before it is judged as it is."""
SIGTERMED, SIGKILLED = 128 + 15, 128 + 9


@dataclass(frozen=True)
class ContainerEnd:
    """How the job's container on a host ended.

    Attributes:
        seen_s: when that was seen, on the head's monotonic clock.
        code: its exit code, if anybody knows.
        engine_out: the engine's last words, if it does not answer any more and took the container with it.
        ended_ago_s: how long before `seen_s` it ended, by its host's clock.
    """

    seen_s: float
    code: int | None = None
    is_oom: bool = False
    is_removed: bool = False
    engine_out: str = ""
    ended_ago_s: float | None = None

    def failure(self, host: str) -> FirstFailure:
        """That it ended, as the reason for the gang's end."""
        kind = "engine" if self.engine_out else "oom" if self.is_oom else "container"
        return FirstFailure(reason=self._reason, host=host, exit_code=self.code, kind=kind, evidence=self.engine_out)

    @property
    def _reason(self) -> str:
        if self.engine_out:
            return "its Docker engine has stopped, and the job's container with it"
        if self.is_removed:
            return "the job's container was removed by somebody else"
        if self.is_oom:
            return "the job's container ran out of memory and was killed"
        return f"the job's container ended (exit code {self.code})"


@dataclass(frozen=True)
class GangSeen:
    """All that is known of a running gang at one moment. Times are on the head's monotonic clock.

    Attributes:
        members: the hosts on which ranks are to run, one for each GPU; in rank order, the launcher's first.
        least: how many ranks an elastic gang needs; None for any other gang.
        drained: hosts of an elastic gang that a person wants empty.
        exits: containers that have ended, by host.
        down_since: hosts that are out of reach, and since when they were not heard.
        others_answer: whether hosts outside the gang can be reached; None = nobody has asked.
        is_log_complete: all that the launcher and the ranks have printed is on the head.
        last_line_s: when the last of it came.
        limit_s: the time limit, if the gang has run for longer.
        hung: why the gang counts as hung.
    """

    now_s: float
    members: Sequence[Grant]
    least: int | None = None
    drained: Sequence[str] = ()
    ranks: Sequence[Rank] = ()
    exits: Mapping[str, ContainerEnd] = field(default_factory=dict)
    down_since: Mapping[str, float] = field(default_factory=dict)
    others_answer: bool | None = None
    fatal: Cause | None = None
    is_log_complete: bool = False
    last_line_s: float = 0.0
    request: CancelRequest | None = None
    limit_s: float | None = None
    hung: str | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts on which ranks are to run."""
        return tuple(grant.host for grant in self.members)

    @property
    def first(self) -> str:
        """The launcher's host."""
        return self.members[0].host

    @property
    def world(self) -> int:
        """How many ranks there are to be."""
        return sum(len(grant.gpus) for grant in self.members)


@dataclass(frozen=True)
class Lose:
    """The gang goes on without these hosts."""

    failures: Mapping[str, FirstFailure]


@dataclass(frozen=True)
class Release:
    """The gang goes on without these hosts, and none of them is to blame."""

    hosts: Sequence[str]


@dataclass(frozen=True)
class Ask:
    """Whether any other host answers must be known first: no host of the gang does."""


@dataclass(frozen=True)
class Finish:
    """The attempt is over.

    Attributes:
        end: how, but for what is still to be looked at.
        by_launcher: the log decides: `by_launcher`.
        is_explained: nothing that hosts saw can say more (`with_cause`).
    """

    end: End
    by_launcher: bool = False
    is_explained: bool = True


Step = Lose | Release | Ask | Finish | None


def decide(seen: GangSeen) -> Step:
    """What to do now; None = nothing."""
    seen = _of_members(seen)
    if (failures := _losses(seen)) and may_lose(seen.members, failures, seen.least):
        return Lose(failures)
    if seen.drained and may_lose(seen.members, seen.drained, seen.least):
        return Release(seen.drained)
    return (
        _by_ranks(seen) or _by_containers(seen) or _by_launchers_end(seen) or _by_fatal_cause(seen)
        or _by_request(seen) or _by_limit(seen) or _by_silence(seen) or _by_hang(seen)
    )  # fmt: skip


def _of_members(seen: GangSeen) -> GangSeen:
    """Without what was seen of hosts that have left."""
    return replace(
        seen,
        ranks=[rank for rank in seen.ranks if rank.host in seen.hosts],
        exits={host: end for host, end in seen.exits.items() if host in seen.hosts},
        down_since={host: since_s for host, since_s in seen.down_since.items() if host in seen.hosts},
        drained=[host for host in seen.drained if host in seen.hosts],
        fatal=seen.fatal if seen.fatal and seen.fatal.host in seen.hosts else None,
    )


def _losses(seen: GangSeen) -> dict[str, FirstFailure]:
    """Hosts that an elastic gang has lost, with why."""
    if seen.least is None:
        return {}
    why = "its ranks have ended, those of others have not"
    idle = hosts_without_ranks(seen.ranks, seen.now_s)
    failures = {host: FirstFailure(why, host=host, kind="rank") for host in idle}
    failures |= {host: end.failure(host) for host, end in seen.exits.items()}
    if isinstance(lost := _lost_hosts(seen), list):
        failures |= {host: _unreachable(host) for host in lost}
    if seen.fatal is not None and (failure := end_of(seen.fatal).failure):
        failures[seen.fatal.host] = failure
    return failures


def _by_ranks(seen: GangSeen) -> Step:
    """Ranks' own words. Those of an elastic gang come and go, and its driver judges them."""
    if seen.least is not None:
        return None
    succeeded_s = have_succeeded(seen.ranks, seen.world)
    if succeeded_s is not None:
        is_over = seen.first in seen.exits and _is_log_ready(seen, seen.exits[seen.first])
        return Finish(SUCCEEDED) if is_over or seen.now_s - succeeded_s >= LINGER_S else None
    failed = first_failed(seen.ranks)
    if failed is None or failed.ended_s is None:
        return None
    if failed.was_broken_off and seen.exits:
        return None
    settled_s = EXPLAIN_S if failed.is_cut_off or failed.code == SIGTERMED else SETTLE_S
    if seen.now_s - failed.ended_s < settled_s:
        return None
    return Finish(_rank_failed(failed.rank, failed.host, failed.code or 1, ladder=True), is_explained=False)


def _by_containers(seen: GangSeen) -> Step:
    """A worker's container has ended, and that is the cause; the launcher may take a moment to notice and tell."""
    workers = [(end.seen_s, host) for host, end in seen.exits.items() if host != seen.first]
    if not workers or seen.first in seen.exits:
        return None
    since_s, host = min(workers)
    if seen.now_s - since_s < EXPLAIN_S:
        return None
    return Finish(_container_ended(host, seen.exits[host]), is_explained=False)


def _by_launchers_end(seen: GangSeen) -> Step:
    launcher = seen.exits.get(seen.first)
    if launcher is None or not _is_log_ready(seen, launcher):
        return None
    workers = [(end.seen_s, host) for host, end in seen.exits.items() if host != seen.first]
    failed = first_failed(seen.ranks)
    if workers and min(workers)[0] < launcher.seen_s and (failed is None or failed.was_broken_off):
        host = min(workers)[1]
        return Finish(_container_ended(host, seen.exits[host]), is_explained=False)
    return Finish(End(State.FAILED, "", 1), by_launcher=True, is_explained=False)


def _is_log_ready(seen: GangSeen, launcher: ContainerEnd) -> bool:
    """Whether all of the log is here, or no more of it can come."""
    silent_s = seen.now_s - max(seen.last_line_s, launcher.seen_s)
    return bool(launcher.engine_out) or seen.is_log_complete or silent_s >= LOG_SILENT_S


def _by_fatal_cause(seen: GangSeen) -> Step:
    return Finish(end_of(seen.fatal)) if seen.fatal is not None else None


def _by_request(seen: GangSeen) -> Step:
    return Finish(asked_end(seen.request, ladder=True)) if seen.request is not None else None


def asked_end(request: CancelRequest, *, ladder: bool) -> End:
    """The end that somebody asked for."""
    outcome = State.CANCELLED if request.kind == "cancel" else State.QUEUED
    return End(outcome, request.outcome, 1, ladder=ladder)


def _by_limit(seen: GangSeen) -> Step:
    if seen.limit_s is None:
        return None
    return Finish(End(State.TIMED_OUT, f"ran longer than its time limit of {seen.limit_s:g} s", 1, ladder=True))


def _by_silence(seen: GangSeen) -> Step:
    lost = _lost_hosts(seen)
    if not isinstance(lost, list):
        return lost
    if not lost:
        return None
    reason = f"{', '.join(lost)} cannot be reached any more"
    failure = _unreachable(lost[0])
    return Finish(End(State.FAILED, reason, 4, failure=failure, ladder=True, suspects=tuple(lost)))


def _lost_hosts(seen: GangSeen) -> list[str] | Ask:
    """Hosts that have been silent for too long; none while no host at all answers: then the head is cut off."""
    lost = sorted(host for host, since_s in seen.down_since.items() if seen.now_s - since_s > HOST_LOST_S)
    if lost and len(seen.down_since) == len(seen.hosts):
        if seen.others_answer is None:
            return Ask()
        return lost if seen.others_answer else []
    return lost


def _unreachable(host: str) -> FirstFailure:
    return FirstFailure(reason="the host cannot be reached", host=host, kind="host-lost")


def _by_hang(seen: GangSeen) -> Step:
    if seen.hung is None or seen.down_since:
        return None
    failure = FirstFailure(seen.hung, kind="hang")
    end = End(State.FAILED, f"the gang hangs: {seen.hung}", 1, failure=failure, ladder=True)
    return Finish(end, is_explained=False)


SUCCEEDED = End(State.SUCCEEDED, "", 0, exit_code=0)


def by_launcher(seen: GangSeen, lines: Sequence[output.Line], image: str, place: Sequence[str]) -> End:
    """How an attempt ended whose launcher has ended: by its ranks' words, then by the launcher's.

    Args:
        lines: the last lines of the log.
        image: the job's image, for the case that it lacks the launcher.
        place: the host of each rank, for a gang whose ranks stay where they are.
    """
    launcher = seen.exits[seen.first]
    failed = first_failed(seen.ranks) if seen.least is None else None
    is_unproven = any(rank.code is None and rank.host not in seen.down_since for rank in seen.ranks)
    if launcher.code == 0 and failed is None and (seen.least is not None or not is_unproven):
        return SUCCEEDED
    return replace(_failed_by_launcher(seen, failed, lines, image, place), ladder=is_unproven)


def _failed_by_launcher(
    seen: GangSeen, failed: Rank | None, lines: Sequence[output.Line], image: str, place: Sequence[str]
) -> End:
    launcher, named = seen.exits[seen.first], output.first_failure(lines)
    if failed is not None and not failed.was_broken_off:
        return _rank_failed(failed.rank, failed.host, failed.code or 1)
    # A launcher that SIGKILL ended before it could say why was killed from outside, as one whose container is gone.
    was_killed = launcher.is_removed or launcher.engine_out or launcher.is_oom
    if was_killed or (named is None and launcher.code in (0, SIGKILLED)):
        failure = replace(launcher.failure(seen.first), excerpt=output.excerpt(lines, None))
        why = f"{seen.first}: {failure.reason}"
        return End(State.FAILED, why, 4, exit_code=launcher.code, failure=failure, suspects=(seen.first,))
    if named is not None:
        at = named.rank or 0
        host = host_of(named.host) if named.host is not None else place[at] if at < len(place) else seen.first
        return _rank_failed(named.rank, host, named.exit_code)
    if failed is not None:
        return _rank_failed(failed.rank, failed.host, failed.code or 1)
    return _launcher_failed(int(launcher.code or 1), output.excerpt(lines, None), image)


def _rank_failed(rank: int | None, host: str, code: int, *, ladder: bool = False) -> End:
    who = "a rank" if rank is None else f"rank {rank}"
    why = f"{who} on {host} failed first, with exit code {code}"
    failure = FirstFailure(reason=why, rank=rank, host=host, exit_code=code, kind="rank")
    return End(State.FAILED, why, 1, exit_code=code, failure=failure, ladder=ladder)


def with_last_words(end: End, lines: Sequence[output.Line]) -> End:
    """The end, with the last lines of the rank that failed first."""
    if end.failure is None or end.failure.kind != "rank" or end.failure.excerpt:
        return end
    return replace(end, failure=replace(end.failure, excerpt=output.excerpt(lines, end.failure.rank)))


def _container_ended(host: str, found: ContainerEnd) -> End:
    failure = found.failure(host)
    reason = f"{host}: {failure.reason}"
    return End(State.FAILED, reason, 4, exit_code=found.code, failure=failure, ladder=True, suspects=(host,))


def _launcher_failed(code: int, excerpt: tuple[str, ...], image: str) -> End:
    said = " ".join(excerpt)
    if code == 127 and "horovodrun" in said and "not found" in said:
        reason = f"the image {image} has no horovodrun; see recipes/images"
        return End(
            State.FAILED, reason, 2, exit_code=code, failure=FirstFailure(reason, excerpt=excerpt, kind="launcher")
        )
    reason = f"horovodrun failed with exit code {code}: {excerpt[-1] if excerpt else 'it printed nothing'}"
    failure = FirstFailure(reason, exit_code=code, excerpt=excerpt, kind="launcher")
    return End(State.FAILED, reason, 1, exit_code=code, failure=failure)


def with_cause(end: End, cause: Cause | None, stopped: Sequence[Cause]) -> End:
    """The end of a failed attempt, with what began it if a host saw that.

    Args:
        cause: the first that hosts' hardware and kernels tell of.
        stopped: engines that were stopped, and hosts that are gone.
    """
    if end.outcome is not State.FAILED:
        return end
    if cause is not None and (cause.blame == "hardware" or cause.kind in ("oom", "disk-full")):
        return explained(end, cause)
    if not stopped:
        return explained(end, cause)
    end = explained(end, stopped[0])
    return replace(end, suspects=tuple(sorted({*end.suspects, *(each.host for each in stopped)})))

"""Decide the supervisor's next step for a running gang, from what it has seen. Pure: no host, no file, no clock.

The order of the checks is the order of reliability: a rank's own end first, then its container's, then the launcher's.
Reasons from outside (a request, a limit, a silent host) come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpurun.jobs.record import FirstFailure
from gpurun.jobs.states import State
from gpurun.quantities.times import duration
from gpurun.scheduler.drain import may_lose
from gpurun.supervisor.causes import end_of
from gpurun.supervisor.ends import End
from gpurun.supervisor.gang_seen import ContainerEnd, GangSeen
from gpurun.supervisor.ranks import (
    TOGETHER_S,
    Rank,
    first_failed,
    have_succeeded,
    hosts_that_are_done,
    hosts_without_ranks,
    newest,
)
from gpurun.supervisor.verdicts import (
    SIGTERMED,
    SUCCEEDED,
    asked_end,
    container_ended,
    host_lost,
    rank_failed,
    unreachable,
)

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
        or _by_request(seen) or _by_limit(seen) or _by_silence(seen) or _by_hang(seen)
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
    """Decide by hang detection. A gang that is ending, or that the head could not hear, does not hang."""
    has_failed = seen.least is None and first_failed(seen.ranks) is not None
    if seen.hung is None or seen.down_since or seen.exits or has_failed or seen.now_s - seen.heard_since_s < RETURN_S:
        return None
    done = sorted(rank.rank for rank in seen.ranks if rank.code == 0 and seen.least is None)
    left = f"; {len(done)} of {seen.world} ranks have already returned 0, including rank {done[0]}" if done else ""
    failure = FirstFailure(f"{seen.hung}{left}", kind="hang")
    end = End(State.FAILED, f"the job hangs: {failure.reason}", 1, failure=failure, ladder=True)
    return Finish(end, is_explained=False)

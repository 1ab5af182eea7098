"""Decide what follows an attempt whose containers did not run: another placement, or the job's end. Pure.

Nothing that goes wrong with a host ends a job before its gang runs, and no restart is counted. If a check that depends
on no job finds the host broken, the host is out, and the failure says nothing about the job. If the check finds nothing
wrong, the job avoids the host for a while. The failure is the job's if three such hosts failed in the same way, or
every host that could hold the gang, and if it lasts: what is over after a minute ends no job. Some causes are certain
at once. Only a few kinds of failures can be the job's; it waits until any other is over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpurun.errors import HostFailure, NoRoom
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import FirstFailure, JobRecord, Restart, StartFailure
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.scheduler.index import serves
from gpurun.supervisor.ends import End

Looks = Mapping[str, object | None]
"""Host that was checked → why it is out (`gpurun.state.machines.Out`); None = nothing is wrong with it."""

BEFORE_RUNNING = frozenset({State.QUEUED, State.GRANTED, State.PREPARING, State.STARTING})
ENOUGH_HOSTS = 3
"""If so many sound hosts fail in the same way, the job is at fault."""
ENOUGH_TIMES = 2
"""If fewer hosts could hold the gang, all of them fail in the same way, in all at least so often."""
LASTS_S = 60.0
"""So long after the first failure the same cause still fails attempts: it does not pass by itself."""
FREE_PLACEMENTS = 3
"""So many placements on hosts that are new to the job follow each other at once; later ones after a pause."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
FLAPPING_S = 120.0
FLAPPING_PAUSE_S = 60.0
"""If a host was out, returned and fails again within `FLAPPING_S`, the pauses double from 5 s to this."""
FIRST_AVOID_S = 60.0
LONGEST_AVOID_S = 600.0
FORGET_S = 6 * 3600.0
MOST_FAILURES = 64
MOST_WORDS = 200

MAY_BE_THE_JOBS = frozenset({"architecture", "no-command", "no-mount", "docker", "load-failed", "not-verified"})
"""Kinds of failures that a job can bring about. Any other is a host's, the site's or the head's: the job waits."""
CERTAIN = frozenset({"architecture", "no-command", "no-mount"})
"""Kinds of failures that do not pass by themselves: they need not last. Each host says what it, or the image, lacks."""
SAID_BY_KIND = frozenset({"architecture", "no-command"})
"""Kinds of failures that are the same whatever the host's words are."""

_JOB = re.compile(r"\bj-[0-9a-f]{8}\b")
_PATH = re.compile(r"(?<![\w/])~?/[^\s'\":,;()]*")
_DIGEST = re.compile(r"\b[0-9a-f]{7,}\b")
_ADDRESS = re.compile(r"\b[0-9a-f]*(?::[0-9a-f]*){2,}")
_QUOTED = re.compile(r"\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)|`[^`]*`")
_TIME = re.compile(r"\b\d{4}[-/]\d\d[-/]\d\d(?:[t ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?\s?(?:z|utc|[+-]\d\d:?\d\d)?)?(?!\w)")
_DURATION = re.compile(r"\b(?:\d+(?:\.\d+)?(?:h|m|s|ms|us|µs|ns))+\b")
_NUMBER = re.compile(r"\d[\d.]*(?:\s*(?:[kmgtp]i?)?b(?:ytes?)?\b)?")
NORMAL = (
    (_JOB, "JOB"), (_QUOTED, "QUOTED"), (_PATH, "PATH"), (_TIME, "TIME"), (_DIGEST, "DIGEST"), (_ADDRESS, "ADDRESS"),
    (_DURATION, "N"), (_NUMBER, "N"),
)  # fmt: skip


@dataclass(frozen=True)
class Next:
    """What follows.

    Attributes:
        end: the end of the attempt.
        failures, placements: for the job's record.
    """

    end: End
    failures: tuple[StartFailure, ...]
    placements: int


def is_unstarted(state: State, end: End) -> bool:
    """Return whether an attempt ended by failures of hosts, or of the head, before its gang ran."""
    return state in BEFORE_RUNNING and end.outcome is State.FAILED and bool(end.by_host)


def after(
    record: JobRecord, end: End, looks: Looks, able: Collection[str], *, hosts: Collection[str],
    now_s: float,
) -> Next:  # fmt: skip
    """Return what follows an attempt for which `is_unstarted` is true.

    Args:
        looks: the checks of the failed hosts.
        able: the hosts that could hold the gang now, or a part of it.
        hosts: names that may occur in the failures: the gang's hosts.
        now_s: the head's clock, seconds since the epoch.
    """
    before = {each.host: each for each in record.start_failures if abs(now_s - each.at_s) < FORGET_S}
    new = [
        _failure(record.attempt, host, error, looks, before.get(host), hosts=hosts, now_s=now_s)
        for host, error in sorted(end.by_host.items())
        if host
    ]
    known = {**before, **{each.host: each for each in new}}
    failures = tuple(sorted(known.values(), key=lambda each: (each.at_s, each.host))[-MOST_FAILURES:])
    placements = record.placements + 1
    for each in new:
        alike = [other for other in failures if _counts(other) and is_same(each, other)]
        if _counts(each) and _is_the_jobs(alike, able):
            return Next(_the_jobs(end, each, alike), failures, placements)
    pause_s = _pause_s(new, before, looks, placements, now_s)
    again = Restart(now_s + pause_s, attempt=0, of=None) if pause_s else None
    reason = end.reason if again else f"{end.reason}; gpurun looks for other hosts"
    return Next(replace(end, outcome=State.QUEUED, reason=reason, suspects=(), restart=again), failures, placements)


def _failure(
    attempt: int, host: str, error: HostFailure, looks: Looks, before: StartFailure | None, *,
    hosts: Collection[str], now_s: float,
) -> StartFailure:  # fmt: skip
    is_out = looks.get(host) is not None
    words, reason = normalised(error.message, {host, *hosts}), " ".join(error.message.split())[:MOST_WORDS]
    found = StartFailure(
        host, attempt, error.kind, words, reason, now_s, now_s,
        is_sound=host in looks and not is_out, lacks_mib=error.lacks_mib if isinstance(error, NoRoom) else 0,
    )  # fmt: skip
    times, first_s = 1, now_s
    if before is not None and is_same(before, found):
        times = before.times + 1
        first_s = before.since_s if before.is_sound and found.is_sound else now_s
    avoid_s = 0.0 if is_out else min(FIRST_AVOID_S * 2.0 ** min(times - 1, 30), LONGEST_AVOID_S)
    return replace(found, times=times, until_s=now_s + avoid_s, first_s=first_s)


def is_same(one: StartFailure, other: StartFailure) -> bool:
    """Return whether two failures have the same cause."""
    return one.kind == other.kind and (one.kind in SAID_BY_KIND or one.words == other.words)


def normalised(message: str, hosts: Collection[str]) -> str:
    """Return a message without what differs between hosts and attempts: names of hosts and jobs, quoted text, paths,
    times, durations, digests, addresses, numbers with their units.
    """
    text = message[: 10 * MOST_WORDS].lower()
    for host in sorted(hosts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(host.lower())}(?![\w-])", "HOST", text)
    for pattern, name in NORMAL:
        text = pattern.sub(name, text)
    return " ".join(text.split())[:MOST_WORDS]


def _counts(failure: StartFailure) -> bool:
    return failure.is_sound and failure.kind in MAY_BE_THE_JOBS


def _is_the_jobs(alike: Sequence[StartFailure], able: Collection[str]) -> bool:
    hosts, times = {each.host for each in alike}, sum(each.times for each in alike)
    kind = alike[0].kind
    is_everywhere = bool(able) and hosts.issuperset(able) and times >= ENOUGH_TIMES
    if kind == "no-command":  # the launcher's host starts last: while others fail, it never says it
        is_everywhere |= bool(able) and times >= ENOUGH_HOSTS
    lasts = max(each.at_s for each in alike) - min(each.since_s for each in alike) >= LASTS_S
    return (len(hosts) >= ENOUGH_HOSTS or is_everywhere) and (lasts or kind in CERTAIN)


def _the_jobs(end: End, failure: StartFailure, alike: Sequence[StartFailure]) -> End:
    error = end.by_host[failure.host]
    names = sorted(each.host for each in alike)
    named = ", ".join(names[:ENOUGH_HOSTS]) + (f" and {len(names) - ENOUGH_HOSTS} more" if len(names) > 3 else "")
    hint = f" ({error.hint})" if error.hint else ""
    reason = (
        f"{named}: {error.message}{hint}; a check finds no fault on {'these hosts' if len(names) > 1 else 'this host'}"
    )
    first = FirstFailure(reason=error.message, host=failure.host, kind="")
    return replace(end, reason=reason, code=error.exit_code, failure=first, suspects=())


def _pause_s(
    new: Sequence[StartFailure], before: Mapping[str, StartFailure], looks: Looks, placements: int,
    now_s: float,
) -> float:  # fmt: skip
    """Return the wait before the next placement; 0 = none.

    The scheduler keeps all jobs off hosts that are out. Other hosts may fail again: the waits double, so a job that
    can start nowhere is placed every five minutes.
    """
    if new and all(looks.get(each.host) is not None for each in new):
        again = [each.times for each in new if each.host in before and now_s - before[each.host].at_s < FLAPPING_S]
        return min(FIRST_PAUSE_S * 2.0 ** min(max(again) - 1, 30), FLAPPING_PAUSE_S) if again else 0.0
    is_new = bool(new) and all(each.host not in before for each in new)
    if is_new and placements <= FREE_PLACEMENTS:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** min(max(placements - 2, 0), 30), LONGEST_PAUSE_S)


def able_hosts(inventory: Inventory, spec: JobSpec, unusable: Collection[str]) -> frozenset[str]:
    """Return the hosts that could hold a gang now, or a part of it, whatever runs there."""
    asked = spec.constraints
    least = asked.gpus_per_host or (spec.min_gpus or spec.gpus if asked.locality == "host" else 1)
    return frozenset(
        host.name
        for host in inventory.hosts
        if host.name not in unusable
        and host.name not in asked.avoid
        and (not asked.hosts or host.name in asked.hosts)
        and host.gpus >= least
        and serves((host.generation, host.gpu_model, host.gpu_memory_mib), asked)
    )

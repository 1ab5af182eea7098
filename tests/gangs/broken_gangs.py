"""Builds that are broken on purpose: each changes one thing. The histories must notice.

This world has one gang, and another supervisor always follows one that was killed. So it shows what is decided, the
ladder, outputs and the fence. `tests/ownership` has several gangs, users and heads with real leases and claims. It
shows a claim that is not checked, a grant that is not counted, and an adopter that is missing (`broken_builds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import gang_links
import gang_stop
from gang_run import replaced

from gpurun.jobs.record import Restart, State
from gpurun.supervisor import life, stop, watch
from gpurun.supervisor.verdict import decide, ends
from gpurun.supervisor.verdict.decide import SUCCEEDED, by_launcher
from gpurun.supervisor.verdict.ends import failed

TOLD, BY_LAUNCHER = ends.rank_in_event, by_launcher
PROGRAMS_END, JUDGED_RETRY = ends.programs_end, ends.judged_retry
SEEN, COLLECT, LOST_HOSTS = watch._Watch._seen, stop.collect_outputs, decide.lost_hosts


def _decides_again(job: Any, error: Any, pause_s: float) -> float:
    job.record = job.world.record = job.record.but(state=State.RUNNING)  # no record goes this way by itself
    life._stopping(job, failed(error).end)
    return pause_s


def _believes_0(seen: Any, *arguments: Any) -> Any:
    return SUCCEEDED if seen.exits[seen.first].code == 0 else BY_LAUNCHER(seen, *arguments)


def _told_as_it_arrives(known: Any, host: str, event: Any, now_s: float) -> Any:
    return TOLD(known, host, {**event, "age_s": 0.0}, now_s)


def _collect_once(job: Any) -> set[str]:
    COLLECT(job)
    return set()


def _abandon_nothing(leases: Any, lock: object, *_: object) -> None:
    leases.release(lock)


def _lost_before_the_head_was_back(seen: Any) -> Any:
    """Silence counts from before the head was cut off."""
    return LOST_HOSTS(replace(seen, cut_off_s=-math.inf, heard_since_s=0.0))


def _without_drains(watched: Any) -> Any:
    seen = SEEN(watched)
    asked = None if seen.request is None or seen.request.drain else seen.request
    return replace(seen, drained=(), request=asked)


def _of_any_end(end: Any, *, has_run: bool) -> str | None:
    return "failure" if end.outcome is State.FAILED else PROGRAMS_END(end, has_run=has_run)


def _counts_none(record: Any, *arguments: Any, **more: Any) -> Any:
    return JUDGED_RETRY(record.but(retries=0), *arguments, **more)


BUILDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "an end is decided twice": lambda: replaced(life, _try_again=_decides_again),
    "the launcher's 0 is believed": lambda: replaced(watch, by_launcher=_believes_0),
    "ranks' ends are ignored": lambda: replaced(decide, _by_ranks=lambda _: None),
    "the first report to arrive is blamed": lambda: replaced(ends, rank_in_event=_told_as_it_arrives),
    "a rank that was broken off is blamed": lambda: replaced(
        ends.Rank, was_broken_off=property(lambda _: False)
    ),
    "a silent host is never lost": lambda: replaced(decide, HOST_LOST_S=1e12),
    "the head's own cut counts as lost hosts": lambda: replaced(watch, _others_answer=lambda _: True),
    "a cancel is not seen": lambda: replaced(decide, _by_request=lambda _: None),
    "a drain is ignored": lambda: replaced(watch._Watch, _seen=_without_drains),
    "outputs are forgotten": lambda: replaced(stop, collect_outputs=lambda _: set()),
    "a copy that breaks off is not tried again": lambda: replaced(stop, collect_outputs=_collect_once),
    "a fence is skipped": lambda: replaced(stop, fence=lambda *_, **__: {}),
    "a host that gives no proof is free": lambda: replaced(gang_stop.Leases, abandon=_abandon_nothing),
    "a slow host is taken for a mute one": lambda: replaced(gang_links.Links, accepts=lambda *_: None),
    "nobody is watched before a mute host answers": lambda: replaced(watch, CONNECT_S=math.inf),
    "a mute host is waited for as one that was heard": lambda: replaced(decide, MUTE_S=1e12),
    "a mute host is lost at once": lambda: replaced(decide, MUTE_S=2.0),
    "hosts have no time to be reached again": lambda: replaced(decide, lost_hosts=_lost_before_the_head_was_back),
    "an elastic driver that hangs is waited for": lambda: replaced(decide, FORSAKEN_S=1e12),
    "a retry is left undecided": lambda: replaced(stop, _judge_retry=lambda _: None),
    "a retry asks for no progress": lambda: replaced(ends, _why_futile=lambda *_: ""),
    "a host's fault counts as a retry": lambda: replaced(ends, programs_end=_of_any_end),
    "no retry is counted": lambda: replaced(stop, judged_retry=_counts_none),
    "a retry does not wait": lambda: replaced(Restart, is_due=lambda *_: True),
    "a success waits and forgets": lambda: replaced(decide, _all_succeeded_s=lambda _: None),
}  # fmt: skip
"""What is broken → a context in which it is."""

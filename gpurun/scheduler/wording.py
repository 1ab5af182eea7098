"""An explanation in words: the lines of `gpurun why`, one screen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gpurun.quantities.counts import count
from gpurun.quantities.times import duration
from gpurun.scheduler.explain import Explanation, Occupant
from gpurun.scheduler.model import HostGroup

MOST = 6
"""Lines of one kind; the rest is counted."""

Entry = TypeVar("Entry")

Fold = Callable[[Iterable[str]], str]
"""Host names to one short word, such as ``gpu-r1-[01-16]``."""


def lines(explanation: Explanation, *, now_s: float, fold: Fold, named: Callable[[str], str] = str) -> list[str]:
    """The explanation as lines of text without colours.

    Args:
        now_s: the time of the snapshot; expected starts are given as seconds from it.
        fold: how host names are shortened.
        named: a gang's id to what people call it.
    """
    text = [f"{explanation.gang} {_state(explanation)}"]
    if explanation.placement is not None:
        text.append(f"  on {fold(explanation.placement.hosts)} ({', '.join(explanation.placement.racks)})")
    if explanation.state not in ("waits", "never"):
        return text
    if explanation.position is not None:
        text.append(f"  place in the queue: {explanation.position}{_ahead(explanation.ahead, named)}")
    text += _pool(explanation)
    text += _section("hosts", explanation.groups, lambda group: _group(group, fold))
    text += _section(
        "GPUs that the job could use are held by", explanation.holders,
        lambda holder: f"{named(holder.gang)}: {_holder(holder, now_s)}",
    )  # fmt: skip
    if explanation.state == "waits":
        text.append(f"  expected start: {_expected(explanation, now_s)}")
        changes = _section("the job would start now with", explanation.changes, lambda change: change.text)
        text += changes or ["  no single change would start the job now"]
    return text


def _state(explanation: Explanation) -> str:
    if explanation.state in ("runs", "starts"):  # the message is a verb, too
        return explanation.message or explanation.state
    state = {"never": "can never start", "unknown": "is unknown"}.get(explanation.state, explanation.state)
    return f"{state}: {explanation.message}" if explanation.message else state


def _section(title: str, entries: Sequence[Entry], in_words: Callable[[Entry], str]) -> list[str]:
    if not entries:
        return []
    more = [f"    … and {len(entries) - MOST} more"] if len(entries) > MOST else []
    return [f"  {title}:", *(f"    {in_words(entry)}" for entry in entries[:MOST]), *more]


def _ahead(ahead: Sequence[str], named: Callable[[str], str]) -> str:
    if not ahead:
        return ""
    more = f" and {len(ahead) - MOST} more" if len(ahead) > MOST else ""
    return f", behind {', '.join(map(named, ahead[:MOST]))}{more}"


def _pool(explanation: Explanation) -> list[str]:
    pool = explanation.pool
    if pool is None:
        return []
    limit = "none" if pool.limit is None else f"{pool.limit}"
    entitled = "" if pool.entitlement is None else f", entitled to {pool.entitlement:.0f} now"
    used = f"uses {count(pool.used, 'GPU')}{entitled}"
    return [f"  pool {pool.name}: {used}, reservation {pool.reservation}, limit {limit}"]


def _group(group: HostGroup, fold: Fold) -> str:
    room = ""
    if group.free:
        room = f"; {group.free} of {group.gpus} free, at most {group.largest_host} on a host"
        room += f" and {group.largest_rack} in a rack"
    return f"{fold(group.hosts)}: {group.why}{room}"


def _holder(holder: Occupant, now_s: float) -> str:
    where = f"{count(holder.gpus, 'GPU')} on {count(holder.hosts, 'host')}"
    if holder.stopping:
        return f"{where}, is stopping"
    if holder.free_s is None:
        return f"{where}, has no time limit"
    if holder.preparing:
        return f"{where}, prepares; its time limit does not count yet"
    if holder.free_s <= now_s:
        return f"{where}, should have ended by its time limit"
    return f"{where}, free {in_time(holder.free_s, now_s)} if the job uses its whole time limit"


def _expected(explanation: Explanation, now_s: float) -> str:
    at_s = explanation.expected_start_s
    if at_s is None:
        return f"unknown: {explanation.unknown_because}"
    if at_s <= now_s:
        return "soon: the jobs in the way should have ended by now"
    before = [holder for holder in explanation.holders if holder.free_s is not None and holder.free_s <= at_s]
    if not before:  # time alone brings the start: it waits no longer for one rack, or gangs may be preempted for it
        return in_time(at_s, now_s)
    only_stop = all(holder.stopping for holder in before)
    ends = "when the stopping jobs have ended" if only_stop else "if running jobs use their whole time limits"
    return f"{in_time(at_s, now_s)} {ends}"


def expected_in(at_s: float, now_s: float) -> str:
    """When a job is expected to start, for people: ``in 12s``; ``soon`` if it should have started already."""
    return "soon" if at_s <= now_s else in_time(at_s, now_s)


def in_time(at_s: float, now_s: float) -> str:
    """A time to come, for people: ``in 12s`` or ``in 1h05m``."""
    return f"in {duration(max(1, round(at_s - now_s)))}"

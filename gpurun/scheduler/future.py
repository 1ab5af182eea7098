"""Compute when GPUs become free, and when a gang that does not fit now will fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpurun.scheduler.capacity import Try
from gpurun.scheduler.index import Index, Masks
from gpurun.scheduler.model import Decisions, Gang, Kept, Placement, Running, Snapshot


def carried_out(snapshot: Snapshot, decisions: Decisions) -> Snapshot:
    """Return the snapshot after the decisions. A stopped gang is not in the queue again."""
    started = {gang.id for gang, _ in decisions.starts}
    stopped = {preemption.victim for preemption in decisions.preempts}
    running = [
        replace(run, stopping=True, told_s=snapshot.now_s) if run.gang.id in stopped and not run.stopping else run
        for run in snapshot.running
    ]
    running += [Running(gang, placement, snapshot.now_s) for gang, placement in decisions.starts]
    queue = tuple(_with_kept(gang, decisions.kept.get(gang.id)) for gang in snapshot.queue if gang.id not in started)
    return replace(snapshot, running=tuple(running), queue=queue)


def _with_kept(gang: Gang, kept: Kept | None) -> Gang:
    return gang if gang.kept == kept else gang.but(kept=kept)


@dataclass(frozen=True)
class Release:
    """GPUs that become free at a time: an end by time limit, or a guess. `gang` breaks ties."""

    at_s: float
    gang: str
    masks: Masks


def first_fit(index: Index, gang: Gang, releases: Sequence[Release], attempt: Try) -> tuple[float, Placement] | None:
    """Return the earliest release after which the gang fits, and its placement; None if there is none.

    Leaves the index as it was. A gang that fits after some releases fits after more, so the search is binary.
    """
    ordered = sorted(releases, key=lambda release: (release.at_s, release.gang))
    if index.total_free + sum(mask.bit_count() for r in ordered for _, mask in r.masks) < gang.gpus:
        return None
    given: list[Masks] = []

    def after(number: int) -> Placement | None:
        while len(given) < number:
            masks = [(n, mask & ~index.free[n]) for n, mask in ordered[len(given)].masks]
            index.give(masks)
            given.append(masks)
        while len(given) > number:
            index.take(given.pop())
        return attempt(index, gang)

    low, high = 1, len(ordered)
    best = after(high) if ordered else None
    if best is not None:
        while low < high:
            middle = (low + high) // 2
            found = after(middle)
            low, high, best = (low, middle, found) if found is not None else (middle + 1, high, best)
    while given:
        index.take(given.pop())
    return None if best is None else (ordered[low - 1].at_s, best)

"""The figures of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from gpurun.simulate.replay import Outcome, Replay


@dataclass(frozen=True)
class Report:
    """What `gpurun simulate TRACE.csv --json` prints; times in seconds.

    Attributes:
        jobs: how many ended.
        avg_jct_s: mean time from submission to end.
        avg_wait_s: mean time from submission to end in which a job held no GPU.
        p50_wait_s, p99_wait_s: percentiles, linear between neighbours.
        makespan_s: first submission to last end.
        gpu_utilization: share of all GPU-seconds of the makespan that jobs held.
        idle_while_pending: share of all GPU-seconds of the makespan that were idle while some job waited.
        multi_host_jobs, multi_rack_jobs: jobs that were at some time spread over several.
        elapsed_s: what the replay itself took.
    """

    jobs: int
    avg_jct_s: float
    avg_wait_s: float
    p50_wait_s: float
    p99_wait_s: float
    makespan_s: float
    gpu_utilization: float
    idle_while_pending: float
    multi_host_jobs: int
    multi_rack_jobs: int
    preemptions: int
    elapsed_s: float


def report(done: Replay, elapsed_s: float) -> Report:
    """The figures of a finished replay."""
    outcomes = done.outcomes
    waits = sorted(outcome.wait_s for outcome in outcomes)
    first = min(outcome.job.submitted_s for outcome in outcomes)
    last = max(outcome.ended_s for outcome in outcomes)
    whole = done.inventory.total_gpus * (last - first) or 1.0
    held = sum(span.placement.gpus * (span.end_s - span.start_s) for outcome in outcomes for span in outcome.spans)
    return Report(
        jobs=len(outcomes),
        avg_jct_s=sum(outcome.ended_s - outcome.job.submitted_s for outcome in outcomes) / len(outcomes),
        avg_wait_s=sum(waits) / len(waits),
        p50_wait_s=percentile(waits, 0.5),
        p99_wait_s=percentile(waits, 0.99),
        makespan_s=last - first,
        gpu_utilization=held / whole,
        idle_while_pending=_idle_while_pending(done) / whole,
        multi_host_jobs=sum(_spread(outcome, "hosts") for outcome in outcomes),
        multi_rack_jobs=sum(_spread(outcome, "racks") for outcome in outcomes),
        preemptions=done.preemptions,
        elapsed_s=elapsed_s,
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """A percentile of ascending values, linear between neighbours."""
    at = part * (len(ordered) - 1)
    low = floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean_wait(outcomes: Sequence[Outcome], *, more_than_gpus: int = 0) -> float:
    """Return the mean wait of the jobs above a size, in seconds; 0 if there are none."""
    waits = [outcome.wait_s for outcome in outcomes if outcome.job.gpus > more_than_gpus]
    return sum(waits) / len(waits) if waits else 0.0


def _idle_while_pending(done: Replay) -> float:
    pairs = zip(done.samples, done.samples[1:], strict=False)
    return sum(now.free * (then.at_s - now.at_s) for now, then in pairs if now.queued)


def _spread(outcome: Outcome, over: str) -> bool:
    return any(len(getattr(span.placement, over)) > 1 for span in outcome.spans)

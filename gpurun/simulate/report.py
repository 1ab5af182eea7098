"""The figures of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import floor
from pathlib import Path

from gpurun.drawing import Chart, Drawing, Labelled, Numbers
from gpurun.errors import BadInput
from gpurun.quantities import count
from gpurun.simulate.replay import ClusterSample, Outcome, Replay


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


def report_replay(done: Replay, elapsed_s: float) -> Report:
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


# A replay as a picture: GPUs in use, queue length and fragmentation over time.


WIDTH, PANEL, LEFT, TOP, GAP = 960, 150, 70, 40, 42
COLUMNS = 600
"""Samples are averaged into at most this many columns."""

DAY_S = 86400.0


@dataclass(frozen=True)
class Panel:
    """One curve. `values` are means per column, `most` the top of the axis."""

    title: str
    values: Sequence[float]
    most: float
    colour: str


def write_plot(done: Replay, path: Path) -> None:
    """Draw a replay into ``.svg``, or ``.png`` where matplotlib is installed.

    Raises:
        BadInput: another suffix, matplotlib missing, or a file that cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise BadInput(f"--plot {str(path)!r} must end in .svg or .png")
    try:
        if suffix == ".svg":
            path.write_text(svg(done), encoding="utf-8")
        else:
            _png(done, path)
    except OSError as error:
        raise BadInput(f"cannot write the plot: {error.strerror}", where=str(path)) from error


def panels(done: Replay) -> tuple[Panel, ...]:
    """The three curves of a replay."""
    total = done.inventory.total_gpus
    used = _columns(done.samples, lambda sample: sample.used)
    queued = _columns(done.samples, lambda sample: sample.queued)
    loose = _columns(done.samples, lambda s: 100 * (s.free - s.free_whole) / total if total else 0.0)
    return (
        Panel(f"GPUs in use, of {total}", used, float(total), "#2f6fb0"),
        Panel("jobs that wait", queued, max([1.0, *queued]), "#c05a2b"),
        Panel("fragmentation: free GPUs on part-used hosts, % of all GPUs", loose, max([1.0, *loose]), "#3f8f4f"),
    )


def svg(done: Replay) -> str:
    """The picture as an SVG document."""
    span_s = _span(done.samples)
    height = TOP + 3 * (PANEL + GAP) + 10
    sheet = Drawing(WIDTH, height, _title(done))
    times = Labelled([(part, _time(span_s * part / DAY_S)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)])
    for number, panel in enumerate(panels(done)):
        box = (LEFT, TOP + number * (PANEL + GAP) + 14, WIDTH - LEFT - 30, PANEL)
        Chart(sheet, box, times, Numbers(0.0, panel.most), ("", panel.title)).columns(panel.values, panel.colour)
    return sheet.svg()


def _png(done: Replay, path: Path) -> None:
    try:
        drawing = import_module("matplotlib.figure")  # optional, and slow to import
    except ImportError as error:
        raise BadInput(
            "a .png plot needs matplotlib, which is not installed",
            hint="run `pip install matplotlib`, or write a .svg file",
        ) from error
    figure = drawing.Figure(figsize=(WIDTH / 100, 6.4), layout="constrained")
    figure.suptitle(_title(done))
    days = _span(done.samples) / DAY_S
    for axes, panel in zip(figure.subplots(3, 1, sharex=True), panels(done), strict=True):
        ticks = [days * number / max(1, len(panel.values)) for number in range(len(panel.values))]
        axes.fill_between(ticks, panel.values, step="post", color=panel.colour, alpha=0.4)
        axes.set_ylim(0, panel.most)
        axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_xlabel("days")
    figure.savefig(path, dpi=100)


def _title(done: Replay) -> str:
    hosts = len(done.inventory.hosts)
    return (
        f"{count(len(done.outcomes), 'job')} on {count(hosts, 'host')} with {count(done.inventory.total_gpus, 'GPU')}, "
        f"policy {done.policy.name}"
    )


def _span(samples: Sequence[ClusterSample]) -> float:
    return samples[-1].at_s - samples[0].at_s if samples else 0.0


def _columns(samples: Sequence[ClusterSample], value: Callable[[ClusterSample], float]) -> list[float]:
    """Means over equal stretches of time; each sample holds until the next."""
    span_s = _span(samples)
    if span_s <= 0:
        return [float(value(sample)) for sample in samples[-1:]]
    width = span_s / COLUMNS
    sums = [0.0] * COLUMNS
    for sample, following in pairwise(samples):
        at, end = sample.at_s - samples[0].at_s, following.at_s - samples[0].at_s
        level = value(sample)
        while at < end:
            column = min(COLUMNS - 1, int(at / width))
            until = end if column == COLUMNS - 1 else min(end, (column + 1) * width)
            sums[column] += level * (until - at)
            at = until if until > at else end
    return [total / width for total in sums]


def _time(days: float) -> str:
    return f"{days:.3g} d" if days >= 1 or days == 0 else f"{days * 24:.3g} h"

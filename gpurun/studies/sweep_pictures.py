"""A sweep as a picture: parameters and metric of each trial, and the metric over steps and over time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from gpurun.drawing import (
    FRAME,
    Axis,
    Chart,
    Choices,
    Drawing,
    Numbers,
    Place,
    around,
    as_finite,
    clipped,
    shade,
    stretches,
)
from gpurun.quantities import count
from gpurun.studies import sweep_plan
from gpurun.studies.sweep_plan import Dimension, SweepPlan
from gpurun.studies.trials import JournalEntry, Metric, Trial, Trials

# What trials reported over time: their curves, from a sweep's journal. Pure.


class HasStep(Protocol):
    """A report for one step."""

    @property
    def step(self) -> int:
        """The step's number."""


AtStep = TypeVar("AtStep", bound=HasStep)


@dataclass(frozen=True)
class Reported:
    """One report. `after_s`: since the sweep's first trial; a value of None is not a number."""

    step: int
    after_s: float
    value: float | None


def add_report(curve: list[AtStep], report: AtStep) -> None:
    """Add the newest report to a curve. It replaces reports of its step and of later steps.

    An attempt that continues from a checkpoint repeats steps; a lower rank that speaks later has its own values.
    """
    while curve and curve[-1].step >= report.step:
        curve.pop()
    curve.append(report)


def curves(entries: Iterable[JournalEntry]) -> Mapping[int, list[Reported]]:
    """What each trial's newest job reported, by the trial's number."""
    found: dict[int, list[Reported]] = {}
    began_s: float | None = None
    for entry in entries:
        if entry.kind == "asked":
            began_s = entry.at_s if began_s is None else began_s
            found[entry.trial] = []
        elif entry.kind == "reported" and entry.trial in found and began_s is not None:
            add_report(found[entry.trial], Reported(entry.step, entry.at_s - began_s, entry.value))
    return found


def best_so_far(trials: Iterable[Trial], metric: Metric) -> list[tuple[float, float]]:
    """When a trial that came to its end was better than all before, seconds since the first trial, and its value."""
    found: list[tuple[float, float]] = []
    known = list(trials)
    began_s = min((trial.asked_s for trial in known), default=0.0)
    for trial in sorted(known, key=lambda trial: trial.ended_s or 0.0):
        if trial.outcome != "complete" or trial.value is None or trial.ended_s is None:
            continue
        if not found or metric.best(trial.value, found[-1][1]) != found[-1][1]:
            found.append((trial.ended_s - began_s, trial.value))
    return found


MOST_TRIALS = 2000
MOST_REPORTS = 100_000
"""Of all curves together; of longer ones only some are drawn."""
LEFT, TOP, HIGH, BELOW = 80.0, 110.0, 260.0, 80.0
BETWEEN = 150.0
"""Between two axes of parameters."""
BEST, NO_VALUE = "#d62728", "#999"


def picture(
    name: str, plan: SweepPlan, metric: Metric, trials: Trials, curves: Mapping[int, Sequence[Reported]]
) -> str:
    """The picture as an SVG document. Of many trials the best are drawn."""
    ranked = trials.ranked(metric)
    drawn = ranked[:MOST_TRIALS][::-1]  # the best one last, on top of the others
    values = [value for trial in drawn if (value := as_finite(trial.value)) is not None]
    look = _Look(metric, around(values), trials.best(metric))
    width = max(1000.0, 2 * LEFT + BETWEEN * len(plan.space))
    some = f", the best {MOST_TRIALS} drawn" if len(ranked) > MOST_TRIALS else ""
    sheet = Drawing(
        width, TOP + 2 * (HIGH + BELOW), f"{name} {plan.name}: {len(ranked)} of {count(plan.trials, 'trial')}{some}"
    )
    _legend(sheet, look)
    _parallel(sheet, plan, drawn, look, width)
    _curves(sheet, drawn, look, curves, width)
    return sheet.svg()


class _Look:
    """How trials look: the better, the darker; the best one apart."""

    def __init__(self, metric: Metric, axis: Numbers, best: Trial | None) -> None:
        self.metric, self.axis, self.best = metric, axis, best

    def colour(self, trial: Trial) -> str:
        part = self.axis.place(trial.value)
        if trial is self.best:
            return BEST
        return NO_VALUE if part is None else self.of(part)

    def of(self, part: float) -> str:
        """The colour of a place on the metric's axis. The lightest colours would not be seen on white."""
        return shade(0.9 * (1 - part if self.metric.more_is_better else part))

    def line(self, sheet: Drawing, trial: Trial, places: Sequence[Place | None]) -> None:
        """A trial's line; where it has no place, the line has a gap."""
        is_best = trial is self.best
        for stretch in stretches(places):
            sheet.line(
                stretch, self.colour(trial), width=3 if is_best else 1.2, opacity=1 if is_best else 0.7,
                is_dashed=trial.outcome != "complete", tip=_words(trial, self.metric),
            )  # fmt: skip


def _words(trial: Trial, metric: Metric) -> str:
    value = "no value" if trial.value is None else f"{trial.value:.6g} at step {trial.step}"
    parameters = " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={sweep_plan.value_text(value)}"
        for name, value in trial.parameters.items()
    )
    return f"trial {trial.number}, {trial.outcome or 'open'}: {metric.name} {value}; {parameters}"


def _legend(sheet: Drawing, look: _Look) -> None:
    best = look.best
    sheet.line([(10, 44), (40, 44)], BEST, width=3)
    sheet.text(46, 48, clipped(f"best: {_words(best, look.metric)}" if best else "best: no trial has ended yet", 130))
    sheet.line([(10, 64), (40, 64)], FRAME)
    sheet.text(46, 68, "complete")
    sheet.line([(120, 64), (150, 64)], FRAME, is_dashed=True)
    sheet.text(156, 68, "stopped early, failed or open")
    sheet.line([(340, 64), (370, 64)], NO_VALUE, is_dashed=True)
    sheet.text(376, 68, f"no value of {look.metric.name}")


def _parallel(sheet: Drawing, plan: SweepPlan, drawn: Sequence[Trial], look: _Look, width: float) -> None:
    """An axis for each parameter, the last one for the metric; a line for each trial."""
    axes: list[tuple[str, Axis, Callable[[Trial], object]]] = [
        (name, axis_of(one), _parameter(name)) for name, one in plan.space.items()
    ]
    goal = f"{look.metric.name} ({'max' if look.metric.more_is_better else 'min'})"
    axes.append((goal, look.axis, lambda trial: trial.value))
    gap = (width - 2 * LEFT) / (len(axes) - 1)
    for trial in drawn:
        parts = [axis.place(value(trial)) for _, axis, value in axes]
        look.line(sheet, trial, [None if part is None else (LEFT + gap * number, TOP + HIGH * (1 - part))
                                 for number, part in enumerate(parts)])  # fmt: skip
    for number, (name, axis, _) in enumerate(axes):
        x = LEFT + gap * number
        shown = f"{name} (log)" if isinstance(axis, Numbers) and axis.is_log else name
        sheet.text(x, TOP - 12, clipped(shown, 20), anchor="middle", size=13, tip=name)
        sheet.line([(x, TOP), (x, TOP + HIGH)], FRAME)
        for part, text in axis.marks():
            _mark(sheet, x, TOP + HIGH * (1 - part), text)
    cell = HIGH / 40
    for number in range(40):  # the metric's colours beside its axis
        sheet.box(width - LEFT + 4, TOP + HIGH - cell * (number + 1), 8, cell + 0.5, look.of((number + 0.5) / 40))


def _parameter(name: str) -> Callable[[Trial], object]:
    return lambda trial: trial.parameters.get(name)


def axis_of(one: Dimension) -> Axis:
    """A parameter's axis: the values of a list at equal distances, numbers in order; a range as it is drawn from."""
    if not one.values:
        return Numbers(one.low, one.high, one.is_log)
    numbers = [(number, value) for value in one.values if (number := as_finite(value)) is not None]
    return Choices([value for _, value in sorted(numbers)] if len(numbers) == len(one.values) else one.values)


def _mark(sheet: Drawing, x: float, y: float, text: str) -> None:
    sheet.line([(x - 4, y), (x, y)], FRAME)
    sheet.text(x - 7, y + 4, clipped(text, 14), anchor="end", size=11, tip=text, is_over_lines=True)


def _curves(
    sheet: Drawing, drawn: Sequence[Trial], look: _Look, curves: Mapping[int, Sequence[Reported]], width: float
) -> None:
    """The metric over steps, and over time."""
    most = max(2, MOST_REPORTS // max(1, len(drawn)))
    shown = {trial.number: _some(curves.get(trial.number, ()), most) for trial in drawn}
    reports = [each for found in shown.values() for each in found]
    best = best_so_far(drawn, look.metric)
    up = around([value for each in reports if (value := as_finite(each.value)) is not None])
    longest_s = max([each.after_s for each in reports] + [at_s for at_s, _ in best], default=0.0)
    unit, unit_s = _unit(longest_s)
    half = (width - 3 * LEFT) / 2
    top = TOP + HIGH + BELOW
    across = _ends([step for each in reports if (step := as_finite(each.step)) is not None])
    steps = Chart(sheet, (LEFT, top, half, HIGH), across, up, ("step", look.metric.name))
    names = f"{unit} since the first trial; dashed: the best so far", look.metric.name
    time = Chart(sheet, (2 * LEFT + half, top, half, HIGH), Numbers(0.0, longest_s / unit_s), up, names)
    for trial in drawn:
        found = shown[trial.number]
        look.line(sheet, trial, [steps.at(each.step, each.value) for each in found])
        look.line(sheet, trial, [time.at(each.after_s / unit_s, each.value) for each in found])
    stairs = [(at_s / unit_s, value) for at_s, value in best]
    corners = [*stairs[:1], *(c for one, two in pairwise(stairs) for c in ((two[0], one[1]), two))]
    ends = [(longest_s / unit_s, stairs[-1][1])] if stairs else []
    time.curve((*corners, *ends), BEST, is_dashed=True, tip="the best complete trial so far")


def _some(reports: Sequence[Reported], most: int) -> Sequence[Reported]:
    stride = -(-len(reports) // most)
    return reports if stride < 2 else [*reports[:-1:stride], reports[-1]]


def _ends(values: Sequence[float]) -> Numbers:
    return Numbers(min(values, default=0.0), max(values, default=1.0))


def _unit(longest_s: float) -> tuple[str, float]:
    for name, long_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * long_s:
            return name, long_s
    return "seconds", 1.0

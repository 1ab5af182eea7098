"""What trials reported over time: their curves, from a sweep's journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpurun.sweeps.plan import Metric
from gpurun.sweeps.trials import JournalEntry, Trial


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

"""The trials of a sweep or campaign, computed from its journal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from gpurun.jobs.record import ID_PATTERN

Value = bool | int | float | str
Point = Mapping[str, Value]
Outcome = Literal["complete", "pruned", "failed", "cancelled"]
Kind = Literal["asked", "reported", "stopping", "ended", "again"]


@dataclass(frozen=True)
class Metric:
    """What trials are compared by: the name under which they report it, and whether more is better."""

    name: str
    more_is_better: bool = True

    def best(self, one: float, other: float) -> float:
        """The better of two values."""
        return max(one, other) if self.more_is_better else min(one, other)


@dataclass(frozen=True)
class JournalEntry:
    """One line of a journal.

    ``asked``: a trial has these parameters and is this job, which is submitted next. ``reported``: its metric has a
    value at a step. ``stopping``: it is being stopped early, for a reason. ``ended``: with this outcome. ``again``:
    it is to run once more.

    Attributes:
        value: None = not a number.

    Raises:
        ValueError: `job` is not an id, for example a path out of the job store.
    """

    kind: Kind
    at_s: float
    trial: int
    job: str = ""
    parameters: Mapping[str, Value] = field(default_factory=dict)
    step: int = 0
    value: float | None = None
    outcome: Outcome | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.job and not ID_PATTERN.fullmatch(self.job):
            raise ValueError(f"{self.job!r} is not a job's id")


@dataclass
class Trial:
    """One point and what is known of it.

    Attributes:
        job: its newest job; "" = it has none and waits for one.
        step, value: of the newest report; a value of None behind a report is not a number.
        stopping: why it is being stopped early; "" = it is not.
        outcome: None = it has not ended.
    """

    number: int
    parameters: Mapping[str, Value]
    job: str = ""
    asked_s: float = 0.0
    ended_s: float | None = None
    step: int | None = None
    value: float | None = None
    stopping: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    reports: int = 0


class Trials:
    """All trials, by number, from a journal."""

    def __init__(self, entries: Iterable[JournalEntry] = ()) -> None:
        self.by_number: dict[int, Trial] = {}
        for entry in entries:
            self.take(entry)

    def take(self, entry: JournalEntry) -> None:
        """Process one entry. Ignores an entry of an unknown trial."""
        trial = self.by_number.get(entry.trial)
        if entry.kind == "asked":
            self.by_number[entry.trial] = Trial(entry.trial, entry.parameters, entry.job, entry.at_s)
        elif trial is None:
            return
        elif entry.kind == "reported":
            trial.step, trial.value, trial.reports = entry.step, entry.value, trial.reports + 1
        elif entry.kind == "stopping":
            trial.stopping = entry.reason
        elif entry.kind == "ended":
            trial.outcome, trial.reason, trial.ended_s = entry.outcome, entry.reason, entry.at_s
        else:
            self.by_number[entry.trial] = Trial(entry.trial, trial.parameters)

    def unended(self) -> list[Trial]:
        """Those that wait, run or are stopped, in order."""
        return [trial for trial in self.by_number.values() if trial.outcome is None]

    def started(self) -> list[Trial]:
        """Those that have not ended and have a job, in order."""
        return [trial for trial in self.unended() if trial.job]

    def missing(self, of: int) -> list[int]:
        """Return which of `of` trials have no parameters yet: the last ones, and those whose line is damaged."""
        return [number for number in range(of) if number not in self.by_number]

    def ranked(self, metric: Metric | None) -> list[Trial]:
        """Those with a value, best first; then the others in order. Without a metric all in order."""
        if metric is None:
            return list(self.by_number.values())
        reported = [trial for trial in self.by_number.values() if trial.value is not None]
        others = [trial for trial in self.by_number.values() if trial.value is None]
        return [*sorted(reported, key=_rank(metric)), *sorted(others, key=attrgetter("number"))]

    def best(self, metric: Metric) -> Trial | None:
        """Return the best complete trial; None if there is none."""
        done = (trial for trial in self.by_number.values() if trial.outcome == "complete" and trial.value is not None)
        return min(done, key=_rank(metric), default=None)

    def counts(self) -> dict[str, int]:
        """How many there are of each outcome; ``open``: that have not ended."""
        found = dict.fromkeys(("open", "complete", "pruned", "failed", "cancelled"), 0)
        for trial in self.by_number.values():
            found[trial.outcome or "open"] += 1
        return found


def _rank(metric: Metric) -> Callable[[Trial], tuple[float, int]]:
    """The key that sorts trials with a value, best first."""
    sign = -1 if metric.more_is_better else 1
    return lambda trial: (sign * (trial.value or 0.0), trial.number)

"""The plan of a campaign: sizes, rates, the record of one run, and the sample that the cost model reads. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import isfinite
from typing import Any, Literal, Protocol

from gpurun.errors import BadInput
from gpurun.jobs.record import Origin
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.quantities import count
from gpurun.scaling.choice import exchange_of, shape_of
from gpurun.scaling.model import MOST_RANKS, LinkRates, Sample
from gpurun.studies import trials
from gpurun.studies.trials import JournalEntry

# The plan of a campaign. It never changes after the campaign has begun. Pure.


MOST_SIZES = 64
CAMPAIGN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_SIZE = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


@dataclass(frozen=True)
class RefusedSize:
    """A size that cannot run, and the reason.

    Attributes:
        code: the exit code of the error.
    """

    launcher: str
    gpus: int
    reason: str
    code: int


@dataclass(frozen=True)
class CampaignPlan:
    """One campaign, complete.

    Attributes:
        jobs: the job of each size of each launcher; image and code are pinned.
        refused: requested sizes that cannot run.
        inventory: the file that jobs are submitted against.
        repeat: how often each size runs.
        rate: the metric to compare; None = the one metric whose name ends in ``_per_s``.
        rates: nominal link rates, if the user gave them.
        racks: the rack of each host of the inventory.
        origin: where the jobs come from.
    """

    name: str
    jobs: tuple[JobSpec, ...]
    inventory: str
    repeat: int
    created_s: float
    refused: tuple[RefusedSize, ...] = ()
    rate: str | None = None
    rates: LinkRates = field(default_factory=LinkRates)
    racks: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    @property
    def trials(self) -> int:
        """Return the number of runs."""
        return self.repeat * len(self.jobs)

    def runs(self) -> Iterator[RunRecord]:
        """Yield all runs in order, as they are before they begin.

        Launchers and sizes alternate, so a machine that becomes slower affects all of them equally.
        """
        for number in range(1, self.repeat + 1):
            for spec in self.jobs:
                yield RunRecord(spec.launcher, spec.gpus, number)

    def job(self, run: RunRecord) -> JobSpec:
        """Return the job of one run."""
        found = next(spec for spec in self.jobs if (spec.launcher, spec.gpus) == (run.launcher, run.gpus))
        return replace(found, name=f"{self.name}-{run.launcher}-{run.gpus}-{run.number}")

    def asks_the_same_as(self, other: CampaignPlan) -> bool:
        """Return whether both plans run the same command at the same sizes. Image, code and data may differ."""
        return self._asked == other._asked

    @property
    def _asked(self) -> object:
        pinned: dict[str, Any] = {"image": "", "image_id": "", "code": "", "data": {}, "python": None}
        jobs = [replace(spec, **pinned, outputs_limit_mib=None) for spec in self.jobs]
        sizes = [(each.launcher, each.gpus) for each in self.refused]
        return jobs, sizes, self.inventory, self.repeat, self.rate, self.rates


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4,8`` into sorted numbers.

    Raises:
        BadInput: a part is not a valid size, or a size occurs twice.
    """
    words = [word.strip() for word in text.split(",")]
    hint = "write sizes such as 1,2,4,8"
    if wrong := [word for word in words if not _SIZE.match(word) or not 1 <= int(word) <= MOST_RANKS]:
        raise BadInput(f"--gpus: {wrong[0][:40]!r} is not a number of GPUs", hint=hint)
    sizes = [int(word) for word in words]
    if twice := [size for size in sizes if sizes.count(size) > 1]:
        raise BadInput(
            f"--gpus has the size {twice[0]} twice", hint="write each size once: --repeat N runs each size N times"
        )
    if len(sizes) > MOST_SIZES:
        raise BadInput(f"--gpus has {len(sizes)} sizes, but at most {MOST_SIZES} are allowed", hint=hint)
    return tuple(sorted(sizes))


def check_name(name: str) -> None:
    """Refuse a name that cannot be a folder's name. Raises BadInput."""
    if not CAMPAIGN_NAME.match(name):
        raise BadInput(
            f"--name {name[:80]!r} is not a valid name of a campaign",
            hint="use up to 64 letters, digits, '.', '_' and '-'",
        )


def given_for(given: Mapping[str, object], gpus: int, *, has_roles: bool, has_knobs: bool) -> dict[str, object]:
    """Return a recipe's fields for one size. It is not elastic, and has as many servers for each worker as the recipe.

    Drops roles if the launcher's ranks have none, and Horovod's settings if another launcher starts the ranks.
    """
    dropped = {"min_gpus", "rehearse_s", *([] if has_knobs else ["horovod", "controller"])}
    kept = {key: value for key, value in given.items() if key not in dropped}
    roles, before = kept.pop("roles", None), kept.get("gpus")
    if isinstance(roles, Roles) and has_roles:
        share = gpus / before if isinstance(before, int) else 1
        kept["roles"] = replace(roles, ps=max(1, round(roles.ps * share)) if roles.ps else 0, workers=None)
    return kept


# Compute the rate of a run from its ranks' reports. Pure.


SUFFIX = "_per_s"
WARM_UP = 0.2
"""The share of a rank's reports that is not counted, from the first on: programs start slowly."""
MOST_SAID = 100_000
"""Windows of a run that are kept, evenly spaced: a journal's reader takes a line of 4 MiB for a damaged file."""
LEAST_RATE, MOST_RATE = 1e-100, 1e100
"""No program has another rate; sums and quotients of these stay finite."""
ADVICE = "report a rate with gpurun_runtime.report(step, images_per_s=…), or name another metric with --rate"


class SaidByRank(Protocol):
    """A report of one rank (`gpurun.supervisor.lines.RankReport`)."""

    @property
    def attempt(self) -> int:
        """The attempt of the job."""

    @property
    def rank(self) -> int:
        """The rank's number."""

    @property
    def metrics(self) -> dict[str, float]:
        """Values by name."""


@dataclass(frozen=True)
class MeasuredRate:
    """The rate of a gang.

    Attributes:
        name: the metric's name.
        value: the sum of all ranks' medians.
        windows: the sum of all ranks' reports, report by report, without the warm-up; at most `MOST_SAID` of them.
        low, high: the 10th and the 90th percentile of `windows`.
    """

    name: str
    value: float
    windows: tuple[float, ...]
    low: float
    high: float


def rate_of(reports: Iterable[SaidByRank], wanted: str | None) -> MeasuredRate:
    """Return the gang's rate. Either each rank reports its own rate, or one rank reports the total.

    Uses only the last attempt.

    Raises:
        BadInput: no rank reported a rate, or several metrics could be the rate.
    """
    last = _last_attempt(reports)
    name = wanted or _only_rate(last)
    series: dict[int, list[float]] = {}
    for report in last:
        value = report.metrics.get(name)
        if value is not None and LEAST_RATE <= value <= MOST_RATE:
            series.setdefault(report.rank, []).append(value)
    if not series:
        raise BadInput(f"no rank reported {name} as a number above 0; {_reported(last)}", hint=ADVICE)
    kept = [values[int(len(values) * WARM_UP) :] for _, values in sorted(series.items())]
    windows = _summed(kept)
    low, high = spread(windows)
    return MeasuredRate(name, sum(map(statistics.median, kept)), _thinned(windows, MOST_SAID), low, high)


def last_values(reports: Iterable[SaidByRank]) -> dict[str, dict[int, float]]:
    """The last finite value of each metric in the last attempt, by rank."""
    found: dict[str, dict[int, float]] = {}
    for report in _last_attempt(reports):
        for name, value in report.metrics.items():
            if isfinite(value):
                found.setdefault(name, {})[report.rank] = value
    return found


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def _last_attempt(reports: Iterable[SaidByRank]) -> list[SaidByRank]:
    known = list(reports)
    last = max((report.attempt for report in known), default=0)
    return [report for report in known if report.attempt == last]


def _only_rate(reports: Sequence[SaidByRank]) -> str:
    names = sorted({name for report in reports for name in report.metrics if name.endswith(SUFFIX)})
    if len(names) > 1:
        raise BadInput(
            f"the ranks reported several rates: {', '.join(names[:8])}", hint="choose one rate with --rate NAME"
        )
    if not names:
        raise BadInput(
            f"no rank reported a rate (a metric whose name ends in {SUFFIX}); {_reported(reports)}", hint=ADVICE
        )
    return names[0]


def _reported(reports: Sequence[SaidByRank]) -> str:
    names = sorted({name for report in reports for name in report.metrics})
    return f"the ranks reported: {', '.join(names[:8])}" if names else "the ranks reported nothing"


def _summed(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Sum the series window by window, up to the end of the shortest."""
    windows = zip_longest(*series)
    return tuple(sum(values) for values in windows if None not in values)


def _thinned(windows: tuple[float, ...], most: int) -> tuple[float, ...]:
    return windows[:: len(windows) // most + 1]


def middle(values: Mapping[int, float] | None) -> float | None:
    """Return the median over ranks; None without values, or if it is too large for a number."""
    found = statistics.median(values.values()) if values else None
    return found if found is not None and isfinite(found) else None


Outcome = Literal["open", "measured", "failed", "cancelled", "no-rate"]
DONE: tuple[Outcome, ...] = ("measured",)
"""What is not run again."""

MOST_WINDOWS = 200
"""Windows of a run in its sample, evenly spaced: their spread needs no more, and a file of many samples stays small."""

PRECISION = re.compile(r"precision_([a-z0-9]{1,8})")

MOST_APART = 4.0
"""If batch / rate and the reported seconds differ by a larger factor, batch and rate have different units."""


@dataclass(frozen=True)
class RunRecord:
    """One run: its job, and its result.

    Attributes:
        number: the repetition, counted from 1.
        job: the job's id, known before the job is submitted.
        hint: what to do about the reason.
        grants: hosts and GPUs of the run.
        held_s: seconds from the run's start until its GPUs were free again.
        metrics: for each metric, the median over ranks of the last value.
        sample: what the cost model reads; None = the recipe reports no batch and no gradient_bytes.
    """

    launcher: str
    gpus: int
    number: int
    job: str = ""
    outcome: Outcome = "open"
    reason: str = ""
    hint: str = ""
    rate: MeasuredRate | None = None
    grants: tuple[Grant, ...] = ()
    held_s: float = 0.0
    ended_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    sample: Sample | None = None

    @property
    def words(self) -> str:
        """Return the run's name for people."""
        return f"{self.launcher}, {count(self.gpus, 'GPU')}, run {self.number}"

    @property
    def gpu_hours(self) -> float:
        """Return the GPU hours that the run used."""
        return sum(len(grant.gpus) for grant in self.grants) * self.held_s / 3600

    @property
    def hosts(self) -> int:
        """Return the number of hosts with a GPU of the job."""
        return sum(1 for grant in self.grants if grant.gpus)


@dataclass(frozen=True)
class RunEntry(JournalEntry):
    """One line of a campaign's journal. Trial N is run N of `CampaignPlan.runs`.

    Attributes:
        run: the result, in the entry that ends the run.
    """

    run: RunRecord | None = None


def end_of_run(number: int, record: RunRecord) -> RunEntry:
    """Return the entry that ends run `number`."""
    outcomes: dict[str, trials.Outcome] = {"measured": "complete", "cancelled": "cancelled"}
    return RunEntry("ended", record.ended_s, number, outcome=outcomes.get(record.outcome, "failed"), run=record)


def note_run(records: dict[int, RunRecord], runs: Sequence[RunRecord], entry: JournalEntry) -> None:
    """Process one entry of a campaign's journal. A run that is to be repeated has its last record until it begins.

    Args:
        records: of the runs that have begun, by their trials' numbers; changed.
        runs: all runs, as `CampaignPlan.runs` yields them.
    """
    if entry.kind == "asked" and 0 <= entry.trial < len(runs):
        records[entry.trial] = replace(runs[entry.trial], job=entry.job)
    elif entry.kind == "ended" and entry.trial in records:
        run = entry.run if isinstance(entry, RunEntry) else None
        records[entry.trial] = run or replace(records[entry.trial], outcome="failed", reason=entry.reason)


def sample_of(
    spec: JobSpec, job: str, grants: Sequence[Grant], racks: Mapping[str, str], rates: LinkRates,
    rate: MeasuredRate, values: Mapping[str, Mapping[int, float]],
) -> Sample | None:  # fmt: skip
    """Return the run as a sample for the cost model.

    None if the program reports no valid batch and gradient size, or a batch in another unit than the rate.
    """
    batch, size = middle(values.get("batch")), middle(values.get("gradient_bytes"))
    if batch is None or size is None:
        return None
    computes = [value for value in values.get("compute_s", {}).values() if value > 0]
    images = batch * spec.gpus
    windows = _thinned(rate.windows, MOST_WINDOWS)
    reported_s = middle(values.get("step_s"))
    try:
        step_s = images / rate.value
        if computes and statistics.median(computes) > MOST_APART * step_s:
            return None
        if reported_s is not None and not 1 / MOST_APART <= reported_s / step_s <= MOST_APART:
            return None
        shape = shape_of(spec, grants, racks, rates)
        return Sample(
            ranks_per_host=shape.ranks_per_host, racks=shape.racks, servers_per_host=shape.servers_per_host,
            batch_per_rank=int(batch), gradient_bytes=int(size), step_s=step_s, images_per_s=rate.value,
            windows_s=tuple(images / window for window in windows), gpus=spec.gpus,
            exchange=exchange_of(spec), launcher=spec.launcher,
            compute_s=statistics.median(computes) if computes else None,
            compute_spread=statistics.pstdev(computes) / statistics.mean(computes) if len(computes) > 1 else None,
            exchange_s=middle(values.get("exchange_s")), rates=rates, precision=_precision(values),
            is_compiled=_is_compiled(values.get("compiled")), job=job,
        )  # fmt: skip
    except (ValueError, OverflowError, ZeroDivisionError):
        return None


def _precision(values: Mapping[str, Mapping[int, float]]) -> str:
    """Return the precisions that ranks reported as metrics ``precision_NAME``: metrics are numbers."""
    found = {match[1] for name in values if (match := PRECISION.fullmatch(name)) and any(values[name].values())}
    return "+".join(sorted(found))


def _is_compiled(ranks: Mapping[int, float] | None) -> bool | None:
    return any(ranks.values()) if ranks else None

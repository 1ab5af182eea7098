"""Write the report as one page of HTML without scripts or network access. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpurun.drawing import Chart, Drawing, Labelled, Numbers
from gpurun.history.goodput import PARTS
from gpurun.history.row import FINAL, HistoryRow
from gpurun.history.store import GROUPED, MOST_NUMBER, HistorySource, Wanted, row_of_attempt
from gpurun.markup import Markup, element, markup, page, table
from gpurun.moments import date_minute
from gpurun.quantities import count, duration

# Totals over the history, computed by SQLite, for `gpurun report`.


COLUMNS_SHOWN = 240
"""Stretches of time in the timeline."""
LARGEST_SHOWN = 20
NO_NAME = "(none)"


@dataclass
class Share:
    """Use by a user, pool, project or generation. Times are seconds.

    Attributes:
        jobs: ended jobs.
        failed: attempts whose first failure is known.
        waited_s, longest_wait_s: waiting time of all attempts together, and the longest of one.
        measured_gpu_s: the part of `gpu_s` whose use is known.
        idle_gpu_s: the part of `measured_gpu_s` in which leased GPUs did nothing.
    """

    attempts: int = 0
    jobs: int = 0
    failed: int = 0
    gpu_s: float = 0.0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    measured_gpu_s: float = 0.0
    idle_gpu_s: float = 0.0

    @property
    def busy_percent(self) -> float | None:
        """Return how busy the GPUs were while they were leased; None = unknown."""
        return 100 * (1 - self.idle_gpu_s / self.measured_gpu_s) if self.measured_gpu_s else None

    @property
    def mean_wait_s(self) -> float:
        """Return the mean waiting time of an attempt."""
        return self.waited_s / self.attempts if self.attempts else 0.0


@dataclass
class GpuTime:
    """GPU seconds of a period by what they did. The parts add up to all GPU seconds.

    Attributes:
        steps: goodput: steps that no earlier attempt had done.
        running: attempts that reported no step were in RUNNING: goodput at most.
        start: attempts prepared, started, and ran until their first step.
        checkpoint: ranks saved.
        lost: ranks repeated steps of an earlier attempt.
        idle: no GPU was in use.
        stopping: attempts stopped.
        unknown: attempts whose rows an older gpurun wrote.
        lost_by_cause: the part `lost` by why the earlier attempt ended.
    """

    steps: float = 0.0
    running: float = 0.0
    start: float = 0.0
    checkpoint: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    stopping: float = 0.0
    unknown: float = 0.0
    lost_by_cause: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts by name."""
        return {name: getattr(self, name) for name in (*_PARTS, "unknown")}


ROUNDING_S = 0.001
"""Sums of many numbers differ by less."""
_PARTS = tuple(part.removesuffix("_gpu_s") for part in PARTS)


@dataclass(frozen=True)
class LargestAttempt(HistoryRow):
    """An attempt, with its GPU use in words."""

    use: str = ""


@dataclass
class Accounts:
    """Resource use in a period. Times are seconds.

    Attributes:
        since_s: start of the period, seconds since 1970.
        until_s: end of the period.
        capacity: GPUs in the inventory now; null: unknown.
        outcomes: attempts by outcome; running attempts by state.
        causes: failures by the kind of the first one of each attempt.
        failed_hosts: failures by host.
        gpu_time: what the GPUs of `total` did.
        timeline: leased GPUs in equal parts of the period.
        largest: the attempts with the most GPU time.
    """

    since_s: float
    until_s: float
    capacity: int | None = None
    total: Share = field(default_factory=Share)
    users: dict[str, Share] = field(default_factory=dict)
    pools: dict[str, Share] = field(default_factory=dict)
    projects: dict[str, Share] = field(default_factory=dict)
    generations: dict[str, Share] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)
    failed_hosts: dict[str, int] = field(default_factory=dict)
    gpu_time: GpuTime = field(default_factory=GpuTime)
    timeline: tuple[float, ...] = ()
    largest: tuple[LargestAttempt, ...] = ()


_IN_PERIOD = "max(0.0, min(ended_s, :to) - max(granted_s, :from)) * gpu_s / max(ended_s - granted_s, 0.001)"
"""GPU seconds in the period, of an attempt that had the same number of GPUs all the time."""


def _spent(wanted: Wanted) -> str:
    """Return the SQL for GPU seconds in the period. Without a period it needs no clipping, which saves a third of the
    time.
    """
    return "gpu_s" if wanted.since_s is None and wanted.until_s is None else _IN_PERIOD


def accounts(
    sources: Sequence[HistorySource], wanted: Wanted, *, now_s: float, capacity: int | None = None
) -> Accounts:
    """Compute the wanted totals, until `now_s` or the end of the period."""
    until_s = min(wanted.until_s or now_s, now_s)
    since_s = wanted.since_s if wanted.since_s is not None else _first_s(sources, wanted, until_s)
    made = Accounts(since_s, max(until_s, since_s + 1.0), capacity)
    _add_shares(sources, wanted, made)
    _add_failures(sources, wanted, made)
    _add_parts(sources, wanted, made)
    made.timeline = _timeline(sources, wanted, made)
    made.largest = _largest(sources, wanted, made)
    for name in ("users", "pools", "projects", "generations"):
        setattr(made, name, dict(sorted(getattr(made, name).items(), key=lambda each: (-each[1].gpu_s, each[0]))))
    for name in ("outcomes", "causes", "failed_hosts"):
        setattr(made, name, dict(sorted(getattr(made, name).items(), key=lambda each: (-each[1], each[0]))))
    return made


def _first_s(sources: Iterable[HistorySource], wanted: Wanted, until_s: float) -> float:
    firsts = [each[0] for each in _ask(sources, wanted, "min(coalesce(granted_s, ended_s))") if each[0] is not None]
    return min([_finite(first) for first in firsts], default=until_s)


def _ask(
    sources: Iterable[HistorySource], wanted: Wanted, columns: str, rest: str = "", **values: float
) -> Iterable[tuple[Any, ...]]:
    """Select from every source. The last column is the source."""
    for source in sources:
        condition, parameters = wanted.where(source)
        text = f"SELECT {columns} FROM attempts WHERE {condition} {rest}"  # noqa: S608 - names and placeholders
        for found in source.rows.execute(text, {**parameters, **values}):
            yield (*found, source)


def _add_shares(sources: Iterable[HistorySource], wanted: Wanted, made: Accounts) -> None:
    spent, finals = _spent(wanted), ", ".join(f"'{outcome}'" for outcome in FINAL)
    sums = {
        "attempts": "count(*)",
        "jobs": f"sum(outcome IN ({finals}))",
        "failed": "sum(cause != '')",
        "gpu_s": f"total({spent})",
        "waited_s": "total(waited_s)",
        "measured_gpu_s": f"total(iif(use_percent IS NULL, 0.0, {spent}))",
        "idle_gpu_s": f"total({spent} * (100.0 - use_percent)) / 100.0",
    }
    columns = ", ".join((*GROUPED, *sums.values(), "max(waited_s)"))
    period = {"from": made.since_s, "to": made.until_s}
    for values in _ask(sources, wanted, columns, f"GROUP BY {', '.join(GROUPED)}", **period):
        user, *texts = (value if isinstance(value, str) else "" for value in values[: len(GROUPED)])
        *numbers, longest_s = (_finite(value) for value in values[len(GROUPED) : -1])
        names = (values[-1].owner_of(user), *texts)
        shares = [made.total]
        for kind, name in zip((made.users, made.pools, made.projects, made.generations), names, strict=True):
            shares.append(kind.setdefault(name or NO_NAME, Share()))
        for share in shares:
            share.longest_wait_s = max(share.longest_wait_s, longest_s)
            for column, number in zip(sums, numbers, strict=True):
                setattr(share, column, getattr(share, column) + (int(number) if column in _COUNTS else number))


_COUNTS = ("attempts", "jobs", "failed")


def _add_failures(sources: Sequence[HistorySource], wanted: Wanted, made: Accounts) -> None:
    for outcome, attempts, _ in _ask(sources, wanted, "outcome, count(*)", "GROUP BY 1"):
        if isinstance(outcome, str):
            made.outcomes[outcome] = made.outcomes.get(outcome, 0) + attempts
    for cause, host, attempts, _ in _ask(
        sources, wanted, "cause, cause_host, count(*)", "AND cause != '' GROUP BY 1, 2"
    ):
        if isinstance(cause, str):
            made.causes[cause] = made.causes.get(cause, 0) + attempts
        if isinstance(host, str) and host:
            made.failed_hosts[host] = made.failed_hosts.get(host, 0) + attempts


def _add_parts(sources: Sequence[HistorySource], wanted: Wanted, made: Accounts) -> None:
    """Add up what the GPUs did. Files of others may hold anything, but the parts never exceed the whole."""
    share, period = f"{_spent(wanted)} / max(gpu_s, 0.001)", {"from": made.since_s, "to": made.until_s}
    sums = ", ".join(f"total(max(0.0, min({part}, gpu_s)) * {share})" for part in PARTS)
    found, whole_s = made.gpu_time, made.total.gpu_s
    for cause, *numbers, _ in _ask(sources, wanted, f"lost_cause, {sums}", "GROUP BY 1", **period):
        for part, number in zip(_PARTS, map(_finite, numbers), strict=True):
            setattr(found, part, getattr(found, part) + number)
            if part == "lost" and number:
                name = cause if isinstance(cause, str) and cause else NO_NAME
                found.lost_by_cause[name] = found.lost_by_cause.get(name, 0.0) + number
    known_s = sum(getattr(found, part) for part in _PARTS)
    found.unknown = whole_s - known_s if whole_s - known_s >= ROUNDING_S else 0.0
    if known_s > whole_s:
        for part in _PARTS:
            setattr(found, part, getattr(found, part) * whole_s / known_s)
        found.lost_by_cause = {name: lost_s * whole_s / known_s for name, lost_s in found.lost_by_cause.items()}
    found.lost_by_cause = dict(sorted(found.lost_by_cause.items(), key=lambda each: (-each[1], each[0])))


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or math.isnan(value):
        return 0.0
    return min(max(float(value), 0.0), MOST_NUMBER)


def _timeline(sources: Iterable[HistorySource], wanted: Wanted, made: Accounts) -> tuple[float, ...]:
    """Return the mean number of leased GPUs in each part of the period.

    GPU seconds until a moment t are Σ rate × (t - start) over starts before t, less the same over ends. So sums of the
    rates, and of rate × time, in each part give the exact value at every boundary.
    """
    width = (made.until_s - made.since_s) / COLUMNS_SHOWN
    rate = "gpu_s / max(ended_s - granted_s, 0.001)"
    changes: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for moment, sign in (("granted_s", 1.0), ("ended_s", -1.0)):
        at = f"(max(min({moment}, :to), :from) - :from)"
        columns = f"CAST({at} / :width AS INTEGER), total({rate}), total({rate} * {at})"
        period = {"from": made.since_s, "to": made.until_s, "width": width}
        for stretch, rates, moments, _ in _ask(sources, wanted, columns, "AND granted_s NOT NULL GROUP BY 1", **period):
            if isinstance(stretch, int) and 0 <= stretch <= COLUMNS_SHOWN:
                changes[stretch][0] += sign * _finite(rates)
                changes[stretch][1] += sign * _finite(moments)
    return _means(changes, width)


def _means(changes: Mapping[int, Sequence[float]], width: float) -> tuple[float, ...]:
    rates = moments = before = 0.0
    means = []
    for stretch in range(COLUMNS_SHOWN):
        rates, moments = (
            total + more for total, more in zip((rates, moments), changes.get(stretch, (0, 0)), strict=True)
        )
        spent = rates * (stretch + 1) * width - moments
        means.append(round(max(0.0, (spent - before) / width), 3))
        before = spent
    return tuple(means)


def _largest(sources: Iterable[HistorySource], wanted: Wanted, made: Accounts) -> tuple[LargestAttempt, ...]:
    """Return the attempts with the most GPU time in the period."""
    found: list[tuple[float, HistoryRow]] = []
    for source in sources:
        condition, parameters = wanted.where(source)
        columns, limit = f"job, attempt, {_spent(wanted)}", f"ORDER BY 3 DESC LIMIT {LARGEST_SHOWN:d}"
        text = f"SELECT {columns} FROM attempts WHERE {condition} {limit}"  # noqa: S608
        values = {**parameters, "from": made.since_s, "to": made.until_s}
        for job, attempt, spent in source.rows.execute(text, values).fetchall():
            if spent:
                found += [(_finite(spent), row) for row in row_of_attempt(source, job, attempt)]
    found.sort(key=lambda each: (-each[0], each[1].job, each[1].attempt))
    return tuple(LargestAttempt(**vars(row), use=row.use_words) for _, row in found[:LARGEST_SHOWN])


WIDTH, HEIGHT = 960.0, 264.0
BOX = (80.0, 40.0, WIDTH - 160, HEIGHT - 64)
COLOUR = "#2f6fb0"
SPARK_WIDTH, SPARK_HEIGHT = 96, 18
_SHARES = (("user", "users"), ("pool", "pools"), ("project", "projects"), ("generation", "generations"))


def report_page(made: Accounts) -> Markup:
    """Return the whole document."""
    return page(f"GPU use, {_period(made)}", body(made))


def body(made: Accounts) -> Markup:
    """Return the report's content, for a page with its own head."""
    parts = [element("h1", f"GPU use, {_period(made)}"), element("p", history_summary(made)), timeline(made)]
    if words := goodput_words(made):
        parts.insert(2, element("p", words))
    for name, attribute in _SHARES:
        shares = getattr(made, attribute)
        if len(shares) > 1 or name == "user":
            parts += [element("h2", f"By {name}"), _shares(name, shares)]
    parts += [element("h2", "Outcomes"), _counts("outcome", made.outcomes)]
    if made.causes:
        parts += [element("h2", "Failures by cause"), _counts("cause", made.causes)]
    if made.failed_hosts:
        parts += [element("h2", "Failures by host"), _counts("host", made.failed_hosts)]
    if made.largest:
        parts += [element("h2", "Largest attempts"), _largest_of_page(made.largest)]
    return markup(*parts)


def _period(made: Accounts) -> str:
    return f"{date_minute(made.since_s)} to {date_minute(made.until_s)}"


def history_summary(made: Accounts) -> str:
    """Return one line: GPU hours, how busy, waiting time."""
    total = made.total
    of = made.capacity * (made.until_s - made.since_s) if made.capacity else 0
    share = f" ({100 * total.gpu_s / of:.0f} % of {count(made.capacity, 'GPU')})" if of and made.capacity else ""
    said = [f"{count(total.attempts, 'attempt')} used {hours(total.gpu_s)} GPU hours{share}"]
    if total.busy_percent is not None:
        said.append(f"leased GPUs were {total.busy_percent:.0f} % busy, and {hours(total.idle_gpu_s)} GPU hours idle")
    said.append(f"attempts waited {duration(total.mean_wait_s)} on average, {duration(total.longest_wait_s)} at most")
    return "; ".join(said) + "."


def goodput_words(made: Accounts) -> str:
    """Return one line: which part of the GPU time is goodput, and what the rest did; "" without GPU time."""
    parts, whole_s = made.gpu_time.parts, made.total.gpu_s
    if whole_s <= 0:
        return ""
    shares = {name: f"{100 * spent_s / whole_s:.1f} %" for name, spent_s in parts.items() if spent_s > 0}
    told = [f"{shares.pop(name)} {words}" for name, words in _GOOD.items() if name in shares]
    causes = ", ".join(f"{name} {hours(lost_s)} GPU h" for name, lost_s in made.gpu_time.lost_by_cause.items())
    rest = [f"{_WORDS[name]} {share}{f' ({causes})' if name == 'lost' else ''}" for name, share in shares.items()]
    return f"goodput: {', '.join(told) or '0 %'}" + (f"; the rest: {', '.join(rest)}" if rest else "")


_GOOD = {"steps": "in steps", "running": "in jobs without steps"}
_WORDS = {
    "start": "start", "checkpoint": "checkpoints", "lost": "repeated steps", "idle": "idle", "stopping": "stop",
    "unknown": "unknown",
}  # fmt: skip


def timeline(made: Accounts) -> Markup:
    """Draw the number of leased GPUs over the period as SVG."""
    most = max([1.0, float(made.capacity or 0), *made.timeline])
    dates = [
        (part, date_minute(made.since_s + (made.until_s - made.since_s) * part)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    sheet = Drawing(WIDTH, HEIGHT, "Leased GPUs")
    Chart(sheet, BOX, Labelled(dates), Numbers(0.0, most), ("", "")).columns(made.timeline, COLOUR)
    return sheet.svg()


def _shares(name: str, shares: Mapping[str, Share]) -> Markup:
    heads = (name, "GPU hours", "jobs", "attempts", "failed", "mean wait", "longest", "busy", "idle GPU hours")
    return table(heads, map(share_cells, shares.items()), figures=range(1, len(heads)))


def share_cells(share: tuple[str, Share]) -> list[str]:
    """Return a row of a table of shares, of the share's name and value."""
    label, use = share
    return [
        label, hours(use.gpu_s), str(use.jobs), str(use.attempts), str(use.failed), duration(use.mean_wait_s),
        duration(use.longest_wait_s), percent(use.busy_percent), hours(use.idle_gpu_s),
    ]  # fmt: skip


def _counts(name: str, counts: Mapping[str, int]) -> Markup:
    return table((name, "attempts"), counts.items(), figures={1})


def _largest_of_page(found: Iterable[HistoryRow]) -> Markup:
    rows = [
        (row.job, f"{row.user}: {row.name}", hours(row.gpu_s), row.use_words, _spark(row), row.outcome) for row in found
    ]
    return table(("job", "name", "GPU hours", "use", "over time", "outcome"), rows, figures={2})


def _spark(row: HistoryRow) -> Markup | str:
    values = [min(100.0, float(word)) for word in row.sparks.split() if word.isascii() and word.isdigit()][:100]
    if len(values) < 2:
        return ""
    step = SPARK_WIDTH / (len(values) - 1)
    points = " ".join(f"{number * step:.1f},{SPARK_HEIGHT * (1 - v / 100):.1f}" for number, v in enumerate(values))
    return element(
        "svg", element("polyline", points=points, fill="none", stroke=COLOUR), xmlns="http://www.w3.org/2000/svg",
        width=SPARK_WIDTH, height=SPARK_HEIGHT, role="img", aria_label="use over time",
    )  # fmt: skip


def hours(seconds: float) -> str:
    """Return seconds as hours: ``12.3``."""
    return f"{seconds / 3600:,.1f}"


def percent(value: float | None) -> str:
    """Return ``31 %``; nothing if unknown."""
    return "" if value is None else f"{value:.0f} %"

"""A trace: jobs with the time they were submitted and how long they ran, read from CSV.

Columns: ``job_id,submit_time_s,duration_s,gpus`` and optionally ``gpus_per_host,generation,pool,priority,
preemptible,time_limit_s``. The names that published traces use for the same columns are understood (`ALIASES`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.quantities.counts import count

ALIASES = {
    "job_id": ("jobid", "id", "job"),
    "submit_time_s": ("submission_time", "submit_time", "timestamp", "submitted_s"),
    "duration_s": ("duration", "run_time", "runtime"),
    "gpus": ("num_gpu", "num_gpus", "gpu_num", "gpu_count"),
    "pool": ("vc", "queue"),
    "time_limit_s": ("time_limit",),
}
"""Ours, and what others call it: ElasticFlow/ITP, Tiresias, Helios, AdaptDL's Philly."""

REQUIRED = ("submit_time_s", "duration_s", "gpus")
TRUE, FALSE = ("1", "true", "yes", "y"), ("", "0", "false", "no", "n")
MAX_GPUS = 1_000_000


@dataclass(frozen=True)
class TraceJob:
    """One line of a trace.

    Attributes:
        line: where it stands in the file, for messages.
        submitted_s: seconds; only differences matter.
    """

    job_id: str
    submitted_s: float
    duration_s: float
    gpus: int
    line: int
    gpus_per_host: int | None = None
    generation: str | None = None
    pool: str | None = None
    priority: int = 0
    preemptible: bool = False
    time_limit_s: float | None = None


def read_trace(path: Path) -> tuple[TraceJob, ...]:
    """The jobs of a CSV file in order of submission, those of one time in the file's order.

    Raises:
        BadInput: names the file and the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_trace(file, str(path))
    except OSError as error:
        raise BadInput(f"cannot read the trace: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"the trace is not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceJob, ...]:
    """As `read_trace`, from lines of text; `name` is what messages call the file."""
    reader = csv.reader(lines, strict=True)
    try:
        columns = _columns(next(reader, []), name)
        jobs = list(_jobs(reader, columns, name))
    except csv.Error as error:
        raise BadInput(f"the trace is not valid CSV: {error}", where=f"{name}:{reader.line_num}") from error
    if not jobs:
        raise BadInput("the trace has no jobs", where=name)
    seen: dict[str, int] = {}
    for job in jobs:
        if seen.setdefault(job.job_id, job.line) != job.line:
            message = f"job_id {job.job_id!r} is also on line {seen[job.job_id]}"
            raise BadInput(message, where=f"{name}:{job.line}")
    return tuple(sorted(jobs, key=lambda job: job.submitted_s))


def _columns(header: list[str], name: str) -> dict[str, int]:
    found = {title.strip().lower(): at for at, title in reversed(list(enumerate(header)))}
    columns = {}
    for field in TraceJob.__dataclass_fields__:
        ours = "submit_time_s" if field == "submitted_s" else field
        for title in (ours, *ALIASES.get(ours, ())):
            if title in found and ours != "line":
                columns[ours] = found[title]
                break
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        known = ", ".join((*REQUIRED, "job_id"))
        raise BadInput(f"the trace has no column {missing[0]}; the header must name {known}", where=f"{name}:1")
    return columns


def _jobs(rows: Iterator[list[str]], columns: Mapping[str, int], name: str) -> Iterator[TraceJob]:
    for row in rows:
        line = rows.line_num  # type: ignore[attr-defined]
        if not row:
            continue
        where = f"{name}:{line}"
        if len(row) <= max(columns.values()):
            raise BadInput(f"the line has {count(len(row), 'column')}, fewer than the header", where=where)
        yield _job(_Row({column: row[at].strip() for column, at in columns.items()}, where), line)


@dataclass(frozen=True)
class _Row:
    cells: Mapping[str, str]
    where: str

    def wrong(self, column: str, wanted: str) -> BadInput:
        return BadInput(f"{column} {self.cells[column]!r} must be {wanted}", where=self.where)

    def number(self, column: str, least: float) -> float:
        try:
            value = float(self.cells[column])
        except ValueError:
            value = _timestamp(self.cells[column]) if column == "submit_time_s" else math.nan
        if not math.isfinite(value) or value < least:
            raise self.wrong(column, "a number" if least == -math.inf else f"a number of at least {least:g}")
        return value

    def whole(self, column: str, least: int, most: int = MAX_GPUS) -> int:
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not (least <= value <= most) or value != int(value):
            raise self.wrong(column, f"a whole number from {least} to {most}")
        return int(value)

    def flag(self, column: str) -> bool:
        text = self.cells.get(column, "").lower()
        if text not in TRUE and text not in FALSE:
            raise self.wrong(column, "true or false")
        return text in TRUE

    def given(self, column: str) -> bool:
        return bool(self.cells.get(column))


def _job(row: _Row, line: int) -> TraceJob:
    return TraceJob(
        job_id=row.cells.get("job_id") or f"line-{line}",
        submitted_s=row.number("submit_time_s", -math.inf),
        duration_s=row.number("duration_s", 0.0),
        gpus=row.whole("gpus", 1),
        line=line,
        gpus_per_host=row.whole("gpus_per_host", 1) if row.given("gpus_per_host") else None,
        generation=row.cells.get("generation") or None,
        pool=row.cells.get("pool") or None,
        priority=row.whole("priority", -MAX_GPUS) if row.given("priority") else 0,
        preemptible=row.flag("preemptible"),
        time_limit_s=row.number("time_limit_s", 0.0) if row.given("time_limit_s") else None,
    )


def _timestamp(text: str) -> float:
    """A date and time as Helios and Philly write it, in seconds; UTC where it does not say."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()

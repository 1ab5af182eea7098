"""Select rows of the history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.history.database import HistorySource
from gpurun.history.row import COLUMNS, HistoryRow

MOST_NUMBER = 1e12
"""Numbers of another user's file are cut to this: 30,000 years, in seconds."""
_NUMBERS = {name for name, kind in HistoryRow.__annotations__.items() if not kind.startswith("str")}
_OPTIONAL = {name for name, kind in HistoryRow.__annotations__.items() if "None" in kind}
_WHOLE = {name for name, kind in HistoryRow.__annotations__.items() if kind.startswith("int")}


@dataclass(frozen=True)
class Wanted:
    """Conditions on rows; None or empty = no condition.

    Attributes:
        user: a name, or a number: that of the file's owner, whatever the rows call the user.
        host: attempts with GPUs of this host.
        states: outcomes.
        name: part of the job's name or id.
        since_s, until_s: attempts that ended after, or began before, that time.
    """

    user: str | None = None
    pool: str | None = None
    project: str | None = None
    host: str | None = None
    states: tuple[str, ...] = ()
    name: str | None = None
    since_s: float | None = None
    until_s: float | None = None

    def where(self, source: HistorySource) -> tuple[str, dict[str, Any]]:
        """Return the condition in SQL and its parameters."""
        texts = {"pool": self.pool, "project": self.project}
        parts = [f"{column} = :{column}" for column, value in texts.items() if value is not None]
        values: dict[str, Any] = {column: value for column, value in texts.items() if value is not None}
        if self.user is not None and not source.is_all_of(self.user):
            parts.append("owner_of(CAST(user AS BLOB)) = :user")
            values["user"] = self.user
        if self.host is not None:
            parts.append("instr(' ' || hosts || ' ', ' ' || :host || ' ') > 0")
            values["host"] = self.host
        if self.name is not None:
            parts.append("(instr(lower(name), lower(:name)) > 0 OR instr(job, :name) > 0)")
            values["name"] = self.name
        if self.states:
            parts.append(f"outcome IN ({', '.join(f':state{number}' for number in range(len(self.states)))})")
            values |= {f"state{number}": state for number, state in enumerate(self.states)}
        if self.since_s is not None:
            parts.append("ended_s > :since")
            values["since"] = self.since_s
        if self.until_s is not None:
            parts.append("coalesce(granted_s, ended_s) < :until")
            values["until"] = self.until_s
        return " AND ".join(parts) or "1", values


def rows(sources: Iterable[HistorySource], wanted: Wanted, *, most: int | None = None) -> list[HistoryRow]:
    """Return the matching rows, the latest end first; at most `most`."""
    found: list[HistoryRow] = []
    limit = "" if most is None else f" LIMIT {most:d}"
    for source in sources:
        condition, values = wanted.where(source)
        found += _read(source, f"{condition} ORDER BY ended_s DESC, job, attempt{limit}", values)
    found.sort(key=lambda row: (-row.ended_s, row.job, row.attempt))
    return found if most is None else found[:most]


def row_of_attempt(source: HistorySource, job: object, attempt: object) -> Iterator[HistoryRow]:
    """Yield the row of one attempt, if there is one."""
    return _read(source, "job = :job AND attempt = :attempt", {"job": job, "attempt": attempt})


def _read(source: HistorySource, condition: str, values: Mapping[str, Any]) -> Iterator[HistoryRow]:
    for found in source.rows.execute(f"SELECT {', '.join(COLUMNS)} FROM attempts WHERE {condition}", values):  # noqa: S608
        yield _sound(dict(zip(COLUMNS, found, strict=True)), source)


def _sound(values: Mapping[str, Any], source: HistorySource) -> HistoryRow:
    """Return a row in which every value has its type. Columns of another user's file may hold anything."""
    row: dict[str, Any] = {n: _number(n, value) if n in _NUMBERS else _text(value) for n, value in values.items()}
    return HistoryRow(**{**row, "user": source.owner_of(row["user"])})


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(name: str, value: object) -> float | int | None:
    if not isinstance(value, int | float) or math.isnan(value):
        return None if name in _OPTIONAL else 0
    cut = min(max(value, -MOST_NUMBER), MOST_NUMBER)
    return int(cut) if name in _WHOLE else float(cut)

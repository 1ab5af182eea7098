"""The live view as lines: first everything, then only changes. For screen readers and pipes."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.quantities.counts import count, plural
from gpurun.top.rows import Duration, Moment, TopRow, host_rows, job_rows, queue_rows, summary

CALM = 10
"""A change of a job's utilization by this many percent prints the job again."""


def first_lines(moment: Moment, duration: Duration) -> Iterator[str]:
    """Return everything, one sentence or row per line."""
    yield summary(moment)
    yield from (_job_line(row) for row in job_rows(moment, duration))
    yield from (_waits(row) for row in queue_rows(moment, duration))
    yield from (_host_line(row) for row in host_rows(moment))


def changed_lines(before: Moment, now: Moment, duration: Duration) -> Iterator[str]:
    """Return the changes: new and ended jobs, changed states and reasons, hosts that became silent or answer again."""
    if summary(before) != summary(now):
        yield summary(now)
    old = {row.key: row for row in job_rows(before, duration)}
    for row in job_rows(now, duration):
        if row.key not in old or _matters(old[row.key], row):
            yield _job_line(row)
    waited = {row.key: row.cells[-1] for row in queue_rows(before, duration)}
    for row in queue_rows(now, duration):
        if waited.get(row.key) != row.cells[-1]:
            yield _waits(row)
    hosts = {row.key: row for row in host_rows(before)}
    for row in host_rows(now):
        if row.key not in hosts or _host_state(hosts[row.key]) != _host_state(row):
            yield _host_line(row)


def _matters(old: TopRow, new: TopRow) -> bool:
    """Return True if more has changed than the time and a little of the utilization."""
    state, use, hosts, reason = 4, 6, 9, 10
    if any(old.cells[at] != new.cells[at] for at in (state, hosts, reason)):
        return True
    return abs(_percent(old.cells[use]) - _percent(new.cells[use])) >= CALM


def _percent(text: str) -> float:
    number = text.removesuffix(" %")
    return float(number) if number.isdigit() else 0.0


def _job_line(row: TopRow) -> str:
    letter, job, owner, name, state, gpus, use, memory, took, hosts, reason = row.cells
    held = f", use {use}, memory {memory}, on {hosts}" if hosts else ""
    size = f"{gpus} {plural(int(gpus.split()[-1]), 'GPU')}"
    return f"job {job} {name} of {owner}: {state}, {size}, {took}{held}{f': {reason}' if reason else ''}" + (
        f" (cell {letter})" if letter else ""
    )


def _waits(row: TopRow) -> str:
    place, job, _, name, gpus, waits, why = row.cells
    return f"queue {place}: {job} {name}, {count(int(gpus), 'GPU')}, waits {waits}: {why}"


def _host_line(row: TopRow) -> str:
    host, _, state, letters, use, memory, heat, power, trouble = row.cells
    figures = f"use {use}, memory {memory}, {heat}, {power}" if memory != "–" else use
    return f"host {host}: {state}, cells {letters or 'none'}, {figures}{f': {trouble}' if trouble else ''}"


def _host_state(row: TopRow) -> tuple[str, ...]:
    _, _, state, letters, use, memory, _, _, trouble = row.cells
    return state, letters, "" if memory != "–" else use, trouble

"""The rows of the live view, as texts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpurun.documents.plain import printable
from gpurun.facts import GpuSample, HostSample
from gpurun.quantities import count, plural
from gpurun.views.lines import STATE_MARKS, Line, table_lines
from gpurun.views.picture import MARKS, HostCells, JobRow, Picture, WaitingJob

NONE = "–"
JOB_COLUMNS = ("", "job", "owner", "name", "state", "GPUs", "use", "memory", "for", "hosts", "reason")
QUEUE_COLUMNS = ("place", "job", "owner", "name", "GPUs", "waits", "because")
HOST_COLUMNS = ("host", "rack", "state", "GPUs", "use of each, %", "memory", "heat", "power", "trouble")
SORTS = ("state", "owner", "GPUs", "use", "for", "name")

Duration = Callable[[float], str]


class Moment(NamedTuple):
    """The state at one moment.

    Attributes:
        problems: read errors, in words.
    """

    picture: Picture
    queue: tuple[WaitingJob, ...]
    samples: Mapping[str, HostSample]
    problems: tuple[str, ...]


class TopRow(NamedTuple):
    """A row of a table. `key`: its job or host."""

    key: str
    cells: tuple[str, ...]


class Usage(NamedTuple):
    """The combined utilization and memory of a job's GPUs. None: not known yet."""

    percent: float | None
    memory_mib: int | None
    memory_of_mib: int | None


def leased_hosts(picture: Picture) -> list[str]:
    """Return the hosts on which a job holds a GPU."""
    return [host.name for host in picture.hosts if any(cell not in MARKS for cell in host.cells)]


def silent_hosts(moment: Moment) -> list[str]:
    """Return the hosts that do not answer, or cannot report on their GPUs."""
    return [name for name in leased_hosts(moment.picture) if (sample := moment.samples.get(name)) and sample.problem]


def job_rows(moment: Moment, duration: Duration, *, sort: str = "state", wanted: str = "") -> list[TopRow]:
    """Return a row for each job that contains the wanted text."""
    used = usage(moment)
    order = sorted(moment.picture.jobs, key=lambda job: _order(job, sort, used))
    rows = [TopRow(job.id, _job(job, used.get(job.id), duration)) for job in order]
    return _filtered(rows, wanted)


def queue_rows(moment: Moment, duration: Duration, *, wanted: str = "") -> list[TopRow]:
    """Return a row for each waiting job, with its reason, in the order in which the jobs would start."""
    rows = [
        TopRow(job.job, (
            str(job.position or NONE), job.job, printable(job.owner), printable(job.name), str(job.gpus),
            duration(job.waiting_s), printable(job.message),
        ))
        for job in moment.queue
    ]  # fmt: skip
    return _filtered(rows, wanted)


def host_rows(moment: Moment, *, wanted: str = "") -> list[TopRow]:
    """Return a row for each host, with its agent's report on its GPUs."""
    rows = [TopRow(host.name, _host(host, moment)) for host in moment.picture.hosts]
    return _filtered(rows, wanted)


def screen_summary(moment: Moment) -> str:
    """Return one sentence for the top of the screen."""
    picture = moment.picture
    running = sum(job.state.value == "RUNNING" for job in picture.jobs)
    free = f"{picture.free} of {count(picture.gpus, 'GPU')} free"
    parts = [free, f"{count(running, 'job')} running", f"{len(moment.queue)} waiting"]
    if outs := len(picture.outs):
        parts.append(f"{count(outs, 'host')} out")
    if silent := silent_hosts(moment):
        shown = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
        parts.append(f"no answer from {shown}")
    return " · ".join([*parts, *map(printable, moment.problems)])


def usage(moment: Moment) -> dict[str, Usage]:
    """Return job → the utilization of its GPUs."""
    found: dict[str, list[GpuSample]] = {}
    for host in moment.picture.hosts:
        sample = moment.samples.get(host.name)
        for gpu in sample.gpus if sample else ():
            if 0 <= gpu.index < len(host.cells) and host.cells[gpu.index] not in MARKS:
                found.setdefault(host.cells[gpu.index], []).append(gpu)
    return {job: _together(gpus) for job, gpus in found.items()}


def _together(gpus: Sequence[GpuSample]) -> Usage:
    percents = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    used = [(gpu.memory_used_mib, gpu.memory_mib) for gpu in gpus if gpu.memory_used_mib is not None and gpu.memory_mib]
    percent = sum(percents) / len(percents) if percents else None
    return Usage(
        percent, sum(one for one, _ in used) if used else None, sum(of or 0 for _, of in used) if used else None
    )


def _job(job: JobRow, used: Usage | None, duration: Duration) -> tuple[str, ...]:
    percent = NONE if used is None or used.percent is None else f"{used.percent:.0f} %"
    memory = _memory(used.memory_mib, used.memory_of_mib) if used else NONE
    return (
        job.letter, job.id, printable(job.owner), printable(job.name), job.state.value, job.gpus, percent, memory,
        duration(job.for_s), printable(job.hosts), printable(job.reason),
    )  # fmt: skip


def _host(host: HostCells, moment: Moment) -> tuple[str, ...]:
    letters = "".join(moment.picture.letters.get(cell, cell) for cell in host.cells)
    start = (host.name, printable(host.rack), printable(host.shown), letters)
    sample = moment.samples.get(host.name)
    if sample is None:
        is_leased = any(cell not in MARKS for cell in host.cells)
        trouble = printable(host.out.reason) if host.out is not None else ""
        return (*start, "connecting" if is_leased else "not leased: not asked", NONE, NONE, NONE, trouble)
    if sample.problem:
        return (*start, "no answer", NONE, NONE, NONE, printable(sample.problem))
    use = " ".join(NONE if gpu.utilization_percent is None else str(gpu.utilization_percent) for gpu in sample.gpus)
    both = _together(sample.gpus)
    heat = max((gpu.temperature_c for gpu in sample.gpus if gpu.temperature_c is not None), default=None)
    watts = [gpu.power_w for gpu in sample.gpus if gpu.power_w is not None]
    trouble = "; ".join(
        f"GPU {gpu.index}: {gpu.problem or ', '.join(gpu.throttle)}"
        for gpu in sample.gpus
        if gpu.problem or gpu.throttle
    )
    return (
        *start, use, _memory(both.memory_mib, both.memory_of_mib), NONE if heat is None else f"{heat} °C",
        f"{sum(watts):.0f} W" if watts else NONE, printable(trouble),
    )  # fmt: skip


def _memory(used_mib: int | None, of_mib: int | None) -> str:
    return NONE if used_mib is None or not of_mib else f"{used_mib / 1024:.0f} of {of_mib / 1024:.0f} GiB"


def _order(job: JobRow, sort: str, used: Mapping[str, Usage]) -> tuple[object, ...]:
    percent = used[job.id].percent if job.id in used else None
    first: dict[str, object] = {
        "owner": job.owner, "GPUs": -int(job.gpus.split()[0]), "use": 101.0 if percent is None else percent,
        "for": -job.for_s, "name": job.name,
    }  # fmt: skip
    live = job.state.ended, job.state.value == "QUEUED"
    return (first[sort], *live) if sort in first else live


def _filtered(rows: list[TopRow], wanted: str) -> list[TopRow]:
    text = wanted.casefold()
    return [row for row in rows if any(text in cell.casefold() for cell in row.cells)] if text else rows


def moment_lines(moment: Moment, duration: Duration, columns: int | None) -> list[Line]:
    """Return the live view as tables: jobs, the queue, and hosts that jobs use or that have trouble.

    Args:
        columns: width of the terminal.
    """
    leased, states = set(leased_hosts(moment.picture)), {job.id: job.state for job in moment.picture.jobs}
    jobs = [(row, STATE_MARKS.get(states[row.key], "")) for row in job_rows(moment, duration)]
    queue = [(row, "") for row in queue_rows(moment, duration)]
    hosts = [(row, "bad" if row.cells[-1] else "") for row in host_rows(moment) if row.key in leased or row.cells[-1]]
    lines: list[Line] = [[(screen_summary(moment), "head")]]
    for heads, rows in ((JOB_COLUMNS, jobs), (QUEUE_COLUMNS, queue), (HOST_COLUMNS, hosts)):
        if rows:
            lines += [[], *table_lines(heads, [[(cell, mark) for cell in row.cells] for row, mark in rows], columns)]
    return lines


# The live view as lines: first everything, then only changes. For screen readers and pipes.


CALM = 10
"""A change of a job's utilization by this many percent prints the job again."""


def first_lines(moment: Moment, duration: Duration) -> Iterator[str]:
    """Return everything, one sentence or row per line."""
    yield screen_summary(moment)
    yield from (_job_line(row) for row in job_rows(moment, duration))
    yield from (_waits(row) for row in queue_rows(moment, duration))
    yield from (_host_line(row) for row in host_rows(moment))


def changed_lines(before: Moment, now: Moment, duration: Duration) -> Iterator[str]:
    """Return the changes: new and ended jobs, changed states and reasons, hosts that became silent or answer again."""
    if screen_summary(before) != screen_summary(now):
        yield screen_summary(now)
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

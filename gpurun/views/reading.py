"""Read a picture from an inventory and the state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gpurun.errors import GpurunError, StateError
from gpurun.head.looks import UNHEARD_S, heard_in
from gpurun.inventory.folding import fold
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.store import JobStore
from gpurun.leases.look import Cluster, HostRow, look
from gpurun.leases.occupancy import Holder, View
from gpurun.leases.store import LeaseStore
from gpurun.state import clock
from gpurun.state.hosts import KnownAs, Out
from gpurun.state.paths import has_account
from gpurun.views.picture import FOREIGN, FREE, KEPT, LOST, OUT, UNKNOWN, HostCells, OutHost, Picture, picture_of

# Find out why a job's supervisor cannot write the job's record.


TAIL_BYTES = 4096
CARRIED = (State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING)


def supervisor_trouble(folder: JobFolder, record: JobRecord, leases: LeaseStore) -> str | None:
    """Return why a job with GPUs makes no progress: its supervisor's last error, or that there is no supervisor.

    The error counts only if it is newer than the job's last event.
    """
    if record.state not in CARRIED:
        return None
    last = _last_words(folder)
    if last:
        what = "could not start" if record.state is State.GRANTED else "has trouble"
        return f"the job's supervisor {what}: {last}"
    if record.state is not State.STOPPING and not leases.is_alive(record.id):
        if not has_account(record.owner_uid):
            return (
                "the job has no supervisor, and its owner has no account; root can free the GPUs: `gpurun "
                f"cancel {record.id}`"
            )
        return f"the job has no supervisor; the next gpurun command of {record.owner} starts a supervisor"
    return None


def _last_words(folder: JobFolder) -> str:
    """Return the last line of the supervisor's log, if nothing has happened after it."""
    try:
        with folder.supervisor_log.reader() as stream:
            found = os.fstat(stream.fileno())
            stream.seek(max(0, found.st_size - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except (OSError, StateError):
        return ""
    try:
        if folder.events.stat().st_mtime_ns > found.st_mtime_ns:
            return ""
    except FileNotFoundError:
        pass
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


ENDED_SHOWN = 10
STALE_S = UNHEARD_S + 120.0
"""A timer starts looks at hosts each minute, and its round may take this much longer."""
_MARK_OF = {"lost": LOST, "foreign": FOREIGN, "promised": KEPT}


class Reading(NamedTuple):
    """The result of a read.

    Attributes:
        problems: the damage that was found, each problem once.
        unheard: hosts that may have broken unnoticed, each with the seconds since somebody looked at it; None = never.
    """

    rows: tuple[HostRow, ...]
    records: tuple[JobRecord, ...]
    picture: Picture
    problems: tuple[GpurunError, ...]
    unheard: Mapping[str, float | None]


def read_cluster(
    cluster: Cluster,
    store: JobStore,
    *,
    all_jobs: bool = False,
    reasons: Mapping[str, str] | None = None,
    wanted: Callable[[JobRecord], bool] | None = None,
) -> Reading:
    """Read hosts, their GPUs, and jobs. Reports damage, and shows everything that depends on damaged data as unknown.

    Args:
        all_jobs: read all ended jobs, not only the last ones.
        reasons: job → why it waits; None = compute the reasons with a scheduling pass on this state.
        wanted: which jobs to read; None = all.
    """
    problems: list[GpurunError] = []
    now_s = clock.now_s()
    view = look(store.home, now_s=now_s, on_problem=problems.append, despite_damage=True)
    records = _records(store, view, problems.append, wanted or (lambda _: True), all_jobs=all_jobs)
    rows = cluster.rows(view)
    cells = [_cells(row, view, cluster.known[row.host.name]) for row in rows]
    if reasons is None:
        reasons = _why_they_wait(store.home, view, records)
    picture = picture_of(cells, records, now_s, fold, reasons)
    unheard = _unheard(rows, view, cluster.inventory.source)
    return Reading(
        tuple(rows), tuple(records), picture, tuple({str(each): each for each in problems}.values()), unheard
    )


def _unheard(rows: Sequence[HostRow], view: View, source: str) -> dict[str, float | None]:
    """Return the hosts that nobody has looked at for a while; none while this user's waiter looks at hosts.

    A look in the future counts as one now. Looks have the wall clock's time.
    """
    if view.looked_after(view.uid):
        return {}
    heard = heard_in((job.record for job in view.jobs.values()), view.uid, source)
    wall_s = time.time()
    ages = {row.host.name: None if row.seen_s is None else max(0.0, wall_s - row.seen_s) for row in rows}
    return {host: age for host, age in ages.items() if host not in heard and (age is None or age > STALE_S)}


def _why_they_wait(home: Path, view: View, records: Sequence[JobRecord]) -> Mapping[str, str]:
    """Return job → why it waits. With a damaged lease, no pass makes decisions."""
    if view.damaged or not any(record.state is State.QUEUED for record in records):
        return {}
    from gpurun.leases.allocate import Allocator  # noqa: PLC0415 (the whole scheduler, needed only for a queue)
    from gpurun.views.waiting import reasons_of, waiting_jobs  # noqa: PLC0415 (likewise)

    return reasons_of(waiting_jobs(Allocator(home).decisions_on(view), records))


def with_trouble(store: JobStore, record: JobRecord) -> JobRecord:
    """Return the record; if the job's supervisor cannot start or continue, its reason reports that."""
    if record.state not in CARRIED:
        return record
    trouble = supervisor_trouble(store.get(record.id), record, LeaseStore(store.home))
    return record.but(reason=trouble) if trouble else record


def _records(
    store: JobStore, view: View, on_problem: Callable[[GpurunError], None], wanted: Callable[[JobRecord], bool],
    *, all_jobs: bool,
) -> list[JobRecord]:  # fmt: skip
    """Return the wanted jobs that have not ended, and the last ended ones of them; oldest first."""
    ended = set(store.ids()).difference(view.jobs) if all_jobs else store.recently_ended()
    records = [with_trouble(store, job.record) for job in view.jobs.values() if wanted(job.record)]
    found = filter(wanted, store.records(on_problem, ids=ended))
    records += found if all_jobs else islice(found, ENDED_SHOWN)
    return sorted(records, key=lambda record: record.submitted_s)


def _cells(row: HostRow, view: View, known: KnownAs) -> HostCells:
    host = row.host
    held = view.occupancy.on(host, known)
    foreign = {gpu for holder in row.foreign for gpu in holder.gpus}
    nobody = UNKNOWN if view.damaged else OUT if row.out else FREE
    cells = tuple(
        FOREIGN if gpu in foreign and gpu not in held else _cell(held[gpu]) if gpu in held else nobody
        for gpu in range(host.gpus)
    )
    out = out_host(row.out, time.time()) if row.out else None
    return HostCells(host.name, host.rack, host.generation, host.gpus, row.free, row.state, row.shown, cells, out)


def out_host(out: Out, wall_s: float) -> OutHost:
    """Return why a host is out, for views.

    Args:
        wall_s: the wall clock, seconds since the epoch.
    """
    return OutHost(out.shown, out.remedy, max(0.0, wall_s - out.since_s))


def _cell(holder: Holder) -> str:
    return _MARK_OF.get(holder.how, holder.job)

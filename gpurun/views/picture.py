"""The state of a cluster at one moment, for users: a cell for each GPU, a letter for each job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpurun.jobs.record import JobRecord, State

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FREE, LOST, FOREIGN, KEPT, OUT, UNKNOWN = ".", "!", "#", "+", "x", "?"
MARKS: Mapping[str, str] = {
    FREE: "free",
    LOST: "lost: its host gave no proof that the GPU is free",
    FOREIGN: "held by another gpurun installation, or by a process that no job started",
    KEPT: "kept for a job of another inventory",
    OUT: "on a host that is out",
    UNKNOWN: "not known: a lease, a file that reserves GPUs, is damaged",
}
"""The marks of cells without a job, with their meaning."""


class OutHost(NamedTuple):
    """Why a host is out. Its texts are raw.

    Attributes:
        remedy: what to do; "" = unknown.
        for_s: how long it has been out.
    """

    reason: str
    remedy: str
    for_s: float


class HostCells(NamedTuple):
    """A host and its GPUs.

    Attributes:
        free: GPUs without a holder.
        state: as `gpurun.leases.look.HostRow.state`.
        shown: the state in words.
        cells: for each GPU the id of the job that holds it, or one of `MARKS`.
        out: why it is out; None = the last check passed, or nobody has checked it.
    """

    name: str
    rack: str
    generation: str
    gpus: int
    free: int
    state: str
    shown: str
    cells: tuple[str, ...]
    out: OutHost | None = None


class JobRow(NamedTuple):
    """A job in all views. Its texts are raw: each view makes them printable.

    Attributes:
        letter: the job's name in the cells; "" if it holds no GPU.
        gpus: ``8``; ``6 of 8`` for an elastic gang that runs with fewer GPUs than it wants.
        hosts: folded.
        for_s: how long it has run, or waited.
        reason: why it waits, or how it ended.
    """

    letter: str
    id: str
    owner: str
    name: str
    state: State
    gpus: str
    hosts: str
    for_s: float
    reason: str


@dataclass(frozen=True)
class WaitingJob:
    """A job in the queue.

    Attributes:
        position: its place; None if it waits for a restart, or can never start.
        inventory: the path of its inventory.
        waiting_s: seconds since it was queued.
        expected_start_s: seconds since the epoch; None = not known.
    """

    job: str
    name: str
    owner: str
    gpus: int
    position: int | None
    pool: str | None
    priority: int
    inventory: str
    waiting_s: float
    message: str
    expected_start_s: float | None


class Picture(NamedTuple):
    """Hosts in the inventory's order; jobs, oldest first; the letter of each job, by id."""

    hosts: tuple[HostCells, ...]
    jobs: tuple[JobRow, ...]
    letters: Mapping[str, str]

    @property
    def gpus(self) -> int:
        """The number of GPUs of all hosts."""
        return sum(host.gpus for host in self.hosts)

    @property
    def free(self) -> int:
        """The number of free GPUs on hosts that accept new gangs."""
        return sum(host.free for host in self.hosts if host.state == "ok")

    @property
    def outs(self) -> list[tuple[str, OutHost]]:
        """The hosts that are out, and why."""
        return [(host.name, host.out) for host in self.hosts if host.out is not None]

    @property
    def free_elsewhere(self) -> int:
        """The number of free GPUs on hosts that accept no new gangs."""
        return sum(host.free for host in self.hosts if host.state != "ok")


def letters(jobs: Sequence[str]) -> dict[str, str]:
    """Return a short name for each job, all of one length: ``a`` … ``Z``; above 52 jobs ``a0`` … ``Z9``, and so on."""
    digits = 0
    while len(LETTERS) * 10**digits < len(jobs):
        digits += 1
    return {
        job: LETTERS[at // 10**digits] + (f"{at % 10**digits:0{digits}}" if digits else "")
        for at, job in enumerate(jobs)
    }


def picture_of(
    hosts: Iterable[HostCells],
    records: Sequence[JobRecord],
    now_s: float,
    fold: Callable[[Iterable[str]], str],
    reasons: Mapping[str, str] | None = None,
) -> Picture:
    """Combine hosts and jobs.

    Args:
        records: in the order of display.
        fold: `gpurun.inventory.folding.fold`.
        reasons: job → why it waits, which is not in its record.
    """
    shown = tuple(hosts)
    holding = {cell for host in shown for cell in host.cells if cell not in MARKS}
    known = [record.id for record in records if record.id in holding]
    named = letters([*known, *sorted(holding.difference(known))])
    reasons = reasons or {}
    rows = tuple(
        JobRow(
            named.get(record.id, ""), record.id, record.owner, record.name, record.state, _gpus(record),
            fold(grant.host for grant in record.granted) if record.granted else "", shown_for_s(record, now_s),
            "; ".join(dict.fromkeys(filter(None, (record.story(now_s), reasons.get(record.id, ""))))),
        )
        for record in records
    )  # fmt: skip
    return Picture(shown, rows, named)


def shown_for_s(record: JobRecord, now_s: float) -> float:
    """Return how long a job has run; before its start, how long it has been in the queue."""
    return max(0.0, (record.ended_s or now_s) - (record.started_s or record.queued_s))


def _gpus(record: JobRecord) -> str:
    have = sum(len(grant.gpus) for grant in record.granted)
    return f"{have} of {record.gpus}" if 0 < have < record.gpus else str(record.gpus)


# Group equal hosts: by rack, then by their cells. Pure.


class Alike(NamedTuple):
    """Hosts of one rack with equal cells and state."""

    names: tuple[str, ...]
    cells: tuple[str, ...]
    state: str
    shown: str


class RackView(NamedTuple):
    """A rack, or several racks whose hosts all look the same.

    Attributes:
        generations: of its hosts; more than one only in a mixed rack.
        free: GPUs that a new gang can get: those of hosts that accept no new gangs do not count.
    """

    racks: tuple[str, ...]
    generations: tuple[str, ...]
    hosts: int
    gpus: int
    free: int
    groups: tuple[Alike, ...]


def racks_of(hosts: Iterable[HostCells]) -> list[RackView]:
    """Return the racks in the inventory's order. Equal racks are merged into the first of them."""
    by_rack: dict[str, list[HostCells]] = {}
    for host in hosts:
        by_rack.setdefault(host.rack, []).append(host)
    found = [_rack(name, members) for name, members in by_rack.items()]
    merged: dict[object, RackView] = {}
    for at, rack in enumerate(found):
        one = rack.groups[0]
        key = at if len(rack.groups) > 1 else (rack.generations, one.cells, one.shown)
        merged[key] = _together(merged[key], rack) if key in merged else rack
    return list(merged.values())


def _rack(name: str, hosts: list[HostCells]) -> RackView:
    groups: dict[tuple[str, tuple[str, ...], str], list[HostCells]] = {}
    for host in hosts:
        groups.setdefault((host.generation, host.cells, host.shown), []).append(host)
    alike = tuple(
        Alike(tuple(host.name for host in members), cells, members[0].state, shown)
        for (_, cells, shown), members in groups.items()
    )
    generations = tuple(dict.fromkeys(host.generation for host in hosts))
    free = sum(host.free for host in hosts if host.state == "ok")
    return RackView((name,), generations, len(hosts), sum(host.gpus for host in hosts), free, alike)


def _together(one: RackView, other: RackView) -> RackView:
    first, second = one.groups[0], other.groups[0]
    return RackView(
        one.racks + other.racks, one.generations, one.hosts + other.hosts, one.gpus + other.gpus,
        one.free + other.free, (first._replace(names=first.names + second.names),),
    )  # fmt: skip

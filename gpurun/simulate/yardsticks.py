"""The published simulators' policies, `fifo` and `sjf`, with which the scheduler is compared.

Strict head of line: the first gang that does not fit stops every gang behind it. No pools, no preemption. Placement is
consolidated: a gang of up to a host's size gets one host, the one with the fewest free GPUs that is enough. A larger
one gets whole hosts, and for what is left over the freest host there is. Racks are not looked at; equal hosts are taken
in the inventory's order. Source: S-Lab-System-Group/HeliosArtifact, QSSF Service, ``placer/consolidate.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpurun.jobs.spec import Locality
from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.gpus import choose
from gpurun.scheduler.index import Index, Lane
from gpurun.scheduler.model import Decisions, Gang, Grant, Placement, Reason, Refusal, Snapshot, Wait
from gpurun.scheduler.placement import try_place
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.racks import need_of
from gpurun.scheduler.state import Arranged


@dataclass(frozen=True)
class Yardstick:
    """A strict queue.

    Attributes:
        shortest_first: durations are known, and the shortest job goes first; else the first that was submitted.
    """

    name: str
    shortest_first: bool = False


FIFO, SJF = Yardstick("fifo"), Yardstick("sjf", shortest_first=True)

POLICIES: Mapping[str, Policy | Yardstick] = {policy.name: policy for policy in (DEFAULT, FIFO, SJF)}


def strict_pass(
    snapshot: Snapshot, yardstick: Yardstick, arranged: Arranged, durations_s: Mapping[str, float]
) -> Decisions:
    """Decide one pass of a strict queue.

    Args:
        arranged: by `strictly_arranged`; agrees with the snapshot, and the pass adds its starts.
        durations_s: how long each gang of the queue runs.
    """
    first: dict[str, float] = durations_s if yardstick.shortest_first else {}  # type: ignore[assignment]
    order = sorted(snapshot.queue, key=lambda gang: (first.get(gang.id, 0.0), gang.submitted_s, gang.id))
    starts: list[tuple[Gang, Placement]] = []
    waits: dict[str, Wait] = {}
    never: dict[str, Refusal] = {}
    for gang in order:
        if not arranged.capacity.could_hold(gang):
            never[gang.id] = arranged.capacity.refuse(arranged.index, gang)
            continue
        head = next(iter(waits), None)
        placement = arranged.capacity.place(arranged.index, gang) if head is None else None
        if placement is not None:
            arranged.index.take(arranged.index.masks(placement))
            starts.append((gang, placement))
        else:
            message = f"waits behind {head}" if head else arranged.capacity.refuse(arranged.index, gang).message
            waits[gang.id] = Wait(Reason.NO_ROOM, message, behind=head)
    return Decisions(tuple(starts), waits=waits, never=never, order=tuple(gang.id for gang in order))


def strictly_arranged(snapshot: Snapshot) -> Arranged:
    """The snapshot's index, and its inventory's capacity for consolidated gangs."""
    return Arranged(Index(snapshot), Capacity(snapshot.inventory, try_consolidated))


def try_consolidated(
    index: Index, gang: Gang, *, avoid: bool = True, locality: Locality | None = None
) -> Placement | None:
    """As `try_place`, consolidated. Gangs that ask for certain hosts or numbers per host are placed by that."""
    need = need_of(index, gang, avoid=avoid, locality=locality)
    if not need.plain or need.per_host or need.locality != "any":
        return try_place(index, gang, avoid=avoid, locality=locality)
    for lane in index.lanes(gang.wants.constraints):
        hosts = _hosts(index, lane, gang.gpus)
        if hosts is not None:
            grants = [Grant(index.hosts[n].name, choose(index.hosts[n], index.free[n], gpus)) for n, gpus in hosts]
            racks = dict.fromkeys(index.hosts[n].rack for n, _ in hosts)
            return Placement(lane.generation, tuple(racks), tuple(grants))
    return None


def _hosts(index: Index, lane: Lane, gpus: int) -> list[tuple[int, int]] | None:
    size = max(index.full[host].bit_count() for shelf in lane.shelves for level in shelf.levels for host in level)
    if gpus <= size:
        best = next(_at_least(lane, range(gpus, size + 1)), None)
        return None if best is None else [(best, gpus)]
    whole, rest = divmod(gpus, size)
    free = _at_least(lane, range(size, size + 1))
    hosts = [(host, size) for host, _ in zip(free, range(whole), strict=False)]
    if len(hosts) < whole:
        return None
    if rest:
        taken = {host for host, _ in hosts}
        freest = next((host for host in _at_least(lane, range(size, rest - 1, -1)) if host not in taken), None)
        if freest is None:
            return None
        hosts.append((freest, rest))
    return hosts


def _at_least(lane: Lane, levels: range) -> Iterator[int]:
    for free in levels:
        yield from sorted(host for shelf in lane.shelves for host in shelf.levels[free])

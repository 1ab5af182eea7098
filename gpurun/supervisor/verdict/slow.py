"""Name the ranks of a gang that need more time for their own work than their equals, and say why. Pure.

All ranks of a synchronous gang have equal step times, because all wait for the slowest rank. So this module compares
durations outside collectives. `slow_ranks` knows nothing of their source: marks of the program, clocks of GPUs, or
another. Each duration comes from one host's monotonic clock, so no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from gpurun.quantities import duration

Part = TypeVar("Part", bound=Hashable)
"""Who is compared: a rank's number, or a GPU's host and index."""

MORE = 0.15
"""A rank that needs this much more time than the median of its equals is slow."""
FOR_S = 600.0
LEAST_LOOKS = 5
MOST_OF_LOOKS = 0.9
"""The part of the looks in which a rank must be slow: noise may hide a slow rank in a few of them."""
RECENT = 0.25
"""A rank that said nothing new for this part of the time is not judged: it pauses, or its gang does."""
SHORTEST_S, LONGEST_S = 1e-9, 1e6


@dataclass(frozen=True)
class Durations(Generic[Part]):
    """What each rank needs for its own part of a step, from one look at the gang.

    Attributes:
        at_s: when, on the head's monotonic clock.
        by_part: rank → seconds, or anything that is proportional to them; only ranks that said something new.
    """

    at_s: float
    by_part: Mapping[Part, float]


@dataclass(frozen=True)
class Slow(Generic[Part]):
    """A rank that is slow.

    Attributes:
        part: the rank.
        ratio: its duration, divided by the median of its equals; the median of all looks.
        own, equals: its duration and the median of its equals', the medians of all looks.
    """

    part: Part
    ratio: float
    own: float
    equals: float

    @property
    def percent(self) -> int:
        """Return by how much more time it needs, in percent."""
        return round((self.ratio - 1.0) * 100)


def is_duration(value: object) -> bool:
    """Return whether a value can be a duration. Programs and hosts write them, so it may be anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return SHORTEST_S <= value <= LONGEST_S  # neither NaN nor infinite


def slow_ranks(
    looks: Sequence[Durations[Part]], groups: Iterable[Collection[Part]], *, for_s: float = FOR_S, more: float = MORE,
    least: float = 0.0,
) -> tuple[Slow[Part], ...]:  # fmt: skip
    """Return the ranks that were slow for this long, the slowest first.

    A rank is slow if it needed `more` time than the median of its equals in nine of ten looks during `for_s` seconds. A
    look counts only if more than half of the group said something new. So a pause of the gang, a first step that
    compiles, or a single long step names nobody.

    Args:
        looks: oldest first; those that are much older than `for_s` do not count.
        groups: ranks that do equal work on equal GPUs. A group of one has no equals.
        least: a smaller difference does not count, in the unit of the durations.
    """
    if not looks:
        return ()
    begun_s, end_s = looks[-1].at_s - 1.2 * for_s, looks[-1].at_s
    recent = [look for look in looks if begun_s <= look.at_s]
    found: list[Slow[Part]] = []
    for group in groups:
        told: dict[Part, list[tuple[float, float, float]]] = {}
        for look in recent:
            for part, own, equals in _against_equals(look, group):
                told.setdefault(part, []).append((look.at_s, own, equals))
        for part, seen in told.items():
            if seen[-1][0] < end_s - RECENT * for_s or seen[-1][0] - seen[0][0] < for_s or len(seen) < LEAST_LOOKS:
                continue
            over = [own / equals >= 1.0 + more and own - equals >= least for _, own, equals in seen]
            if sum(over) >= MOST_OF_LOOKS * len(over):
                ratio = median(own / equals for _, own, equals in seen)
                owns, others = median(own for _, own, _ in seen), median(equals for _, _, equals in seen)
                found.append(Slow(part, ratio, owns, others))
    return tuple(sorted(found, key=lambda each: -each.ratio))


def _against_equals(look: Durations[Part], group: Collection[Part]) -> Iterator[tuple[Part, float, float]]:
    """Yield each rank of a group with its duration, and the median of the others' durations."""
    told = {part: look.by_part[part] for part in group if part in look.by_part and is_duration(look.by_part[part])}
    if len(told) < 2 or 2 * len(told) <= len(group):
        return
    ordered = sorted(told, key=lambda part: told[part])
    values = [told[part] for part in ordered]
    others = len(values) - 1
    for at, part in enumerate(ordered):
        middle = [values[place + (place >= at)] for place in {(others - 1) // 2, others // 2}]
        yield part, told[part], sum(middle) / len(middle)


# What NVML says of a GPU that can make its rank slow.


BUSY_PERCENT = 50.0
"""An idle GPU lowers its clock and the generation of its link: neither says anything then."""


@dataclass(frozen=True)
class GpuState:
    """What a host reported of a GPU over the last half minute; None = not known.

    Attributes:
        use: in percent.
        sm_mhz: the mean clock of its cores.
        throttle: faults that held its clocks down for most of that time, as `gpurun.node.nvml.THROTTLE` names them.
        pcie_width, pcie_max_width: lanes of its link to the host.
        pcie_generation, pcie_max_generation: of that link, while the GPU was busy.
        is_row_pending: bad rows of its memory wait for a reset.
        at_s: when, on the head's monotonic clock.
    """

    use: float = 0.0
    sm_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    is_row_pending: bool = False
    at_s: float = 0.0

    @property
    def clock_period(self) -> float | None:
        """Return the time of a clock cycle, in microseconds: the time that equal work takes is proportional to it.

        None if the GPU was not busy, or its clock is not known.
        """
        return 1.0 / self.sm_mhz if self.sm_mhz and self.use >= BUSY_PERCENT else None


def lacking_lanes(width: int | None, most: int | None) -> bool:
    """Return whether a link has fewer lanes, or a lower generation, than it could. 0 = there is no such link."""
    return bool(width and most and 0 < width < most)


def reasons(own: GpuState, equals: Sequence[GpuState]) -> tuple[str, ...]:
    """Return what NVML says about a slow rank's GPU, for people; empty if that explains nothing."""
    found = []
    if own.throttle:
        found.append(f"the GPU's clocks are reduced: {', '.join(own.throttle)}")
    clocks = [each.sm_mhz for each in equals if each.sm_mhz is not None and each.use >= BUSY_PERCENT]
    if own.sm_mhz is not None and own.use >= BUSY_PERCENT and clocks and own.sm_mhz * (1 + MORE) <= median(clocks):
        found.append(f"the GPU runs at {own.sm_mhz:.0f} MHz, its equals at {median(clocks):.0f} MHz")
    if lacking_lanes(own.pcie_width, own.pcie_max_width):
        found.append(f"the GPU's PCIe link uses {own.pcie_width} of {own.pcie_max_width} lanes")
    if lacking_lanes(own.pcie_generation, own.pcie_max_generation):
        found.append(f"the GPU's PCIe link runs at generation {own.pcie_generation} of {own.pcie_max_generation}")
    if own.is_row_pending:
        found.append("bad rows of the GPU's memory wait for a GPU reset")
    return tuple(found)


NO_REASON = "NVML reports no reason; check the host's CPUs, disks and data loader, and what only this rank does"


def words_of_rank(title: str, host: str, slow: Slow[Any], why: Sequence[str], for_s: float) -> str:
    """Return what people are told about a rank whose marked work takes longer."""
    much = f"{slow.own:.3g} s instead of {slow.equals:.3g} s in a step"
    return (
        f"{title} on {host} is slow: for {duration(for_s)}, its own work took {slow.percent} % longer than that of its "
        f"equals ({much}); {'; '.join(why) or NO_REASON}"
    )


def words_of_gpu(title: str, host: str, gpu: int, slow: Slow[Any], why: Sequence[str], for_s: float) -> str:
    """Return what people are told about a GPU whose clocks a fault holds down."""
    lower = round((1.0 - 1.0 / slow.ratio) * 100)
    return (
        f"{title} on {host} is slow: for {duration(for_s)}, the clock of GPU {gpu} was {lower} % lower than the clocks "
        f"of its equals; {'; '.join(why)}"
    )

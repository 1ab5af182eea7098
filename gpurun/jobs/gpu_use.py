"""How busy the GPUs of an attempt were, from the hosts' samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CLEARLY_PERCENT = 20.0
"""A rank that is less busy than the median by this much is named."""
MOST_POINTS = 120


@dataclass(frozen=True)
class RankUse:
    """The use of one rank's GPU during an attempt.

    Attributes:
        uuid: NVML's UUID; "" = unknown.
        samples: the number of samples, each of about one second.
        mean, most: use in percent.
        memory_mib: the most memory in use.
        last: use in percent over the last reported half minute.
    """

    rank: int
    host: str
    gpu: int
    uuid: str
    samples: int
    mean: float
    most: float
    memory_mib: int
    last: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """The use of all ranks' GPUs during an attempt.

    Attributes:
        series: (seconds since the epoch, mean use of all GPUs in percent), oldest first, at most `MOST_POINTS`.
        told_s: when a host last sent samples, seconds since the epoch.
    """

    ranks: tuple[RankUse, ...] = ()
    series: tuple[tuple[float, float], ...] = ()
    told_s: float = 0.0

    @property
    def mean(self) -> float | None:
        """Return the mean use of all GPUs in percent."""
        samples = sum(rank.samples for rank in self.ranks)
        return sum(rank.mean * rank.samples for rank in self.ranks) / samples if samples else None

    @property
    def memory_mib(self) -> int | None:
        """Return the most memory that a GPU had in use."""
        return max((rank.memory_mib for rank in self.ranks), default=None)

    @property
    def slowest(self) -> RankUse | None:
        """Return the rank whose GPU was clearly less busy than the others.

        In a synchronous gang, the other ranks wait for it inside NCCL, which keeps their GPUs busy.
        """
        if len(self.ranks) < 2:
            return None
        least = min(self.ranks, key=lambda rank: (rank.mean, rank.rank))
        others = [rank.mean for rank in self.ranks if rank is not least]
        from statistics import median  # noqa: PLC0415 (most commands load this file, few ask)

        return least if median(others) - least.mean >= CLEARLY_PERCENT else None


def thinned(series: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return a series of at most `MOST_POINTS`. Replaces each two neighbours by their mean if it is longer."""
    if len(series) <= MOST_POINTS:
        return tuple(series)
    pairs = zip(series[::2], series[1::2], strict=False)
    return tuple((first[0], round((first[1] + second[1]) / 2, 1)) for first, second in pairs)

"""Add up how busy the gang's GPUs are, for the history, from the half-minute reports of each host's watch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs import attempts
from gpurun.jobs.gpu_use import GpuUse, RankUse, thinned
from gpurun.msgspec_types import ready
from gpurun.supervisor.causes import rank_of
from gpurun.supervisor.job import SupervisedJob

WRITE_EVERY_S = 60.0
POINT_EVERY_S = 30.0
MOST_SAMPLES = 1000


@dataclass(frozen=True)
class _UseLine:
    """A host's report about one GPU; see `gpurun.node.gpu.use`."""

    index: int
    uuid: str
    samples: int
    mean: float
    most: float
    memory_mib: int


class GpuUseMeter:
    """The GPU use of one attempt. Threads of several hosts add to it."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._ranks: dict[int, RankUse] = {}
        self._series: list[tuple[float, float]] = []
        self._told_s, self._written_s = 0.0, 0.0
        self._is_read = False
        self._read()

    def _read(self) -> bool:
        """Read once what an earlier supervisor wrote. Return False if that fails now: nothing may replace it then."""
        if not self._is_read:
            try:
                use = attempts.read_use(self._job.folder, self._job.lease.attempt) or GpuUse()
            except StateUnavailable:
                return False
            self._ranks = {rank.rank: rank for rank in use.ranks}
            self._series, self._told_s, self._is_read = list(use.series), use.told_s, True
        return True

    def add(self, host: str, item: Mapping[str, Any]) -> None:
        """Add a host's report. Ignores impossible values, and GPUs that are not the gang's."""
        try:
            lines = msgspec.convert(item.get("gpus"), ready(list[_UseLine]))
        except (msgspec.ValidationError, OverflowError):
            return
        with self._lock:
            if not self._read():  # this half-minute is lost
                return
            known = len(self._ranks)
            for line in lines:
                self._add(host, line)
            now_s = self._job.clock()
            self._told_s = now_s
            if self._ranks and (not self._series or now_s - self._series[-1][0] >= POINT_EVERY_S):
                last = [rank.last for rank in self._ranks.values()]
                self._series = list(thinned([*self._series, (round(now_s, 1), round(sum(last) / len(last), 1))]))
            is_due = now_s - self._written_s >= WRITE_EVERY_S or len(self._ranks) > known
        if is_due:
            self.write()

    def _add(self, host: str, line: _UseLine) -> None:
        rank = rank_of(self._job.lease.grants, host, line.index)
        if rank is None or not 0 < line.samples <= MOST_SAMPLES:
            return
        mean, most = _percent(line.mean), _percent(line.most)
        memory_mib = min(max(line.memory_mib, 0), 1 << 40)
        before = self._ranks.get(rank)
        if before is None or (before.host, before.gpu) != (host, line.index):
            before = RankUse(rank, host, line.index, line.uuid[:80], 0, 0.0, 0.0, 0)
        samples = before.samples + line.samples
        self._ranks[rank] = replace(
            before, samples=samples, mean=round((before.mean * before.samples + mean * line.samples) / samples, 2),
            most=max(before.most, most), memory_mib=max(before.memory_mib, memory_mib), last=mean,
        )  # fmt: skip

    def write(self) -> None:
        """Write it into the job's folder. If the disk is full it is lost, and the job continues."""
        with self._lock:
            if not self._ranks:
                return
            self._written_s = self._job.clock()
            use = GpuUse(_in_order(self._ranks.values()), tuple(self._series), self._told_s)
            try:
                attempts.write_use(self._job.folder, self._job.lease.attempt, use)
            except (FileNotFoundError, StateError):
                return


def _percent(value: float) -> float:
    return min(max(value, 0.0), 100.0) if value == value else 0.0  # noqa: PLR0124 - not a number is not itself


def _in_order(ranks: Iterable[RankUse]) -> tuple[RankUse, ...]:
    return tuple(sorted(ranks, key=lambda rank: rank.rank))

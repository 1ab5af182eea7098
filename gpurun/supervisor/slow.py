"""Watch a running gang for ranks that need more time than their equals, and name them with host and reason.

Two sources: what programs mark as their own work (`gpurun.runtime`), which also shows slow CPUs, disks and data; and
the clocks that hosts report of the gang's GPUs, which need no help of the program. A GPU's use is none: ranks that wait
in NCCL use their GPUs fully. For the same reason a low clock alone names nobody: a waiting GPU draws less power and
runs faster than one that works at its power limit. A fault that NVML reports must hold the clock down.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gpurun.errors import OUTLIVED, StateError
from gpurun.jobs.events import EventTail
from gpurun.launch.launchers.launcher import RankSeat, seats_of
from gpurun.msgspec_types import ready
from gpurun.state.hosts import Machines
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.telling import tell
from gpurun.supervisor.verdict.slow import (
    FOR_S,
    Durations,
    GpuState,
    Slow,
    is_duration,
    reasons,
    slow_ranks,
    words_of_gpu,
    words_of_rank,
)

FOR_VARIABLE = "GPURUN_SLOW_FOR_S"
"""Tests shorten the time for which a rank must be slow."""
SHORTEST_S = 10.0
LOOKS = 20
"""So many looks are made in that time."""
ASK_TIMEOUT_S = 10.0
LEAST_S = 0.001
"""Marked work whose difference is smaller is not compared."""
MOST_NAMED = 8
"""So many ranks of an attempt are named."""

GpuPlace = tuple[str, int]
"""A host, and a GPU's index there."""


def for_s_in(environ: Mapping[str, str]) -> float:
    """Return for how long a rank must be slow before it is named, in seconds."""
    try:
        return max(SHORTEST_S, min(FOR_S, float(environ.get(FOR_VARIABLE, FOR_S))))
    except ValueError:
        return FOR_S


class SlowWatch:
    """Looks at a gang in a separate thread. Threads of several hosts report their GPUs to it.

    Attributes:
        every_s: how often it looks, and how often hosts should report their GPUs.
    """

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._for_s = for_s_in(os.environ)
        self.every_s = self._for_s / LOOKS
        self._members: tuple[str, ...] = ()
        self._told: dict[int, int] = {}
        self._marked: list[Durations[int]] = []
        self._clocks: list[Durations[GpuPlace]] = []
        self._gpus: dict[GpuPlace, GpuState] = {}
        self._named: set[str] | None = None
        self._lock = threading.Lock()

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job without equal ranks."""
        if self._job.spec.gpus < 2 or self._job.record.rehearsal:
            return []
        return [threading.Thread(target=self._follow, name="slow ranks", daemon=True)]

    def add_gpus(self, host: str, item: Mapping[str, Any]) -> None:
        """Add a host's report about its GPUs. Ignores impossible values, and GPUs that are not the gang's."""
        try:
            lines = msgspec.convert(item.get("gpus"), ready(list[_GpuLine]))
        except (msgspec.ValidationError, OverflowError):
            return
        granted = {gpu for grant in self._job.lease.grants if grant.host == host for gpu in grant.gpus}
        now_s = time.monotonic()
        with self._lock:
            for line in lines:
                if line.index in granted:
                    self._gpus[host, line.index] = line.state(now_s, is_row_pending=self._is_row_pending(host, line))

    def look(self) -> None:
        """Ask every host that answers what its ranks have marked, and name those that are slow."""
        job, members = self._job, self._job.members
        if members != self._members:
            self._members = members
            self._marked, self._clocks, self._told = [], [], {}
        hosts = [host for host in members if job.links.is_open(host)]
        told = job.links.each(
            lambda agent: agent.call("gang.progress", job=job.lease.job, timeout_s=ASK_TIMEOUT_S).value, hosts
        )
        now_s = time.monotonic()
        seats = self._seats()
        host_of, marked = self._marks(told.ok)
        self._marked = self._kept(self._marked, Durations(now_s, marked), now_s)
        by_rank = {seat.rank: seat.role for seat in seats}
        equal = _grouped({rank: (by_rank.get(rank, ""), self._generation(host)) for rank, host in host_of.items()})
        for slow in slow_ranks(self._marked, equal, for_s=self._for_s, least=LEAST_S):
            self._name_rank(slow, host_of[slow.part], seats)
        self._look_at_clocks(now_s, seats)

    def _look_at_clocks(self, now_s: float, seats: Sequence[RankSeat]) -> None:
        with self._lock:
            fresh = {place: gpu for place, gpu in self._gpus.items() if now_s - gpu.at_s <= 2 * self.every_s + 1.0}
        periods = {place: gpu.clock_period for place, gpu in fresh.items() if place[0] in self._members}
        known = {place: period for place, period in periods.items() if period is not None}
        self._clocks = self._kept(self._clocks, Durations(now_s, known), now_s)
        equal = _grouped({place: self._generation(place[0]) for look in self._clocks for place in look.by_part})
        for slow in slow_ranks(self._clocks, equal, for_s=self._for_s):
            host, gpu = slow.part
            state = fresh.get(slow.part)
            if state is not None and state.throttle:
                rank, title = self._rank_with(host, gpu, seats)
                why = reasons(state, [other for place, other in fresh.items() if place != slow.part])
                self._name(f"{host}/{rank}", host, words_of_gpu(title, host, gpu, slow, why, self._for_s))

    def _marks(self, told: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, float]]:
        """Return rank → its host, and rank → its marked time, of ranks that finished steps since the last look.

        A program writes the values. In an elastic gang, each host may have any rank: a rank that two hosts report is
        left out.
        """
        host_of: dict[int, str] = {}
        marked: dict[int, float] = {}
        counts: dict[int, int] = {}
        twice = set[int]()
        for host, said in told.items():
            for rank, files in self._job.seating.own(host, said["ranks"]):
                progress = files.get("progress")
                took_s, count = _own_part(progress if isinstance(progress, dict) else {})
                if took_s is None:
                    continue
                if rank in host_of:
                    twice.add(rank)
                host_of[rank], counts[rank] = host, count
                if count != self._told.get(rank):
                    marked[rank] = took_s
        self._told.update(counts)
        return host_of, {rank: took_s for rank, took_s in marked.items() if rank not in twice}

    def _seats(self) -> Sequence[RankSeat]:
        """Return the gang's ranks that have a GPU: parameter servers and evaluators are nobody's equals."""
        spec = self._job.spec
        found = seats_of(self._job.lease.members, spec.roles, one_per_host=spec.one_per_host)
        return [seat for seat in found if seat.has_gpu]

    def _kept(self, looks: list[Durations[Any]], new: Durations[Any], now_s: float) -> list[Durations[Any]]:
        return [*(look for look in looks if now_s - look.at_s <= 1.5 * self._for_s), new]

    def _generation(self, host: str) -> str:
        found = self._job.inventory.by_name.get(host)
        return "" if found is None else found.generation

    def _is_row_pending(self, host: str, line: _GpuLine) -> bool:
        """Return whether the host reported before the start that bad rows of this GPU's memory wait for a reset."""
        found = self._job.hardware.get(host)
        return found is not None and any(gpu.index == line.index and gpu.retirement_pending for gpu in found.gpus)

    def _rank_with(self, host: str, gpu: int, seats: Sequence[RankSeat]) -> tuple[int, str]:
        """Return the number and the title of the rank that has a GPU; -1 and the GPU's own name if that is not one."""
        gpus = next((list(grant.gpus) for grant in self._job.lease.members if grant.host == host), [])
        here = [seat for seat in seats if seat.host == host]
        if self._job.seating.most is None and gpu in gpus and len(here) == len(gpus):
            seat = here[gpus.index(gpu)]
            return seat.rank, seat.title
        return -1 - gpu, f"GPU {gpu}"

    def _name_rank(self, slow: Slow[int], host: str, seats: Sequence[RankSeat]) -> None:
        gpu = self._gpu_of(slow.part, host, seats)
        with self._lock:
            own = self._gpus.get((host, gpu), GpuState()) if gpu is not None else GpuState()
            equals = [state for place, state in self._gpus.items() if place != (host, gpu)]
        title = next((seat.title for seat in seats if seat.rank == slow.part), f"rank {slow.part}")
        text = words_of_rank(title, host, slow, reasons(own, equals), self._for_s)
        self._name(f"{host}/{slow.part}", host, text)

    def _gpu_of(self, rank: int, host: str, seats: Sequence[RankSeat]) -> int | None:
        gpus = next((list(grant.gpus) for grant in self._job.lease.members if grant.host == host), [])
        here = [seat.rank for seat in seats if seat.host == host]
        if self._job.seating.most is not None or len(here) != len(gpus) or rank not in here:
            return None  # which GPU an elastic rank has, or whether it has several, is not known
        return gpus[here.index(rank)]

    def _name(self, who: str, host: str, text: str) -> None:
        """Name a rank: an event, a warning of the job, a notification, and a note about the host. Once an attempt."""
        job = self._job
        if self._named is None:
            self._named = _named_before(job)
        if who in self._named or len(self._named) >= MOST_NAMED or self._stop.is_set():
            return
        self._named.add(who)
        job.note(text, warning=job.record.attempt, host=host, slow=who)
        known = job.inventory.by_name.get(host)
        if known is not None:
            with suppress(StateError, OSError):
                Machines(job.home).note_slow(known.machine, host, job.inventory.source, text)
        tell(job, "slow", reason=text)

    def _follow(self) -> None:
        while not self._stop.wait(self.every_s):
            with suppress(*OUTLIVED):  # the head has no thread for a moment
                self.look()


class _GpuLine(msgspec.Struct):
    """A host's report about one GPU; see `gpurun.node.gpus`."""

    index: int
    mean: float = 0.0
    sm_mhz: int | None = None
    throttle: list[str] = []
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None

    def state(self, now_s: float, *, is_row_pending: bool) -> GpuState:
        return GpuState(
            self.mean, self.sm_mhz, tuple(self.throttle), self.pcie_width, self.pcie_max_width, self.pcie_generation,
            self.pcie_max_generation, is_row_pending, now_s,
        )  # fmt: skip


def _own_part(progress: Mapping[str, Any]) -> tuple[float | None, int]:
    """Return the time of a step's marked work, None if a program did not write a duration; and how many there were."""
    took_s, count = progress.get("compute_s"), progress.get("computed")
    if type(count) is not int or not is_duration(took_s):
        return None, 0
    return float(took_s or 0.0), count


def _grouped(keys: Mapping[Any, object]) -> Iterable[Collection[Any]]:
    """Return the parts that have the same key, together."""
    groups: dict[object, list[Any]] = {}
    for part, key in keys.items():
        groups.setdefault(key, []).append(part)
    return groups.values()


def _named_before(job: SupervisedJob) -> set[str]:
    """Return whom an earlier supervisor of this attempt has named."""
    told = (event for event in EventTail(job.folder.events).new() if event.get("kind") == "note")
    return {str(event["slow"]) for event in told if "slow" in event and event.get("warning") == job.record.attempt}

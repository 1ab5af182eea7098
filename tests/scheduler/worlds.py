"""A small cluster in virtual time: a stream of gangs comes and goes, and every pass is handed back what it kept."""

import heapq
from dataclasses import dataclass, field

from gpurun.jobs.record import Kept
from gpurun.scheduler.model import Gang, Inventory, Policy, Running, Snapshot
from gpurun.scheduler.passes import schedule


@dataclass
class World:
    """Runs passes until the gangs it is asked about have started.

    Attributes:
        lasts: how long each gang runs once it is granted.
        arrivals: gangs by the time of their submission, the soonest first.
        began: when each gang was granted.
    """

    inventory: Inventory
    policy: Policy
    lasts: dict[str, float]
    arrivals: list[Gang]
    unusable: dict[str, str] = field(default_factory=dict)
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    queue: dict[str, Gang] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ends: list[tuple[float, str]] = field(default_factory=list)
    now_s: float = 0.0

    def run_until(self, wanted: set[str], latest_s: float) -> bool:
        """Returns True if all of `wanted` have started by `latest_s`."""
        wake_s = None
        while not wanted <= set(self.began):
            times = [self.ends[0][0]] if self.ends else []
            times += [self.arrivals[0].submitted_s] if self.arrivals else []
            times += [wake_s] if wake_s is not None else []
            if not times or min(times) > latest_s:
                return False
            self.now_s = min(times)
            self._until_now()
            wake_s = self._pass()
        return True

    def hand_back(self, kept: Kept | None) -> Kept | None:
        """What the caller of a pass stores, and gives to the next one."""
        return kept

    def _until_now(self) -> None:
        while self.ends and self.ends[0][0] <= self.now_s:
            del self.running[heapq.heappop(self.ends)[1]]
        while self.arrivals and self.arrivals[0].submitted_s <= self.now_s:
            gang = self.arrivals.pop(0)
            self.queue[gang.id] = gang

    def _pass(self) -> float | None:
        running, queue = tuple(self.running.values()), tuple(self.queue.values())
        found = schedule(Snapshot(self.inventory, running, queue, self.unusable, self.taken, self.now_s), self.policy)
        assert not found.preempts, "the world has no gang that may be stopped"
        self._no_gpu_twice(found)
        for gang, placement in found.starts:
            del self.queue[gang.id]
            self.running[gang.id] = Running(gang.but(kept=None), placement, self.now_s, self.now_s)
            self.began[gang.id] = self.now_s
            heapq.heappush(self.ends, (self.now_s + self.lasts[gang.id], gang.id))
        for job, gang in self.queue.items():
            self.queue[job] = gang.but(kept=self.hand_back(found.kept.get(job)))
        return found.wake_s

    def _no_gpu_twice(self, found) -> None:
        placements = [run.placement for run in self.running.values()] + [placement for _, placement in found.starts]
        used = [(grant.host, gpu) for placement in placements for grant in placement.grants for gpu in grant.gpus]
        assert len(used) == len(set(used))
        kept = [kept.placement for kept in found.kept.values()] + list(found.reserved.values())
        held = [(grant.host, gpu) for placement in kept for grant in placement.grants for gpu in grant.gpus]
        assert len(held) == len(set(held)), "the same GPUs are held for two gangs"

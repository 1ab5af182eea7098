"""What `gpurun.supervisor.watch` has of its own, in virtual time: eyes without threads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gang_head import Head

from gpurun.jobs.record import FirstFailure
from gpurun.supervisor.verdict.causes import Cause, first_cause
from gpurun.supervisor.verdict.decide import ContainerEnd
from gpurun.supervisor.verdict.hang import Hang

SETTLED_S = 40.0
"""Longer than anything that `decide` waits for: after so long without news it is asked only when there are some."""


class Watchers:
    """Stands for `gpurun.supervisor.watch.Watchers`. To wait is what lets time go by."""

    def __init__(self, job: Head, _stop: object) -> None:
        self._head = job
        self.engine_out_s = job.engine_out_s

    @property
    def exits(self) -> Mapping[str, ContainerEnd]:
        return self._head.exits.copy()

    @property
    def down_since(self) -> Mapping[str, float]:
        return self._head.down_since.copy()

    def watch(self, hosts: Sequence[str]) -> None:
        self._head.watch(hosts)

    def forget(self, hosts: Collection[str]) -> None:
        for host in hosts:
            self._head.exits.pop(host, None)
            self._head.down_since.pop(host, None)

    def wait(self, most_s: float) -> None:
        """A poll; fewer of them while nothing can have changed."""
        world = self._head.world
        quiet_s = world.now_s - world.changed_s
        if quiet_s > SETTLED_S and not self._head.down_since:
            most_s = max(most_s, world.next_s() - world.now_s)
        elif quiet_s > 2.0:
            most_s = 1.0 if quiet_s < 6.0 else 2.5
        world.advance(world.now_s + most_s, to_change=True)
        world.look()


class HealthWatch:
    """Stands for `gpurun.supervisor.health.HealthWatch`."""

    def __init__(self, job: Head, _stop: object, _slow: object) -> None:
        self._head = job

    def threads(self, hosts: Iterable[str]) -> list[Any]:
        return []

    def fatal(self) -> Cause | None:
        found = [cause for cause in self._head.causes if cause.fatal and cause.host in self._head.members]
        return min(found, key=lambda cause: cause.at_s, default=None)

    def forget(self, hosts: Collection[str]) -> None:
        self._head.causes = [cause for cause in self._head.causes if cause.host not in hosts]

    def first(self, lines: list[str], own: list[str], *, hangs: bool) -> Cause | None:
        """One more look at every host that answers; one that is silent takes the call's whole time."""
        world, links = self._head.world, self._head.links
        silent = [host for host in self._head.members if links.of(host).state == "silent"]
        world.sleep(5.0 if silent else 0.1)
        for host in self._head.members:
            if links.is_open(host) and world.hosts[host].is_reachable:
                self._head.causes += [cause for cause in world.hosts[host].causes if cause not in self._head.causes]
        return first_cause(tuple(self._head.causes), lines, own, now_s=world.now_s, hangs=hangs)

    def heard(self, _told: object) -> None:
        pass

    def idle_end(self) -> None:
        """Return nothing: no GPU's use is simulated."""

    def close(self) -> None:
        """No GPU was ever busy."""


class HangWatch:
    """Stands for `gpurun.supervisor.hang.HangWatch`."""

    def __init__(self, job: Head) -> None:
        self._limit_s = job.spec.hang_timeout_s

    def hung(self, silent_s: float, *, is_heard: bool) -> Hang | None:
        is_hung = is_heard and self._limit_s is not None and silent_s >= self._limit_s
        return Hang(f"no rank has printed for {self._limit_s:g} s") if is_hung else None


class Members:
    """Stands for `gpurun.supervisor.elastic.Members`."""

    def __init__(self, job: Head, _stop: object, on_join: object) -> None:
        self._head = job

    def threads(self) -> list[Any]:
        return []

    def lose(self, failures: Mapping[str, FirstFailure]) -> None:
        self._head.world.judge_leave(failures)
        self._leave(list(failures), failures)

    def release(self, hosts: Collection[str]) -> None:
        self._leave(list(hosts), ())

    def _leave(self, hosts: list[str], failed: Collection[str]) -> None:
        self._head.world.leave(hosts)
        self._head.lease = self._head.world.lease
        self._head.amend(granted=self._head.lease.members, avoid=self._head.record.avoiding(failed))


class Idle:
    """Stands for threads whose work is not simulated: checkpoints and outputs."""

    def __init__(self, *_: object) -> None:
        pass

    def thread(self) -> Idle:
        return self

    def threads(self) -> list[Any]:
        return []

    def end(self, end: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def keep(self) -> None:
        pass


def others_answer(job: Head) -> bool:
    """Whether any host outside the gang answers. They do unless the head is cut off."""
    world = job.world
    if not world.has_others:
        return False
    is_cut = world.head_is_cut
    world.sleep(5.0 if is_cut else 0.4)
    return not is_cut

"""The gang of a simulated world: its ranks, their containers, and a launcher with manners of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gang_plan import Plan
from gang_world import Host, World

from gpurun.launch.output import Line
from gpurun.supervisor.verdict.decide import FORSAKEN_S

LAUNCHER_KILLS_S = 10.0
BY_ITSELF = ("itself", "in its wake", "its script was killed")
"""Why a rank may have failed that nobody and nothing else has ended."""


@dataclass(eq=False)
class Rank:
    host: str
    number: int
    ended_s: float | None = None
    code: int | None = None
    is_cut_off: bool = False
    why: str = ""
    is_stalled: bool = False
    is_told: bool = False


class GangWorld(World):
    """A world with a gang in it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.ranks: list[Rank] = []

    def begin(self) -> None:
        super().begin()
        plan = self.plan
        self.ranks = [
            Rank(name, at * plan.gpus + gpu) for at, name in enumerate(self.hosts) for gpu in range(plan.gpus)
        ]
        self.noticed: Rank | None = None
        self.launcher_lines: list[Line] = []
        self.launcher_code: int | None = None
        self.has_lost_a_rank = self.has_hung = self.retold = False
        for rank in self.ranks:
            spread_s = self.between(0.0, plan.spread_s, "spread", rank.number)
            self.in_attempt(plan.length_s + spread_s, self._finish, rank)

    def written_s(self) -> float:
        """When rank 0 wrote to its outputs last: it does so all the time."""
        return self.now_s if self.ranks[0].ended_s is None else self.ranks[0].ended_s

    @property
    def has_launcher(self) -> bool:
        return self.plan.launcher != "none"

    @property
    def launcher_lives(self) -> bool:
        return self.first.box.ended_s is None

    def of(self, host: str) -> list[Rank]:
        return [rank for rank in self.ranks if rank.host == host]

    # -- ranks ----------------------------------------------------------------------------------------------

    def _finish(self, rank: Rank) -> None:
        if not rank.is_stalled:
            self.end_rank(rank, 0, "itself")

    def end_rank(self, rank: Rank, code: int, why: str, *, is_cut_off: bool = False) -> None:
        if rank.ended_s is not None:
            return
        rank.ended_s, rank.code, rank.why, rank.is_cut_off = self.now_s, code, why, is_cut_off
        word = "is cut off" if is_cut_off else f"ends with {code}"
        self.note(f"rank {rank.number} on {rank.host} {word} ({why})")
        self.fallen_s = self.now_s
        self.tell(rank.host, "rank", rank)
        if code and not self.is_elastic:
            self._pull_down(rank)
        if self.launcher_lives and self.hosts[rank.host].has_power:
            self.in_attempt(self.between(0.05, 0.5, "notice", rank.number), self._launcher_notices, rank)

    def _pull_down(self, failed: Rank) -> None:
        """The others wait in a collective for ever, or fail because a peer has gone."""
        if self.has_lost_a_rank or self.now_s - self.began_s >= self.plan.length_s:
            return
        self.has_lost_a_rank = True
        for rank in self.ranks:
            if rank.ended_s is not None:
                continue
            rank.is_stalled = True
            way = self.chance("wake", rank.number)
            if way < 0.6 and failed.why != "notice":
                near = way < 0.35
                delay_s = self.between(0.02 if near else 0.5, 0.4 if near else 8.0, "wake", rank.number, "s")
                self.in_attempt(delay_s, self.end_rank, rank, 1, "in its wake")
        self.tick_hang()

    def tick_hang(self) -> None:
        if self.plan.hang_s is not None:
            self.in_attempt(self.plan.hang_s + 1.0, self.change)

    @property
    def is_training(self) -> bool:
        return any(rank.ended_s is None and not rank.is_stalled for rank in self.ranks)

    # -- the launcher ---------------------------------------------------------------------------------------

    def _launcher_notices(self, rank: Rank) -> None:
        if not self.launcher_lives or not self.has_launcher:
            return
        if self.is_elastic:
            self._driver_notices(rank)
            return
        are_over = all(each.ended_s is not None and each.why != "power" for each in self.ranks)
        if self.plan.launcher == "hangs":
            return
        if self.plan.launcher == "forgets":
            if are_over:
                self._launcher_ends(0)
        elif rank.code and self.noticed is None:
            self.noticed = rank
            self._break_off()
        elif are_over:
            self.noticed = min((each for each in self.ranks if each.code), key=lambda each: each.ended_s, default=None)
            self._launcher_done()

    def _break_off(self) -> None:
        for rank in self.ranks:
            if rank.ended_s is None and self.chance("heeds", rank.number) < 0.7:
                self.in_attempt(self.between(0.1, 1.0, "143", rank.number), self.end_rank, rank, 143, "launcher")
        self.in_attempt(LAUNCHER_KILLS_S, self._launcher_kills)
        self._launcher_done()

    def _launcher_kills(self) -> None:
        if self.launcher_lives:
            for rank in self.ranks:
                if self.hosts[rank.host].has_power:
                    self.end_rank(rank, 137, "launcher", is_cut_off=True)
            self._launcher_done(at_once=True)

    def _launcher_done(self, *, at_once: bool = False) -> None:
        if not at_once and any(rank.ended_s is None or rank.why == "power" for rank in self.ranks):
            return
        failed = self.noticed
        if failed is None:
            code = 1 if self.plan.launcher == "exits 1" else 0
        else:
            code = failed.code or 1
            number = failed.number
            if self.plan.launcher == "names another":
                number = (number + 1) % len(self.ranks)
            self.launcher_lines = [
                Line(None, "stderr", f"Process name: {number}"), Line(None, "stderr", f"Exit code: {code}")
            ]  # fmt: skip
        self.in_attempt(self.between(0.1, 1.0, "launcher ends"), self._launcher_ends, code)

    def _launcher_ends(self, code: int) -> None:
        if self.launcher_lives:
            self.launcher_code = code
            self.end_box(self.first, code, "launcher")

    def _driver_notices(self, rank: Rank) -> None:
        """Elastic: a host on which a rank failed is not used again; the others go on while there are enough."""
        if rank.code:
            for other in self.of(rank.host):
                delay_s = self.between(0.1, 2.0, "black", other.number)
                self.in_attempt(delay_s, self.end_rank, other, 143, "launcher")
        black = {each.host for each in self.ranks if each.code} | set(self.lease.apart)
        left = [each for each in self.ranks if each.host not in black]
        if len(left) < (self.plan.least or 0):
            for each in left:
                self.in_attempt(self.between(0.1, 1.0, "few", each.number), self.end_rank, each, 143, "launcher")
            self.launcher_lines = [Line(None, "stderr", "too few slots are left")]
            self.in_attempt(2.0, self._launcher_ends, 1)
        elif any(each.ended_s is None for each in left):
            return
        elif self.plan.launcher == "hangs":
            self.in_attempt(FORSAKEN_S + 1.0, self.change)
        else:
            self.in_attempt(0.5, self._launcher_ends, 1 if self.plan.launcher == "exits 1" else 0)

    def leave(self, hosts: list[str]) -> None:
        """The supervisor has hosts leave an elastic gang: the driver ends their ranks, the fence their containers."""
        self.lease = replace(self.lease, apart=(*self.lease.apart, *hosts))
        self.note(f"{', '.join(hosts)} left the gang")
        for name in hosts:
            for rank in self.of(name):
                self.in_attempt(0.7, self.end_rank, rank, 143, "left")
            self.in_attempt(3.0, self.end_box, self.hosts[name], 137, "left")
        for rank in self.ranks:
            if rank.ended_s is not None and self.launcher_lives:
                self.in_attempt(1.0, self._launcher_notices, rank)
                break

    # -- containers, engines, hosts -------------------------------------------------------------------------

    def end_box(
        self, host: Host, code: int | None, why: str, *, is_oom: bool = False, is_removed: bool = False
    ) -> None:
        box = host.box
        if box.ended_s is not None:
            return
        box.ended_s, box.code, box.why, box.is_oom, box.is_removed = self.now_s, code, why, is_oom, is_removed
        self.note(f"the container on {host.name} ends with {code} ({why})")
        self.fallen_s = self.now_s
        for rank in self.of(host.name):
            self.end_rank(rank, 137, why, is_cut_off=True)
        if host is self.first and self.has_launcher:
            for rank in self.ranks:
                rank.is_stalled = True
            self.tick_hang()
        self.tell(host.name, "box")

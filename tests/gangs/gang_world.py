"""The truth about one gang in virtual time: the clock, the hosts and how they are reached, and what people ask for.

No thread, no file, no real clock. `gang_ranks` adds ranks, containers and the launcher, `gang_events` what happens to
them, and `gang_checks` what must hold. What a supervisor knows of all this is in `gang_head`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from gang_plan import Plan

from gpurun.jobs.record import CancelRequest, JobRecord, State
from gpurun.jobs.spec import Grant
from gpurun.leases.lease import Lease
from gpurun.state.boot import ClockReading, HeadBoot
from gpurun.state.hosts import Cordon
from gpurun.supervisor.verdict.causes import Cause

GRACE_S = 4.0
BACK_WITHIN_S = 5.0
"""After a cut of the head's network its hosts can be reached again, one after the other, within this time."""


class Killed(BaseException):
    """The supervisor is killed: what it had in memory is lost."""


@dataclass(eq=False)
class Box:
    """The job's container on a host."""

    ended_s: float | None = None
    code: int | None = None
    is_oom: bool = False
    is_removed: bool = False
    why: str = ""


@dataclass(eq=False)
class Host:
    name: str
    index: int
    box: Box = field(default_factory=Box)
    has_power: bool = True
    off_s: float | None = None
    has_engine: bool = True
    engine_began_s: float | None = None
    cuts: int = 0
    cut_since_s: float | None = None
    late_s: float = 0.0
    slow_s: float = 0.0
    is_claimed: bool = True
    has_outputs: bool = False
    wrongs: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    @property
    def is_reachable(self) -> bool:
        return self.has_power and not self.cuts


class World:
    """One gang's history. `record`, `lease` and `request` are what is on the head's disk."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now_s = 1000.0
        self.wall_ahead_s = 0.0
        self.head: Any = None
        self.violations: list[str] = []
        self.history: list[str] = []
        self.request: CancelRequest | None = None
        self.asked_s: float | None = None  # when an end was asked for first
        self.wished_s: float | None = None  # the same, but for what was withdrawn
        self.drained: list[str] = []
        self.stop_errors = self.fence_errors = self.copy_errors = 0
        self.copied_s: float | None = None
        self.lost: set[str] = set()
        self.cordons: dict[str, Cordon] = {}
        self.head_is_cut = False
        self.changed_s = self.disturbed_s = self.now_s
        self.ends: list[tuple[int, State]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()
        self.record = JobRecord(
            "j-00000001", "gang", "alice", 1000, "/inventory", plan.hosts * plan.gpus, State.QUEUED, 0.0, 0.0
        )
        self.hosts: dict[str, Host] = {}

    # -- the head's clock -----------------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """The head's wall clock, which people and time servers set."""
        return self.now_s + self.wall_ahead_s

    def clocks(self) -> ClockReading:
        return ClockReading("boot", self.now_s, self.wall_s)

    # -- time -----------------------------------------------------------------------------------------------

    def chance(self, *what: object) -> float:
        """A number from 0 to 1 that depends on the seed and on what it is for, not on what else happens."""
        return crc32(f"{self.plan.seed} {self.record.attempt} {what}".encode()) / 2**32

    def between(self, low: float, high: float, *what: object) -> float:
        return low + (high - low) * self.chance(*what)

    def engine_late_s(self, host: str) -> float:
        """How long the engine takes to tell that its container has ended. Ranks that tell of themselves tell before."""
        is_late = self.plan.tells and self.chance("slow engine", host) < 0.2
        return self.between(0.2, 12.0, "slow engine", host, "s") if is_late else 0.0

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now_s + max(0.0, delay_s), next(self._count), do, arguments))

    def in_attempt(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """As `after`, unless the attempt is over by then."""
        attempt = self.record.attempt

        def do_if() -> None:
            if self.record.attempt == attempt and self.record.state in (State.RUNNING, State.STOPPING):
                do(*arguments)

        self.after(delay_s, do_if)

    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else self.now_s + 60.0

    def sleep(self, for_s: float) -> None:
        self.advance(self.now_s + for_s)

    def advance(self, until_s: float, *, to_change: bool = False) -> None:
        """Let time go by. Raises Killed in the supervisor that dies meanwhile."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, do, arguments = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, at_s)
            before_s = self.changed_s
            if self.head is not None:
                self.head.log_copy.hear_lines()
            do(*arguments)
            if to_change and self.changed_s != before_s:
                until_s = min(until_s, self.now_s + 0.05)
        self.now_s = max(self.now_s, until_s)

    def note(self, text: str) -> None:
        self.history.append(f"{self.now_s - 1000.0:8.2f}  {text}")

    def broken(self, text: str) -> None:
        self.note(f"!!! {text}")
        self.violations.append(text)

    def change(self) -> None:
        """Something changed that the supervisor can see."""
        self.changed_s = self.now_s

    def disturb(self) -> None:
        """What happened takes time to get over: connections, a supervisor."""
        self.disturbed_s = self.now_s

    # -- an attempt -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An attempt enters RUNNING, on hosts that answer, preferably those that did not fail it before."""
        plan, number = self.plan, self.record.attempt + 1
        avoid = set(self.record.avoid)
        spare = [f"h{index}" for index in range(8)]
        dead = {name for name, host in self.hosts.items() if not host.is_reachable or not host.has_engine}
        out = self.lost | self.cordons.keys()
        names = sorted(spare, key=lambda name: (name in out, name in dead, name in avoid, name))[: plan.hosts]
        self.hosts = {name: Host(name, index) for index, name in enumerate(names)}
        grants = tuple(Grant(name, tuple(range(plan.gpus))) for name in names)
        self.lease = Lease(
            self.record.id, number, "alice", 1000, "pascal", ("r1",), grants, 40000, self.now_s, "/inventory"
        )
        self.first.has_outputs = True
        self.record = self.record.on(HeadBoot("boot", self.wall_ahead_s)).but(
            state=State.RUNNING, attempt=number, started_s=self.wall_s, granted=grants, reached="containers",
            outcome=None, ladder=False, reason="", first_failure=None, restart=None,
        )  # fmt: skip
        self.began_s = self.fallen_s = self.cut_s = self.now_s
        self.most_late_s = 0.0
        self.said: list[str] = []
        self.drained_s: float | None = None
        self.request, self.asked_s, self.wished_s, self.drained = None, None, None, []
        self.head_is_cut = False
        self.disturb()
        self.change()
        self.note(f"attempt {number} runs on {', '.join(names)}")
        if plan.limit_s is not None:
            self.in_attempt(plan.limit_s, self._limit_passes)
        self.in_attempt(500.0, self._give_up)

    @property
    def is_elastic(self) -> bool:
        return self.plan.least is not None

    @property
    def first(self) -> Host:
        return next(iter(self.hosts.values()))

    @property
    def has_others(self) -> bool:
        """Whether a host outside the gang would answer. Hosts that have left it are outside."""
        return self.plan.has_others or any(self.hosts[name].has_power for name in self.lease.apart)

    def is_left(self, host: str) -> bool:
        return host in self.lease.apart

    def _limit_passes(self) -> None:
        self.ask_for_end(None)

    def _give_up(self) -> None:
        self.note("a person cancels what would train for ever")
        self.disturb()
        self.ask_for_end(CancelRequest("cancel", "bob", self.now_s))

    def ask_for_end(self, request: CancelRequest | None) -> None:
        if request is not None and not (self.request and self.request.kind == "cancel"):
            self.request = request
        self.asked_s = self.now_s if self.asked_s is None else self.asked_s
        self.wished_s = self.now_s if self.wished_s is None else self.wished_s
        self.change()

    # -- how hosts are reached ------------------------------------------------------------------------------

    def tell(self, host: str, kind: str, what: object = None) -> None:
        if self.head is not None:
            self.head.hears(host, kind, what)

    def reach(self, host: Host) -> None:
        """Whether a host can be reached has changed."""
        self.disturb()
        self.cut_s = self.now_s
        if self.head is not None and self.hosts.get(host.name) is host:
            self.head.reach_changed(host.name)

    def _uncut(self, hosts: list[Host], *, of_head: bool) -> None:
        if of_head and hosts == list(self.hosts.values()):  # not one that began in an attempt before
            self.head_is_cut = False
            self.note("the head has its network back")
            self.disturb()
        for host in hosts:
            late_s = self.between(0.0, BACK_WITHIN_S, "back", host.name) if of_head else 0.0
            self.after(late_s, self._uncut_one, host)

    def _uncut_one(self, host: Host) -> None:
        host.cuts -= 1
        if not host.cuts:
            host.cut_since_s = None
        self.reach(host)

    def cut_off(self, hosts: list[Host], for_s: float, *, of_head: bool) -> None:
        for host in hosts:
            host.cuts += 1
            if host.cut_since_s is None:
                host.cut_since_s = self.now_s
            self.reach(host)
        self.after(for_s, lambda: self._uncut(hosts, of_head=of_head))

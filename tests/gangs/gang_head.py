"""What a supervisor of the simulated gang knows, hears and does: the same parts as a real one has, without threads.

The real `life.live` and `watch.watch` run on these. A killed supervisor loses all of it; its successor begins anew with
what is on the head's disk, and hears everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gang_events import EventfulWorld
from gang_links import STEP_S, SYN_S, Links
from gang_log import LogCopy
from gang_stop import HeadOutputs, Leases
from gang_world import GRACE_S

from gpurun.facts import Hardware
from gpurun.jobs.record import CancelRequest, State, check_way
from gpurun.launch.launchers.direct import TASKS
from gpurun.launch.launchers.horovod import GLOO
from gpurun.leases.lease import Lease
from gpurun.remote.agent import DEAD_AFTER_S
from gpurun.state.clock import HeadClock
from gpurun.supervisor.links import CONNECT_S
from gpurun.supervisor.ranks import Seating
from gpurun.supervisor.verdict.causes import Cause
from gpurun.supervisor.verdict.decide import ContainerEnd
from gpurun.supervisor.watch import ENGINE_BACK_S

PAUSE_S = 1.0


class Head:
    """A supervisor's memory; stands for `gpurun.supervisor.job.SupervisedJob`."""

    damage = None
    gives_back = False

    def __init__(self, world: EventfulWorld) -> None:
        self.world = world
        self.clock = HeadClock(world.clocks, is_synchronised=lambda: True)
        self.record = world.record.on(self.clock.boot)
        self.lease: Lease = world.lease
        self._lease: Lease | None = None
        plan = world.plan
        self.spec = SimpleNamespace(
            min_gpus=plan.least, roles=None, time_limit_s=plan.limit_s, max_restarts=plan.max_restarts, image="image",
            command=("train",), env={}, mounts=(), workdir=None, workdir_read_only=True, left_out=(),
            grace_s=GRACE_S, hang_timeout_s=plan.hang_s, outputs="/outputs", keeps_outputs=True,
            writes_beside=False, horovod=SimpleNamespace(autotune=False, gloo_timeout_s=None),
            controller="gloo", reforms=False, one_per_host=False, is_live_elastic=plan.least is not None,
            retry=plan.retry,
        )  # fmt: skip
        self.launcher = GLOO if world.has_launcher else TASKS
        self.spec.launcher = self.launcher.name
        self.folder = SimpleNamespace(path=Path("folder"), log=Path("log"))
        self.drains = SimpleNamespace(hosts=lambda members: [host for host in world.drained if host in members])
        self.events = SimpleNamespace(emit=lambda *_, **__: None)
        self.began_s = world.now_s
        self.home = self.store = world  # what is on the head's disk
        self.state_id = "state"
        self.leases, self.lock, self.lost = Leases(world), None, None
        self.links = Links(self)
        self.hardware: dict[str, Hardware] = {}
        self.reports = self.log_copy = LogCopy(self)
        self.outputs = HeadOutputs(self)
        self.exits: dict[str, ContainerEnd] = {}
        self.down_since: dict[str, float] = {}
        self.engine_out_s: dict[str, float] = {}
        self.engine_out_since: dict[str, float] = {}
        self.causes: list[Cause] = []
        self.watched: set[str] = set()

    # -- what the steps of a job's life use -----------------------------------------------------------------

    def _of_lease(self) -> tuple[str, ...]:
        if self._lease is not self.lease:
            self._lease, self._members = self.lease, tuple(grant.host for grant in self.lease.members)
        return self._members

    members = property(_of_lease)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(grant.host for grant in self.lease.grants)

    @property
    def seating(self) -> Seating:
        return Seating.of(self.lease.members, self.spec)

    @property
    def ran_s(self) -> float | None:
        return None if self.record.started_s is None else self.clock.elapsed_s(self.record.started_s)

    def request(self) -> CancelRequest | None:
        return self.world.request

    def told(self) -> None:
        """Nobody follows."""

    def note(self, text: str, **_: object) -> None:
        self.world.said.append(text)
        self.world.note(f"supervisor: {text}")

    def follow_log(self, hosts: Iterable[str]) -> None:
        """Everything is followed from the connection on."""

    def move(self, state: State, **changes: object) -> State:
        check_way(self.record.id, self.world.record.state, state)
        self._write(state=state, **changes)
        return state

    def amend(self, **changes: object) -> None:
        self._write(**changes)

    def _write(self, **changes: object) -> None:
        """As `gpurun.jobs.folder.JobFolder` keeps a record."""
        self.record = self.world.record.on(self.clock.boot).but(**changes)
        self.world.record = self.record.on(self.clock.boot_now())

    # -- connections ----------------------------------------------------------------------------------------

    def watch(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            self.watched.add(host)
            if not self.links.is_open(host):
                self._died(host)

    def reach_changed(self, host: str) -> None:
        link = self.links.of(host)
        if self.world.hosts[host].is_reachable:
            if link.state == "silent":
                link.state = "up"
                for sent_s, kind, what in link.waiting:
                    self._send(host, kind, what, sent_s)
                link.waiting.clear()
        elif link.state == "up":
            link.state = "silent"
            link.heard_s = self.world.now_s - 3.0 * self.world.chance("heard", host)
            self._after(link.heard_s + DEAD_AFTER_S - self.world.now_s, self._if_silent, host, link.heard_s)

    def _if_silent(self, host: str, heard_s: float) -> None:
        link = self.links.of(host)
        if link.state == "silent" and link.heard_s == heard_s:
            self.lose_connection(host)

    def lose_connection(self, host: str) -> None:
        link = self.links.of(host)
        if link.state == "up":
            link.heard_s = self.world.now_s
        link.state, link.epoch = "down", link.epoch + 1
        link.waiting.clear()
        if host in self.watched:
            self._died(host)

    def _died(self, host: str) -> None:
        if host in self.members:
            self.down_since.setdefault(host, self.links.of(host).heard_s)
            self.world.change()
            self._try_to_reach(host)

    def _try_to_reach(self, host: str, at_s: float = 0.0) -> None:
        """One attempt to connect after the other. TCP asks again after 1 and 3 s; nobody hears what comes between.

        Args:
            at_s: how long the attempt has lasted.
        """
        if host not in self.members or self.record.state is not State.RUNNING:
            return
        if self.links.is_open(host):
            self.connected(host)
            return
        self.links.answers.asks(host)
        if self.world.hosts[host].is_reachable:
            self.links.accepts(host)
            self._after(STEP_S + self.world.hosts[host].slow_s, self._if_reachable, host)
        else:
            next_s = next((next_s for next_s in SYN_S if at_s < next_s < CONNECT_S), None)
            self._after((next_s or CONNECT_S + PAUSE_S) - at_s, self._try_to_reach, host, next_s or 0.0)

    def _if_reachable(self, host: str) -> None:
        if self.world.hosts[host].is_reachable and self.record.state is State.RUNNING:
            self.connected(host)
        else:
            self._try_to_reach(host)

    def connected(self, host: str) -> None:
        """The host answers again: all that it knows is asked for again."""
        link = self.links.of(host)
        self.links.answers.answered(host)
        self.down_since.pop(host, None)
        if link.state != "up":
            link.state = "up"
            self.world.change()
            self.world.disturb()
            self._tell_all(host)

    def _tell_all(self, host: str) -> None:
        there = self.world.hosts[host]
        for rank in self.world.of(host):
            self.hears(host, "start", rank)
            if rank.ended_s is not None:
                self.world.retold = True
                self.hears(host, "rank", rank)
        for cause in there.causes:
            self.hears(host, "cause", cause)
        if there.box.ended_s is not None:
            self.hears(host, "box", None)

    # -- news -----------------------------------------------------------------------------------------------

    def hears(self, host: str, kind: str, what: object) -> None:
        """A host has something to tell."""
        link = self.links.of(host)
        if kind == "rank" and link.state == "down":
            return
        if link.state == "up":
            self._send(host, kind, what, self.world.now_s)
        elif link.state == "silent" and self.world.hosts[host].has_power:
            link.waiting.append((self.world.now_s, kind, what))

    def _send(self, host: str, kind: str, what: Any, sent_s: float) -> None:
        link, there = self.links.of(host), self.world.hosts[host]
        poll_s = 0.1 * self.world.chance("poll", host, kind, getattr(what, "number", 0))
        link.next_s = max(link.next_s, self.world.now_s + poll_s + 0.02 + there.late_s)
        self._after(link.next_s - self.world.now_s, self._arrives, host, link.epoch, kind, what, sent_s)

    def _arrives(self, host: str, epoch: int, kind: str, what: Any, sent_s: float) -> None:
        link = self.links.of(host)
        if link.epoch != epoch or host not in self.members:
            return
        if link.state == "silent":
            link.waiting.append((sent_s, kind, what))
            return
        self.world.change()
        if kind in ("start", "rank"):
            self.log_copy.take(host, kind, what, sent_s)
        elif kind == "cause":
            if what not in self.causes:
                self.causes.append(what)
        else:
            self._ask_container(host)

    def _ask_container(self, host: str) -> None:
        there, now_s = self.world.hosts[host], self.world.now_s
        if not self.links.is_open(host) or there.box.ended_s is None or host not in self.members:
            return
        box = there.box
        if there.has_engine:
            if not box.is_removed and now_s < box.ended_s + self.world.engine_late_s(host):
                self._after(PAUSE_S, self._ask_container, host)
                return
            if host not in self.exits:
                code = None if box.is_removed else box.code
                self.exits[host] = ContainerEnd(now_s, code, box.is_oom, box.is_removed, "", now_s - box.ended_s)
                self.world.change()
            if host == self.hosts[0]:
                self._after(0.3, self.log_copy.launcher_done)
            return
        self.engine_out_s[host] = now_s
        since_s = self.engine_out_since.setdefault(host, now_s)
        if host not in self.exits and self.world.chance("known code", host) < 0.5:
            self.exits[host] = ContainerEnd(now_s, box.code, engine_out="no such socket")
            self.world.change()
        elif host not in self.exits and now_s - since_s >= ENGINE_BACK_S:
            self.exits[host] = ContainerEnd(now_s, engine_out="no such socket")
            self.world.change()
        else:
            self._after(PAUSE_S, self._ask_container, host)

    def _after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Unless the supervisor has been killed by then, or the attempt is over."""
        attempt = self.lease.attempt

        def do_if() -> None:
            if self.world.head is self and self.world.record.attempt == attempt:
                do(*arguments)

        self.world.after(delay_s, do_if)

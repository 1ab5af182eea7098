"""What happens to the gang of a simulated world: each event of a plan by its kind, a method of the same name."""

from __future__ import annotations

from gang_plan import FOR_GOOD, Event
from gang_ranks import GangWorld, Rank
from gang_world import Host, Killed

from gpurun.jobs.record import CancelRequest, State
from gpurun.scheduler.explain import may_lose
from gpurun.supervisor.verdict.causes import Cause


class EventfulWorld(GangWorld):
    """A world in which the events of its plan happen."""

    def begin(self) -> None:
        super().begin()
        for event in self.plan.events:
            if event.attempt == self.record.attempt:
                self.in_attempt(event.at_s, self._happen, event)

    def _happen(self, event: Event) -> None:
        if self.record.state is not State.RUNNING and event.kind not in (
            "kill",
            "clock",
            "cut",
            "link",
            "stop error",
            "fence error",
            "copy error",
        ):
            return
        self.note(f"> {event.kind} (place {event.place}, value {event.value:g})")
        host = list(self.hosts.values())[event.place % len(self.hosts)]
        rank = self.ranks[event.place % len(self.ranks)]
        getattr(self, f"_{event.kind.replace(' ', '_')}")(event, host, rank)

    def _fail(self, event: Event, host: Host, rank: Rank) -> None:
        self.end_rank(rank, int(event.value), "itself")

    _signal = _fail

    def _script(self, event: Event, host: Host, rank: Rank) -> None:
        self.end_rank(rank, 137, "its script was killed", is_cut_off=True)

    def _hang(self, event: Event, host: Host, rank: Rank) -> None:
        if self.now_s - self.began_s < self.plan.length_s:
            self.has_hung = True
            for each in self.ranks:
                each.is_stalled = True
            self.tick_hang()

    def _container(self, event: Event, host: Host, rank: Rank) -> None:
        host.wrongs.append("container")
        way = int(event.value)
        code = (1, None, 137, 137)[way]
        self.end_box(host, code, "somebody", is_removed=way == 1, is_oom=way == 2)

    def _engine(self, event: Event, host: Host, rank: Rank) -> None:
        if not host.has_engine or not host.has_power:
            return
        host.wrongs.append("engine")
        host.has_engine = False
        if self.chance("notes", host.name) < 0.5:
            for each in self.of(host.name):
                self.in_attempt(self.between(0.0, 0.4, "sigterm", each.number), self.end_rank, each, 143, "engine")
        code = (0, 137, 143, None)[int(4 * self.chance("engine's code", host.name))]
        self.in_attempt(self.between(0.3, 1.0, "stops", host.name), self.end_box, host, code, "engine")
        if event.value < FOR_GOOD:
            self.after(event.value, self._engine_back, host)

    def _engine_back(self, host: Host) -> None:
        host.has_engine, host.engine_began_s = host.has_power, self.now_s
        if self.hosts.get(host.name) is host:
            self.tell(host.name, "box")

    def _power(self, event: Event, host: Host, rank: Rank) -> None:
        if not host.has_power:
            return
        host.wrongs.append("power")
        host.has_power = host.has_engine = False
        host.off_s = self.now_s
        for each in self.of(host.name):
            self.end_rank(each, 137, "power", is_cut_off=True)
        self.end_box(host, 137, "power")
        self.reach(host)
        if event.value < FOR_GOOD:
            self.after(event.value, self._boot, host)

    def _boot(self, host: Host) -> None:
        self.note(f"{host.name} is back")
        host.has_power = host.has_engine = True
        host.off_s = None
        host.engine_began_s = self.now_s
        self.reach(host)

    def _link(self, event: Event, host: Host, rank: Rank) -> None:
        if event.value > 10.0 or host.cuts:  # together with the head's own cut it is long
            host.wrongs.append("link")
        self.cut_off([host], event.value, of_head=False)

    def _cut(self, event: Event, host: Host, rank: Rank) -> None:
        if not self.head_is_cut:
            self.head_is_cut = True
            for cut_off in (host for host in self.hosts.values() if host.cuts):
                cut_off.wrongs.append("link")
            self.cut_off(list(self.hosts.values()), event.value, of_head=True)

    def _again(self, event: Event, host: Host, rank: Rank) -> None:
        if self.head is not None and host.is_reachable:
            self.disturb()
            self.cut_s = self.now_s
            self.head.lose_connection(host.name)

    def _late(self, event: Event, host: Host, rank: Rank) -> None:
        host.late_s = event.value
        self.disturb()
        self.most_late_s = max(self.most_late_s, event.value)

    def _slow(self, event: Event, host: Host, rank: Rank) -> None:
        """Its agents start later from now on. Those that run answer as before."""
        host.slow_s = event.value

    def _kill(self, event: Event, host: Host, rank: Rank) -> None:
        if self.head is not None:
            self.head = None
            self.retold = True
            raise Killed(event.value)

    def _clock(self, event: Event, host: Host, rank: Rank) -> None:
        """Somebody, or a time server, sets the head's wall clock."""
        self.wall_ahead_s += event.value

    def _cancel(self, event: Event, host: Host, rank: Rank) -> None:
        self.ask_for_end(CancelRequest("cancel", "bob", self.now_s))

    def _preempt(self, event: Event, host: Host, rank: Rank) -> None:
        request = CancelRequest("preempt", "bob", self.now_s, reason="another goes first")
        self.ask_for_end(request)
        if event.value < FOR_GOOD:
            self.in_attempt(event.value, self._withdraw, request)

    def _withdraw(self, request: CancelRequest) -> None:
        if self.request is request:
            self.note("the preemption is withdrawn")
            self.request, self.wished_s = None, None

    def _drain(self, event: Event, host: Host, rank: Rank) -> None:
        self.drained_s = self.now_s
        if self.is_elastic and may_lose(self.lease.members, [host.name], self.plan.least):
            host.wrongs.append("drained")
            self.drained.append(host.name)
            self.change()
        else:
            self.ask_for_end(CancelRequest("preempt", "root", self.now_s, reason="drained", drain=(host.name,)))

    def _fatal(self, event: Event, host: Host, rank: Rank) -> None:
        self._cause(
            Cause(self.now_s, rank.host, "gpu-lost", "the GPU is lost", "lost", "hardware", True, 0, rank.number)
        )
        self.hosts[rank.host].wrongs.append("hardware")
        self.in_attempt(self.between(0.1, 4.0, "fatal"), self.end_rank, rank, 1, "itself")

    def _hint(self, event: Event, host: Host, rank: Rank) -> None:
        self._cause(Cause(self.now_s, rank.host, "xid", "Xid 31", "Xid 31", "program", False, 0, rank.number))
        self.in_attempt(self.between(0.0, 1.0, "hint"), self.end_rank, rank, 134, "itself")

    def _oom(self, event: Event, host: Host, rank: Rank) -> None:
        self._cause(Cause(self.now_s, rank.host, "oom", "out of memory", "oom-kill", "host", rank=rank.number))
        self.hosts[rank.host].wrongs.append("memory")
        self.in_attempt(0.05, self.end_rank, rank, 137, "itself")

    def _cause(self, cause: Cause) -> None:
        self.hosts[cause.host].causes.append(cause)
        self.tell(cause.host, "cause", cause)

    def _stop_error(self, event: Event, host: Host, rank: Rank) -> None:
        self.stop_errors += int(event.value)

    def _fence_error(self, event: Event, host: Host, rank: Rank) -> None:
        self.fence_errors += int(event.value)

    def _copy_error(self, event: Event, host: Host, rank: Rank) -> None:
        self.copy_errors += int(event.value)

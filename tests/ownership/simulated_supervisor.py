"""A supervisor that is real, as a process that pauses wherever others can act.

The life of the job, the watch, its decisions, the ladder, the fence, and what becomes of lost hosts are the product's
own code, from `gpurun.supervisor.__main__` on. It runs as a greenlet: to sleep, or to ask a host, is to let others act.
Left out is what moves bytes: images, code, logs, outputs, pre-flight. What ranks say is simulated in tests/gangs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ownership_files as files
import simulated_hosts
from greenlet import getcurrent, greenlet

from gpurun.errors import GpurunError, HostUnreachable
from gpurun.head import spawn
from gpurun.jobs.record import FirstFailure, State
from gpurun.launch.container import container_name
from gpurun.leases import allocate
from gpurun.leases.lease import remember
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.supervisor import __main__ as process
from gpurun.supervisor import life, start, stop, watch
from gpurun.supervisor import start as elsewhere
from gpurun.supervisor import stop as last_lines
from gpurun.supervisor.hosts import claim, claim_of, connect_hosts, raise_first
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.stop import found_again
from gpurun.supervisor.verdict.decide import ContainerEnd
from gpurun.supervisor.verdict.ends import GangEnd


class Crashed(BaseException):
    """A process was killed."""


class Supervisor:
    """One process. `step` does the next piece of its work.

    Attributes:
        wish: what the world wants of the running gang: ``""``, ``"end"``, ``"fail"``, ``"grow"`` or ``"lose"``.
    """

    def __init__(self, world: Any, head: Any, uid: int, name: str, descriptor: int) -> None:
        self.world, self.head, self.uid, self.name = world, head, uid, name
        self.clock = world.new_clock()
        self.wish = ""
        self.job: SupervisedJob | None = None
        self.members: Members | None = None
        self.descriptor = descriptor
        self.descriptors = {files.opened(descriptor)}
        self.agents: list[simulated_hosts.Agents] = []
        self.busy = False
        self._is_killed = False
        self._work = greenlet(self._main)

    def step(self) -> bool:
        """False once it has exited.

        Raises:
            Crashed: it was killed within the step.
        """
        self._work.parent = getcurrent()
        self._work.switch()
        return not self._work.dead

    def pause(self) -> None:
        """Let others act. From within the process."""
        if self._is_killed:
            raise Crashed
        if getcurrent() is self._work:
            self._work.parent.switch()

    def kill(self) -> None:
        """Nothing of it runs any more."""
        self._is_killed = True
        if self._work and getcurrent() is not self._work:
            self._work.parent = getcurrent()
            with suppress(Crashed):
                self._work.throw(Crashed)

    def _main(self, *_: object) -> None:
        """As `gpurun.supervisor.__main__.main`: an error is printed, and its lease is an orphan."""
        home = self.head.home
        try:
            process.carry(home, LeaseLock(self.descriptor, LeaseStore(home).path(self.name)))
        except GpurunError as error:
            self.world.note(f"supervisor {self.name} gives up: {error!r}")

    # -- what the world stands in for

    def begin(self, home: Any, lease: Any, lock: LeaseLock) -> SupervisedJob:
        """Stands for the constructor of `SupervisedJob`."""
        self.job = SupervisedJob(home, lease, lock, clock=self.clock)
        self.job.__dict__["log_copy"] = Log()
        self.job.told = self._told  # type: ignore[method-assign]
        return self.job

    def _told(self) -> None:
        """Stands for what is said to whoever follows the job."""
        if self.job is not None:
            record = self.job.record
            self.world.note(f"  {self.name}.{record.attempt} is {record.state.value} {record.story(self.clock())}")


class Log:
    """Stands for a log of which all that was printed is on the head."""

    ranks: tuple[()] = ()
    has_launchers_log = True
    launcher_line_s = last_line_s = 0.0

    def wait_for_launcher(self, _silent_s: float) -> bool:
        return True

    def _nothing(self, *_: object) -> None:
        """No byte is moved."""

    start = follow = forget = take_rest = close = _nothing


def real_supervisors(world: Any, replace: Any) -> None:
    """The product's own life of a job, with the simulation's eyes, hands and clock."""

    def begun(home: Any, lease: Any, lock: LeaseLock) -> SupervisedJob:
        return world.acting.begin(home, lease, lock)  # type: ignore[no-any-return]

    replace(process, "SupervisedJob", begun)
    steps = {**life.STEPS, State.PREPARING: prepare, State.STARTING: launch}
    replace(life, "STEPS", MappingProxyType(steps))
    replace(
        elsewhere, "check_hosts", lambda _, hosts: dict.fromkeys(hosts)
    )  # nothing is wrong with a host that answers
    for name, stand_in in (
        ("Watchers", Watchers),
        ("HealthWatch", Health),
        ("CheckpointWatch", Idle),
        ("OutputsWatch", Idle),
        ("MeetingWatch", Idle),
        ("SlowWatch", Idle),
        ("Members", Members),
    ):
        replace(watch, name, lambda *arguments, stand_in=stand_in, **named: stand_in(world.acting, *arguments, **named))
    replace(watch, "Links", world._agents)
    replace(last_lines, "LogCopy", lambda *_, **__: Log())


# -- steps before the watch: the real order of claims, containers and records


def probe(job: SupervisedJob, hosts: Collection[str]) -> None:
    """Now and then NVML does not answer: then the UUIDs of a host are unknown."""
    for host in hosts:
        machine = job.links.machine(host)  # type: ignore[attr-defined]
        if machine is not None and not machine.world.chance(0.1):
            job.hardware[host] = simulated_hosts.hardware(machine)


def prepare(job: SupervisedJob) -> State:
    connect_hosts(job)
    job.reach("files")
    job.check_requests(ladder=False)
    probe(job, job.hosts)
    raise_first(claim(job, job.hosts))
    return job.move(State.STARTING)


def launch(job: SupervisedJob) -> State:
    connect_hosts(job)
    if not start._is_launched(job):
        probe(job, job.hosts)
        job.reach("containers")
        create(job, job.hosts)
        raise_first(start.go(job, plan_of(job), job.hosts[1:]).failed)
        job.check_requests(ladder=False)
        raise_first(start.go(job, plan_of(job), job.hosts[:1]).failed)
    return job.move(State.RUNNING, started_s=job.clock(), placements=0, start_failures=())


def create(job: SupervisedJob, hosts: Collection[str]) -> None:
    name = container_name(job.lease.job, job.lease.attempt)
    created = job.links.each(lambda agent: agent.call("gang.create", name=name, claim=claim_of(job, agent.host)), hosts)
    raise_first(created.failed)


def plan_of(job: SupervisedJob) -> Any:
    return SimpleNamespace(first=SimpleNamespace(container=container_name(job.lease.job, job.lease.attempt)))


# -- the eyes of the watch


class Watchers:
    """Stands for `gpurun.supervisor.watch.Watchers`: one look at every host whenever it would wait."""

    def __init__(self, supervisor: Supervisor, job: SupervisedJob, _stop: object) -> None:
        self._supervisor, self._job, self._world = supervisor, job, supervisor.world
        self.exits: dict[str, ContainerEnd] = {}
        self.down_since: dict[str, float] = {}
        self.engine_out_s: dict[str, float] = {}

    def watch(self, hosts: Sequence[str]) -> None:
        """Every member is looked at."""

    def forget(self, hosts: Collection[str]) -> None:
        for host in hosts:
            self.exits.pop(host, None)
            self.down_since.pop(host, None)

    def wait(self, _most_s: float) -> None:
        supervisor, job = self._supervisor, self._job
        supervisor.pause()
        self._let_end(supervisor)
        job.links.open(job.members)
        for host in job.members:
            if not job.links.is_open(host):
                self.down_since.setdefault(host, self._world.now_s - job.links.silent_s(host))
                continue
            self.down_since.pop(host, None)
            if host not in self.exits and (end := self._ended(host)) is not None:
                self.exits[host] = end
        if supervisor.members is not None:
            supervisor.members.tend()

    def _let_end(self, supervisor: Supervisor) -> None:
        """What the world wants of the gang happens on its hosts."""
        wish, job = supervisor.wish, self._job
        ends = {"end": (job.hosts[0], 0), "fail": (job.hosts[-1], 1), "lose": (job.hosts[-1], 137)}
        if wish in ends:
            host, code = ends[wish]
            supervisor.wish = ""
            if (machine := job.links.machine(host)) is not None:  # type: ignore[attr-defined]
                machine.end(job.lease.job, job.lease.attempt, code)

    def _ended(self, host: str) -> ContainerEnd | None:
        job = self._job
        try:
            found = job.links.agent(host).call("gang.inspect", job=job.lease.job).value
        except HostUnreachable:
            return None
        mine = next((one for one in found if one["name"] == container_name(job.lease.job, job.lease.attempt)), None)
        if mine is None:
            return ContainerEnd(self._world.now_s, is_removed=True)
        return None if mine["status"] == "running" else ContainerEnd(self._world.now_s, mine["code"])


class Idle:
    """Stands for threads whose work is not simulated: checkpoints, outputs, hardware."""

    def __init__(self, *_: object) -> None:
        """Nothing is watched."""

    def thread(self) -> Idle:
        return self

    def threads(self, _hosts: Iterable[str] = ()) -> list[Any]:
        return []

    def start(self) -> None:
        """No thread."""

    def keep(self) -> None:
        """No checkpoint."""

    def end(self, _end: object) -> None:
        """Nothing was seen."""


class Health(Idle):
    def fatal(self) -> None:
        return None

    def first(self, _lines: object, _own: object, *, hangs: bool) -> None:
        return None

    def forget(self, _hosts: object) -> None:
        """Nothing was seen."""

    def heard(self, _told: object) -> None:
        """No rank says anything."""

    def idle_end(self) -> None:
        return None

    def close(self) -> None:
        """No GPU was ever busy."""


class Members:
    """Stands for `gpurun.supervisor.elastic.Members`, without its threads and without Horovod's driver."""

    def __init__(self, supervisor: Supervisor, job: SupervisedJob, _stop: object, on_join: object) -> None:
        self._supervisor, self._job = supervisor, job
        supervisor.members = self

    def threads(self) -> list[Any]:
        return []

    def give_up_joining(self) -> None:
        """Nobody joins beside the watch."""

    def lose(self, failures: Mapping[str, FirstFailure]) -> None:
        self._change(allocate.Allocator.put_apart, failures, avoid=failures)

    def release(self, hosts: Collection[str]) -> None:
        self._change(allocate.Allocator.put_apart, hosts)

    def tend(self) -> None:
        """Grow if that is wanted; fence who has left."""
        job, supervisor = self._job, self._supervisor
        if supervisor.wish == "grow":
            supervisor.wish = ""
            if job.spec.min_gpus is not None:
                self._grow()
        if job.lease.apart:
            self._fence_apart()

    def _change(self, change: Any, hosts: Iterable[str], *, avoid: Collection[str] = ()) -> None:
        job = self._job
        job.lease, job.lock = change(allocate.Allocator(job.home), (job.lease, job.lock), tuple(hosts))
        job.amend(granted=job.lease.members, avoid=job.record.avoiding(avoid))

    def _grow(self) -> None:
        job = self._job
        (job.lease, job.lock), hosts = allocate.Allocator(job.home).grow(
            (job.lease, job.lock), job.inventory, now_s=job.clock()
        )
        if not hosts:
            return
        self._supervisor.world.note(f"{job.lease.job} grows to {', '.join(hosts)}")
        try:
            job.links.add(hosts, job.inventory)
            raise_first(job.links.open(hosts))
            probe(job, hosts)
            raise_first(claim(job, hosts))
            create(job, hosts)
            raise_first(start.go(job, plan_of(job), hosts).failed)
        except GangEnd as ended:
            refused = ended.end.refused
            self._change(allocate.Allocator.put_apart, hosts, avoid=() if refused else hosts)
            job.amend(refusals=remember(job.record.refusals, refused, now_s=job.clock()))
            return
        self._change(allocate.Allocator.take_in, hosts)

    def _fence_apart(self) -> None:
        job = self._job
        lease, leaving = job.lease, sorted(job.lease.apart)
        job.links.add(leaving, job.inventory)
        job.links.open(leaving)
        unproven = stop.fence(job.links, job.lease, leaving, state=job.state_id, outputs=True)
        fenced = [host for host in leaving if host not in unproven]
        if fenced:
            self._change(allocate.Allocator.let_go, fenced)
            found_again(job.home, lease, fenced)
            job.links.drop(fenced)
            spawn.Head(job.home, {}).run_pass(now_s=job.clock(), patience_s=None)

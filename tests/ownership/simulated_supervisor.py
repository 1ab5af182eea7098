"""A supervisor as a generator: the real steps of `gpurun.supervisor`, with a pause wherever others can act.

Decisions, records, leases, claims and fences are the product's own functions. Left out is what moves bytes: images,
code, logs, outputs, pre-flight. A supervisor that is killed is a generator that nobody continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import simulated_hosts

from gpurun.errors import GpurunError, HostFailure, StateError, StateUnavailable
from gpurun.head import spawn, waiter
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.launch.docker import container_name
from gpurun.leases import members
from gpurun.leases.refusals import remember
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state.identity import state_id
from gpurun.supervisor import life, start, stop
from gpurun.supervisor.ends import End, GangEnd, failed
from gpurun.supervisor.host_claims import claim, claim_of
from gpurun.supervisor.job import SupervisedJob, raise_first

Steps = Iterator[None]
FENCE_TRIES = 3
NO_LOG = SimpleNamespace(close=lambda: None)


class Supervisor:
    """One process. `step` does the next piece of its work.

    Attributes:
        wish: what the world wants of the running gang: ``""``, ``"end"``, ``"fail"``, ``"grow"`` or ``"lose"``.
    """

    def __init__(self, world: Any, head: Any, uid: int, name: str, descriptor: int) -> None:
        self.world, self.head, self.uid, self.name = world, head, uid, name
        self.wish = ""
        self.job: SupervisedJob | None = None
        self.descriptor = descriptor
        self.descriptors = {descriptor}
        self.agents: list[simulated_hosts.Agents] = []
        self.busy = False
        self._work = self._carry()

    def step(self) -> bool:
        """False once it has exited."""
        try:
            next(self._work)
        except StopIteration:
            return False
        except (
            GpurunError,
            OSError,
            KeyError,
            ValueError,
        ) as error:  # the real one prints it and exits: its lease is an orphan
            self.world.note(f"supervisor {self.name} gives up: {error!r}")
            return False
        return True

    def _carry(self) -> Steps:
        home, leases = self.head.home, LeaseStore(self.head.home)
        lease = leases.read(self.name)
        if lease is None:
            raise StateError("its lease is gone", job=self.name)
        lock = LeaseLock(self.descriptor, leases.path(self.name))
        rest = (lease, lock) if lease.lost else (yield from self._carry_job(SupervisedJob(home, lease, lock)))
        if rest is not None:
            yield
            yield from self._keep_asking(*rest)
            spawn.run_pass_and_start(home, now_s=self.world.now_s, environ={}, patience_s=None)

    def _carry_job(self, job: SupervisedJob) -> Any:
        if job.record.state.ended:
            return stop.lose_rest(job.home, job.lease, job.lock)
        self.job = job
        job.__dict__["log_copy"] = NO_LOG
        try:
            yield from self._live(job)
        except StateError:
            if not job.folder.record().state.ended:
                raise
            return stop.lose_rest(job.home, job.lease, job.lock)
        if "links" in job.__dict__:
            job.links.close()
        spawn.run_pass_and_start(job.home, now_s=self.world.now_s, environ={}, patience_s=None)
        if job.record.state is State.QUEUED:
            waiter.ensure_waiter(job.home, {})
        return job.lost

    def _live(self, job: SupervisedJob) -> Steps:
        steps = {
            State.PREPARING: self._prepare, State.STARTING: self._start, State.RUNNING: self._watch,
            State.STOPPING: self._stop,
        }  # fmt: skip
        state = job.record.state
        while not state.ended:
            yield
            try:
                if state in steps:
                    yield from steps[state](job)
                    state = job.record.state
                else:
                    state = life.STEPS[state](job)
            except GangEnd as ended:
                state = life._stopping(job, ended.end)
            except GpurunError as error:
                if job.record.state is not State.STOPPING:
                    state = life._stopping(job, failed(error, ladder=True).end)
                elif isinstance(error, StateUnavailable) or job.gives_back:
                    raise
            if state is State.QUEUED:
                return

    def _probe(self, job: SupervisedJob, hosts: Collection[str]) -> None:
        """Now and then NVML does not answer: then the UUIDs of a host are unknown."""
        for host in hosts:
            machine = job.links.machine(host)  # type: ignore[attr-defined]
            if machine is not None and not self.world.chance(0.1):
                job.hardware[host] = simulated_hosts.hardware(machine)

    def _prepare(self, job: SupervisedJob) -> Steps:
        job.connect()
        job.reach("files")
        yield
        job.check_requests(ladder=False)
        self._probe(job, job.hosts)
        raise_first(claim(job, job.hosts))
        yield
        job.move(State.STARTING)

    def _start(self, job: SupervisedJob) -> Steps:
        job.connect()
        if start._is_launched(job):
            job.move(State.RUNNING, started_s=self.world.now_s)
            return
        yield
        self._probe(job, job.hosts)
        job.reach("containers")
        yield
        self._create(job, job.hosts)
        yield
        raise_first(start.go(job, _plan(job), job.hosts[1:]).failed)
        yield
        job.check_requests(ladder=False)
        raise_first(start.go(job, _plan(job), job.hosts[:1]).failed)
        job.move(State.RUNNING, started_s=self.world.now_s)

    def _create(self, job: SupervisedJob, hosts: Collection[str]) -> None:
        name = container_name(job.lease.job, job.lease.attempt)
        raise_first(
            job.links.each(
                lambda agent: agent.call("gang.create", name=name, claim=claim_of(job, agent.host)), hosts
            ).failed
        )

    def _watch(self, job: SupervisedJob) -> Steps:
        while True:
            yield
            job.check_requests(ladder=True)
            wish, self.wish = self.wish, ""
            if wish == "end":
                raise GangEnd(End(State.SUCCEEDED, "", 0))
            if wish == "fail":
                raise failed(HostFailure("its kernel died", host=job.hosts[-1]))
            lost = [] if wish != "lose" else list(job.members[1:])[:1]
            job.links.open()
            lost += [host for host in job.members if host not in lost and not self._runs(job, host)]
            if lost and not self._can_lose(job, lost):
                raise failed(HostFailure("its container is gone", host=lost[0]))
            if lost:
                self._change(job, members.put_apart, lost)
            elif wish == "grow" and job.spec.min_gpus is not None:
                yield from self._grow(job)
            if job.lease.apart:
                yield
                self._fence_apart(job)

    @staticmethod
    def _runs(job: SupervisedJob, host: str) -> bool:
        """A host that cannot be reached for a moment is believed to train on."""
        if not job.links.is_open(host):
            return True
        states = [one["status"] for one in job.links.machine(host).inspect(job.lease.job)]  # type: ignore[attr-defined]
        return states == ["running"]

    @staticmethod
    def _can_lose(job: SupervisedJob, hosts: Collection[str]) -> bool:
        left = sum(len(grant.gpus) for grant in job.lease.members if grant.host not in hosts)
        return job.spec.min_gpus is not None and job.hosts[0] not in hosts and left >= job.spec.min_gpus

    @staticmethod
    def _change(job: SupervisedJob, change: Any, hosts: Collection[str], *, avoid: Collection[str] = ()) -> None:
        job.lease, job.lock = change(job.home, (job.lease, job.lock), tuple(hosts))
        job.amend(granted=job.lease.members, avoid=tuple(sorted({*job.record.avoid, *avoid})))

    def _grow(self, job: SupervisedJob) -> Steps:
        (job.lease, job.lock), hosts = members.grow(
            job.home, (job.lease, job.lock), job.inventory, now_s=self.world.now_s
        )
        if not hosts:
            return
        self.world.note(f"{job.lease.job} grows to {', '.join(hosts)}")
        yield
        try:
            job.links.add(hosts, job.inventory)
            raise_first(job.links.open(hosts))
            self._probe(job, hosts)
            raise_first(claim(job, hosts))
            yield
            self._create(job, hosts)
            yield
            raise_first(start.go(job, _plan(job), hosts).failed)
            yield
        except GangEnd as ended:
            refused = ended.end.refused
            self._change(job, members.put_apart, hosts, avoid=() if refused else hosts)
            job.amend(refusals=remember(job.record.refusals, refused, now_s=job.clock()))
            return
        self._change(job, members.take_in, hosts)

    def _fence_apart(self, job: SupervisedJob) -> None:
        leaving = sorted(job.lease.apart)
        job.links.add(leaving, job.inventory)
        job.links.open(leaving)
        unproven = stop.fence(job.links, job.lease, leaving, state=job.state_id, outputs=True)
        fenced = [host for host in leaving if host not in unproven]
        if fenced:
            self._change(job, members.let_go, fenced)
            stop.found_again(job.home, fenced)
            job.links.drop(fenced)
            spawn.run_pass_and_start(job.home, now_s=self.world.now_s, environ={}, patience_s=None)

    def _stop(self, job: SupervisedJob) -> Steps:
        suspects = {host for host in job.hosts if host in job.record.avoid}
        lost: Mapping[str, GpurunError] = {}
        pending = set() if job.record.reached == "nothing" else set(job.hosts)
        for tries in range(1000):
            if not pending:
                break
            job.links.open(sorted(pending))
            containers = job.record.reached == "containers"
            unproven = stop.fence(job.links, job.lease, pending, state=job.state_id, containers=containers)
            pending = set(unproven)
            if pending and (pending <= suspects or tries >= FENCE_TRIES):
                lost = unproven
                break
            yield
        stop._finish(job, lost)

    def _keep_asking(self, lease: Any, lock: LeaseLock) -> Steps:
        home = self.head.home
        links = stop.Links(
            stop.cluster_of(JobStore(home).get(lease.job), lease)[0], [grant.host for grant in lease.grants]
        )
        pending = set(links.targets)
        while pending:
            links.open(sorted(pending))
            pending &= set(stop.fence(links, lease, pending, state=state_id(home), outputs=True))
            yield
        links.close()
        stop.found_again(home, links.targets)
        LeaseStore(home).release(lock)


def _plan(job: SupervisedJob) -> Any:
    return SimpleNamespace(first=SimpleNamespace(container=container_name(job.lease.job, job.lease.attempt)))

"""A broken host ends no job: real passes and the real life of each job, on hosts that are broken in some way."""

from __future__ import annotations

import os
import time
from threading import Event
from types import SimpleNamespace

import pytest

from gpurun.errors import GpurunError, HostFailure, HostKeyMismatch, HostNotReady, HostUnreachable, NoRoom
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.remote.agent import RemoteOpFailed
from gpurun.state.hosts import Machine, Machines, Out
from gpurun.supervisor import job as job_module
from gpurun.supervisor import life
from gpurun.supervisor import start as elsewhere
from gpurun.supervisor.hosts import raise_first
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.verdict import causes
from gpurun.supervisor.verdict.ends import End, GangEnd, failed

HOSTS = tuple(f"h{number}" for number in range(1, 7))
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-6]": {}}}}
"""
BROKEN = {
    "dead": ("connect", lambda host: HostUnreachable("no route to host", host=host)),
    "another key": ("connect", lambda host: HostKeyMismatch("its key has changed", host=host)),
    "ssh_config": ("connect", lambda host: HostFailure("line 62: Bad configuration option: hostnam", host=host)),
    "full": ("prepare", lambda host: RemoteOpFailed("No space left on device: '/x'", kind="no-space", host=host)),
    "read-only": ("prepare", lambda host: RemoteOpFailed("Read-only file system", kind="read-only", host=host)),
    "not writable": ("prepare", lambda host: RemoteOpFailed("Permission denied", kind="denied", host=host)),
    "no Docker": ("bring", lambda host: HostNotReady("Docker does not answer", kind="no-docker", host=host)),
    "containers": ("create", lambda host: RemoteOpFailed("no such runtime: nvidia", kind="docker", host=host)),
}


class Cluster:
    """Six hosts, and the queue of one user. `broken`: what is wrong with which host."""

    def __init__(self, home):
        self.home, self.store = home, JobStore(home)
        self.broken, self.bad_jobs, self.ran = {}, {}, {}

    def submit(self, count, **wants):
        spec = JobSpec(**{"name": "n", "image": "i", "gpus": 4, "command": ("true",), **wants})
        inventory = self.home.parent / "inventory.yaml"
        return [self.store.create(spec, inventory=inventory, now_s=time.time()).id for _ in range(count)]

    def errors(self, job, step):
        """What goes wrong in a step of a job's start, by host."""
        bad = {host: BROKEN[what][1](host) for host, what in self.broken.items() if BROKEN[what][0] == step}
        if step == "create" and job.lease.job in self.bad_jobs:
            bad |= {host: error for host in job.hosts if (error := self.bad_jobs[job.lease.job](host))}
        return {host: error for host, error in bad.items() if host in job.hosts}

    def prepare(self, job):
        raise_first(self.errors(job, "connect"), kind="connection")
        for step in ("prepare", "bring"):
            raise_first(self.errors(job, step))
        return job.move(State.STARTING)

    def start(self, job):
        raise_first(self.errors(job, "create"))
        return job.move(State.RUNNING, started_s=1.0, placements=0, start_failures=())

    def watch(self, job):
        self.ran[job.lease.job] = job.hosts
        raise GangEnd(End(State.SUCCEEDED, "", 0))

    def look_at(self, home, inventory, hosts, **_):
        """Stands for the check that depends on no job."""
        now_s = time.time()
        found = {host: Out("check", self.broken[host], now_s) if host in self.broken else None for host in hosts}
        by_name = inventory.by_name
        Machines(home).note({by_name[host].machine: Machine(host, now_s, out=out) for host, out in found.items()})
        return found

    def pass_and_live(self):
        """One pass, and every attempt that it granted to its end; return how many those were."""
        granted = Allocator(self.home).run_pass(now_s=time.time()).granted
        for lease, lock in granted:
            with lock:
                life.live(SupervisedJob(self.home, lease, lock))
        return len(granted)

    def settle(self):
        """Run passes as long as they grant something."""
        while self.pass_and_live():
            pass

    def states(self):
        return [record.state.value for record in self.store.records(pytest.fail)]

    def outs(self):
        return {machine.name for machine in Machines(self.home).read(os.getuid()).values() if machine.out}

    def repair(self):
        """All hosts work again, and a waiter looks at them."""
        self.broken = {}
        inventory = SimpleNamespace(by_name={host: SimpleNamespace(machine=f"{host}:22") for host in HOSTS})
        self.look_at(self.home, inventory, sorted(self.outs()))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    found = Cluster(tmp_path / "home")
    steps = {State.PREPARING: found.prepare, State.STARTING: found.start, State.RUNNING: found.watch}
    monkeypatch.setattr(life, "STEPS", {**life.STEPS, **steps})
    monkeypatch.setattr(elsewhere, "look_at", found.look_at)
    return found


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_host_among_idle_ones_ends_no_job(cluster, what):
    count = 30 if what == "dead" else 9  # more than one round over six hosts
    cluster.broken = {"h3": what}
    jobs = cluster.submit(count)
    cluster.settle()
    assert cluster.states() == ["SUCCEEDED"] * count
    assert cluster.outs() == {"h3"}
    records = [cluster.store.get(job).record() for job in jobs]
    assert [record.restarts for record in records] == [0] * count
    assert sum(record.attempt for record in records) == count + 1, "one attempt found it, and no other was placed there"
    cluster.repair()
    (job,) = cluster.submit(1, constraints=Constraints(hosts=("h3",)))
    cluster.settle()
    assert cluster.ran[job] == ("h3",)


@pytest.mark.parametrize("broken", [HOSTS[:3], HOSTS], ids=["half", "all"])
@pytest.mark.parametrize("what", BROKEN)
def test_jobs_wait_while_hosts_are_broken_and_run_after_the_repair(cluster, what, broken):
    cluster.broken = dict.fromkeys(broken, what)
    cluster.submit(4)
    large = cluster.submit(2, gpus=16)
    cluster.settle()
    assert {cluster.store.get(job).record().state for job in large} == {State.QUEUED}
    assert "FAILED" not in cluster.states()
    cluster.repair()
    cluster.settle()
    assert cluster.states() == ["SUCCEEDED"] * 6


def test_a_job_that_waits_says_why_and_counts_no_restart(cluster):
    cluster.broken = dict.fromkeys(HOSTS, "ssh_config")
    (job,) = cluster.submit(1)
    cluster.settle()
    record = cluster.store.get(job).record()
    assert "line 62: Bad configuration option: hostnam" in record.story(time.time())
    assert (record.restarts, record.restart, record.avoid) == (0, None, ())


@pytest.mark.parametrize(
    "cause",
    [
        lambda host: HostNotReady(
            "the data set 'x' cannot be mounted: /data/x: no such folder", kind="no-mount", host=host
        ),
        lambda host: HostNotReady("the image is for arm64, this host runs x86_64", kind="architecture", host=host),
        lambda host: RemoteOpFailed(f"no device /dev/x on {host}", kind="docker", host=host),
    ],
    ids=["mount", "architecture", "docker"],
)
def test_a_job_that_no_host_can_start_ends_with_its_cause_and_takes_no_host_out(cluster, cause, monkeypatch):
    monkeypatch.setattr(causes, "LASTS_S", 0.0)
    bad, *_ = cluster.submit(1) + cluster.submit(10)
    cluster.bad_jobs[bad] = cause
    cluster.settle()
    assert sorted(cluster.states()) == ["FAILED", *["SUCCEEDED"] * 10]
    record = cluster.store.get(bad).record()
    assert (cluster.outs(), record.attempt, record.restarts, record.code) == (set(), 3, 0, 4)
    assert cause("h").message.split(" on ")[0] in record.reason and "a check finds no fault" in record.reason
    assert sum(host in record.reason for host in HOSTS) == 3


@pytest.mark.parametrize("gpus", [4, 12, 24])
@pytest.mark.parametrize("kind", ["prolog", "docker", ""])
def test_an_outage_that_passes_ends_no_job(cluster, kind, gpus):
    """All hosts fail for a moment in the same way, such as a server of licences that a prolog asks."""
    jobs = cluster.submit(5, gpus=gpus)
    cluster.bad_jobs = dict.fromkeys(jobs, lambda host: HostFailure("it does not answer", kind=kind, host=host))
    cluster.settle()
    assert (cluster.states(), cluster.outs()) == (["QUEUED"] * 5, set())


@pytest.mark.parametrize("kind", ["prolog", "engine", "denied", "no-tool", ""])
def test_what_no_job_brings_about_ends_none_however_long_it_lasts(cluster, monkeypatch, kind):
    """A server of licences that a prolog asks is off for a night: three sound hosts say so in the same words."""
    monkeypatch.setattr(causes, "LASTS_S", 0.0)
    jobs = cluster.submit(10)
    cluster.bad_jobs = dict.fromkeys(jobs, lambda host: HostFailure("no licence server", kind=kind, host=host))
    cluster.settle()
    records = [cluster.store.get(job).record() for job in jobs]
    assert {record.state for record in records} == {State.QUEUED} and cluster.outs() == set()
    assert all("no licence server" in record.story(time.time()) for record in records)
    assert sum(record.attempt for record in records) >= 3 * len(HOSTS) // 2, "each was tried on more hosts"


def test_one_host_whose_runtime_is_gone_ends_no_job(cluster):
    jobs = cluster.submit(13)
    broken = HostFailure("no sh", kind="no-command", host="h3")
    cluster.bad_jobs = dict.fromkeys(jobs, lambda host: broken if host == "h3" else None)
    cluster.settle()
    assert cluster.states() == ["SUCCEEDED"] * 13


def test_an_image_that_fits_on_no_host_waits_and_the_record_says_what_each_host_lacks(cluster):
    def full(host):
        error = NoRoom("its disk is too full", host=host)
        error.lacks_mib = 100 * int(host[1:])
        return error

    bad, *_ = cluster.submit(1) + cluster.submit(10)
    cluster.bad_jobs[bad] = full
    cluster.settle()
    assert sorted(cluster.states()) == ["QUEUED", *["SUCCEEDED"] * 10]
    record = cluster.store.get(bad).record()
    assert record.waits_for_restart(time.time()), "it is not placed again at full speed"
    lacks = {each.host: each.lacks_mib for each in record.start_failures}
    assert len(lacks) == 4 and all(lacks[host] == 100 * int(host[1:]) for host in lacks)
    assert cluster.outs() == set()


def test_a_failure_of_the_job_ends_it_at_once_also_beside_a_broken_host(cluster, monkeypatch):
    (job,) = cluster.submit(1, gpus=8)
    cluster.broken = {"h1": "containers"}

    def start(job):
        raise_first({**cluster.errors(job, "create"), "h2": GpurunError("the image cannot start sh")})

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, State.STARTING: start})
    cluster.settle()
    record = cluster.store.get(job).record()
    assert (record.state, record.attempt, record.start_failures) == (State.FAILED, 1, ())
    assert "the image cannot start sh" in record.reason


def test_a_check_that_fails_ends_no_job_and_blames_no_host(cluster, monkeypatch):
    def look_at(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(elsewhere, "look_at", look_at)
    cluster.broken = {"h1": "dead"}
    jobs = cluster.submit(6)
    cluster.settle()
    assert (cluster.states(), cluster.outs()) == (["SUCCEEDED"] * 6, set())
    said = "".join(cluster.store.get(job).events.read_text() for job in jobs)
    assert "gpurun could not check h1: [Errno 24] Too many open files" in said


def test_a_job_that_is_cancelled_during_the_check_does_not_wait_for_it(cluster, monkeypatch):
    (job,) = cluster.submit(1)
    go_on = Event()

    def look_at(*_, **__):
        cluster.store.get(job).ask_to_cancel(CancelRequest("cancel", "bob", 1.0))
        go_on.wait(60.0)
        return {}

    monkeypatch.setattr(elsewhere, "look_at", look_at)
    cluster.broken = dict.fromkeys(HOSTS, "dead")
    try:
        cluster.pass_and_live()
    finally:
        go_on.set()
    assert cluster.states() == ["CANCELLED"]


def test_a_gang_that_another_user_needs_does_not_wait_for_the_check(cluster, monkeypatch):
    """Only a pass decides on a preemption: somebody must run one."""
    (job,) = cluster.submit(1)
    folder, go_on, preempt = cluster.store.get(job), Event(), CancelRequest("preempt", "bob", 1.0)
    monkeypatch.setattr(SupervisedJob, "_must_look", lambda *_: go_on.is_set() is False)
    monkeypatch.setattr(job_module.Head, "run_pass", lambda *_, **__: folder.ask_to_cancel(preempt))
    waited = []

    def look_at(*_, **__):
        if not go_on.wait(10.0):
            waited.append("for the check")
        return {}

    monkeypatch.setattr(elsewhere, "look_at", look_at)
    cluster.broken = dict.fromkeys(HOSTS, "dead")
    try:
        cluster.pass_and_live()
    finally:
        go_on.set()
    assert (cluster.states(), waited) == (["QUEUED"], [])


def test_a_failure_of_the_head_itself_makes_the_job_wait(cluster, monkeypatch):
    def prepare(job):
        raise failed(HostNotReady("the head's Docker broke off"))

    monkeypatch.setattr(life, "STEPS", {**life.STEPS, State.PREPARING: prepare})
    (job,) = cluster.submit(1)
    cluster.settle()
    record = cluster.store.get(job).record()
    assert (record.state, record.restarts, record.start_failures) == (State.QUEUED, 0, ())
    assert record.story(record.restart.at_s - 3.0) == "is placed again in 3s: the head's Docker broke off"

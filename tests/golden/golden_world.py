"""One small state directory with all kinds of files in it, made by gpurun's own functions and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.content.tree import scan
from gpurun.content.workdir import write_code
from gpurun.doctor import bench
from gpurun.doctor.findings import Link
from gpurun.inventory.read import load_inventory
from gpurun.jobs.events import EventLog, Sent, write_sent
from gpurun.jobs.folder import JobFolder, write_use
from gpurun.jobs.record import (
    FirstFailure,
    GpuHolder,
    GpuUse,
    HostRefusal,
    Origin,
    OutputsLeft,
    RankUse,
    Restart,
    Setback,
    StartFailure,
    State,
)
from gpurun.jobs.spec import Constraints, Grant, JobSpec
from gpurun.jobs.store import JobStore, finish
from gpurun.launch.plan import make_plan
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease
from gpurun.leases.store import AllocatorLock, LeaseLock, LeaseStore
from gpurun.node.claim_rules import Claimant
from gpurun.scaling.model import Sample
from gpurun.state import clock, durable
from gpurun.state.hosts import Cordon, Cordons, Machine, Machines, Out
from gpurun.state.sharing import StateDirectory
from gpurun.studies.campaign_plan import CampaignPlan, MeasuredRate, RunEntry, RunRecord, end_of_run
from gpurun.studies.campaigns import CampaignFolder, CampaignStore
from gpurun.studies.store import Journal, SweepStore
from gpurun.studies.sweep_plan import Wish
from gpurun.studies.trials import JournalEntry
from gpurun.supervisor.links import freeze
from gpurun.supervisor.log import JobLog

GIVEN = {
    "inventory.yaml": """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, port: 1, ssh: paramiko}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks:
  r1: {hosts: {h1: {address: 127.0.0.1}, h2: {address: 127.0.0.2}}}
  r2: {hosts: {h3: {address: 127.0.0.3}, h4: {address: 127.0.0.4}, v1: {address: 127.0.0.5, generation: volta}}}
pools: {vision: {reservation: 4, limit: 12}}
""",
    "recipe.yaml": """\
name: net
image: i:1
gpus: 2
command: python3 train.py
launcher: torchrun
workdir: work
env: {LR: '0.1'}
time_limit: 1h
""",
    "wrong.yaml": "image: i:1\ngpus: two\ncommand: x\ngpu_per_host: 2\n",
    "broken.yaml": "version: 1\ndefaults: {generation: pascal, gpus: four}\n",
    "trace.csv": "submit_time_s,duration_s,gpus,job_id\n0,60,1,a\n5,60,16,b\n",
    "work/train.py": "print('loss')\n",
}  # fmt: skip
SPEC = JobSpec(
    "train", "i:1", 2, ("python3", "-u", "train.py"), image_id="sha256:" + "a" * 64, env={"LR": "0.1"}, project="cats"
)
ORIGIN = Origin("0.0.0", "3.11.0", "head", "c" * 40, "-one\n+two\n", 1)


Run = Callable[[str], tuple[int, str, str]]
"""Runs a command line; its exit code, stdout and stderr."""
Later = Callable[[float], None]
"""Lets seconds pass."""


class World:
    """Runs jobs without hosts, as their supervisors would."""

    def __init__(self, top: Path, later: Later) -> None:
        self.home, self.later, self.source = top / "state", later, top / "inventory.yaml"
        self.store, self.leases = JobStore(self.home), LeaseStore(self.home)
        self.held: list[LeaseLock] = []

    def submit(self, number: int, **changes: Any) -> JobFolder:
        """Queue a job with a known id."""
        (folder,) = self.store.create_many(
            [replace(SPEC, **changes)], inventory=self.source, now_s=clock.now_s(), ids=[f"j-a000000{number}"],
            origins=[ORIGIN],
        )  # fmt: skip
        self.later(10.0)
        return folder

    def start(self, folder: JobFolder) -> tuple[Lease, LeaseLock]:
        """Grant the job GPUs in a pass, and bring it to RUNNING."""
        ((lease, lock),) = Allocator(self.home).run_pass(now_s=clock.now_s()).granted
        events = EventLog(folder.events, clock=clock.now_s)
        inventory = load_inventory(self.source)
        events.emit("placement", generation=lease.generation, racks=lease.racks, hosts=[
            {"host": grant.host, "gpus": grant.gpus} for grant in lease.grants
        ])  # fmt: skip
        if folder.record().name == "good":  # one of them is enough: they are long
            freeze(folder, inventory, lease)
            plan = make_plan(
                claimant=Claimant(folder.id, lease.attempt, StateDirectory(self.home).id(), "ann", 7, "head"),
                spec=folder.spec(), grants=lease.grants, inventory=inventory, accounts={}, ssh_port=lease.ssh_port,
            )  # fmt: skip
            durable.write_record(folder.path / "plan.json", plan)
            write_sent(folder, lease.attempt, (Sent("ship", lease.grants[0].host, state="done", bytes=5, total=5),))
        for state in (State.PREPARING, State.STARTING, State.RUNNING):
            self.later(5.0)
            folder.move(state, **({"started_s": clock.now_s()} if state is State.RUNNING else {}))
            events.emit("state", state=state.value, attempt=lease.attempt, reason="")
        return lease, lock

    def log(self, folder: JobFolder, attempt: int, *lines: bytes, stream: str = "o") -> None:
        """Log what rank 0 has printed or reported."""
        log = JobLog(folder.log, attempt=attempt, now=clock.now_s)
        end = 0
        for line in lines:
            end += len(line)
            log.take_output("h1/0.1.1", 0, stream, end, line)
        log.close()

    def end(self, folder: JobFolder, lock: LeaseLock | None, outcome: State, **changes: Any) -> None:
        """Release the job's GPUs, and end its attempt."""
        self.later(600.0)
        use = GpuUse((RankUse(0, "h1", 0, "GPU-0", 9, 87.5, 99.0, 1000),), ((clock.now_s(), 87.5),), clock.now_s())
        write_use(folder, folder.record().attempt, use)
        record = folder.move(State.STOPPING, outcome=outcome, stopping_s=clock.now_s(), **changes)
        if lock is not None:
            with AllocatorLock(self.home).held():
                self.leases.release(lock)
        finish(self.store, record, now_s=clock.now_s())
        EventLog(folder.events, clock=clock.now_s).emit("state", state=outcome.value, reason=folder.record().reason)


def make(top: Path, run: Run, later: Later) -> None:
    """Make the state directory: jobs in every state, and all that commands and supervisors leave beside them."""
    world = World(top, later)
    StateDirectory(world.home).id()  # first: how many random names caches need depends on time
    for line in ("label h1 room=a", "set v1 gpus=2"):
        assert run(f"inventory {line} --yes")[0] == 0
    _ended_jobs(world, top)
    _machines(world)
    _sweep(world)
    _campaign(world)
    assert run("history")[0] == 0
    _live_jobs(world, run)
    for line in ("inventory cordon h2 --reason fan", "inventory drain v1 --reason move --deadline 1h", "cancel gone"):
        code, _, err = run(line)
        assert code == 0, err
    for lock in world.held:
        lock.close()


def _ended_jobs(world: World, top: Path) -> None:
    tree = scan(top / "work")
    spec = replace(SPEC, name="good", workdir=str(top / "work"), code=tree.digest, outputs="/out")
    (good,) = world.store.create_many(
        [spec], inventory=world.source, now_s=clock.now_s(), ids=["j-a0000001"], origins=[ORIGIN],
        codes={tree.digest: partial(write_code, tree=tree)},
    )  # fmt: skip
    _, lock = world.start(good)
    world.log(good, 1, b"loss 1\n", b"loss 0.5\n")
    world.log(good, 1, b'{"time": 1, "step": 7, "metrics": {"loss": 0.5}}\n', stream="m")
    good.outputs.mkdir()
    (good.outputs / "model").write_text("weights")
    world.end(
        good, lock, State.SUCCEEDED, code=0, checkpoint_s=clock.now_s(), outputs_left=OutputsLeft(1, ("h2",), ("h2",))
    )

    bad = world.submit(2, name="bad", max_restarts=1, pool="vision")
    _, lock = world.start(bad)
    failure = FirstFailure("h1: GPU 0: Xid 79", 0, "h1", 137, ("CUDA error",), "xid", "NVRM: Xid 79", cordon=True)
    world.end(
        bad, lock, State.QUEUED, first_failure=failure, reason=failure.reason, avoid=("h4",),
        restart=Restart(clock.now_s() + 610, 2, 2), setback=Setback(1, "xid", "", 0, 137, 3, 600.0), restarts=1,
    )  # fmt: skip
    later_failure = FirstFailure("rank 0 exited with 1", 0, "h1", 1, ("ValueError",), "rank")
    world.later(30.0)
    _, lock = world.start(bad)
    world.log(bad, 2, b"ValueError\n")
    world.end(bad, lock, State.FAILED, first_failure=later_failure, reason=later_failure.reason, code=1)

    slow = world.submit(3, name="slow", time_limit_s=600.0)
    _, lock = world.start(slow)
    world.end(slow, lock, State.TIMED_OUT, reason="ran for 10m00s, the limit", code=1)

    lost = world.submit(4, name="lost", gpus=8, constraints=Constraints(hosts=("h3", "h4")))
    lease, lock = world.start(lost)
    with AllocatorLock(world.home).held():
        _, kept = world.leases.abandon(lock, lease, ["h4"])
    world.held.append(kept)
    with Cordons(world.home).changing() as cordons:
        cordons["h4"] = Cordon("lost", "gpurun", clock.now_s(), "no answer", "timed out", machine="127.0.0.4:1")
    world.end(lost, None, State.FAILED, reason="h4 did not answer", code=4)


def _live_jobs(world: World, run: Run) -> None:
    runs = world.submit(5, name="runs", gpus=4, constraints=Constraints(hosts=("h1",)))
    _, lock = world.start(runs)
    world.held.append(lock)
    world.log(runs, 1, b"loss 2\n")
    world.held.append(world.start(world.submit(6, name="orphan", constraints=Constraints(hosts=("h2",))))[1])
    stops = world.submit(8, name="stops", gpus=2, constraints=Constraints(generations=("volta",)))
    world.held.append(world.start(stops)[1])
    assert run("cancel --no-wait stops")[0] == 0
    moved = world.submit(7, name="moved", gpus=2, constraints=Constraints(hosts=("h2",)), preemptible=True)
    _, lock = world.start(moved)
    assert run("requeue --no-wait moved")[0] == 0
    world.end(moved, lock, State.QUEUED, reason="preempted: ann put the job back into the queue")
    waits = world.submit(9, name="waits", gpus=12, priority=3, min_gpus=8, launcher="torchrun")
    holder = GpuHolder((0,), job="j-b0000001", user="bob", head="other", state="running")
    now_s = clock.now_s()
    waits.write(waits.record().but(
        refusals=(HostRefusal("h3", holder, now_s + 60, 30.0),), placements=1,
        start_failures=(StartFailure("h3", 1, "docker", "no", "Docker said no", now_s, now_s + 60),),
    ))  # fmt: skip
    world.submit(0, name="gone", gpus=16)


def _machines(world: World) -> None:
    now_s = clock.now_s()
    Machines(world.home).note({
        host.machine: Machine(
            host.name, now_s, f"id-{host.name}", Out("ssh", "no route", now_s, "look") if host.name == "h3" else None,
            str(world.source), 64 << 10, 32, now_s - 1,
        )
        for host in load_inventory(world.source).hosts
    })  # fmt: skip
    bench.BenchHistory(world.home).append(bench.Run(now_s, (Link("h1", "h2", 9.5, 20.0),)))


def _sweep(world: World) -> None:
    wish = Wish(grid={"lr": ("1", "2", "3")}, metric="loss:min", max_parallel=2)
    folder = SweepStore(world.home).create(wish.plan(replace(SPEC, name="net"), str(world.source), clock.now_s()), None)
    journal, at_s = Journal(folder), clock.now_s()
    journal.add(
        JournalEntry("asked", at_s, 0, job="j-a0000001", parameters={"lr": 1}),
        JournalEntry("asked", at_s, 1, job="j-a0000002", parameters={"lr": 2}),
        JournalEntry("reported", at_s + 1, 0, step=3, value=0.5),
        JournalEntry("ended", at_s + 2, 0, outcome="complete"),
        JournalEntry("ended", at_s + 2, 1, outcome="failed", reason="rank 0 failed"),
        JournalEntry("asked", at_s, 2, job="j-a0000005", parameters={"lr": 3}),
    )
    journal.close()


def _campaign(world: World) -> None:
    jobs = tuple(replace(SPEC, name="curve", gpus=gpus) for gpus in (1, 2))
    racks = {host.name: host.rack for host in load_inventory(world.source).hosts}
    plan = CampaignPlan("curve", jobs, str(world.source), 2, clock.now_s(), racks=racks, origin=ORIGIN)
    folder: CampaignFolder = CampaignStore(world.home).create(plan, None)
    records = []
    for gpus, rate in ((1, 50.0), (2, 90.0)):
        sample = Sample(
            (gpus,), ("r1",), 32, 1 << 20, 32 * gpus / rate, rate, (32 * gpus / rate,), gpus, job="j-a0000001"
        )
        measured = MeasuredRate("images_per_s", rate, (rate,), rate, rate)
        records.append(RunRecord(
            "horovod", gpus, 1, "j-a0000001", "measured", rate=measured, grants=(Grant("h1", tuple(range(gpus))),),
            held_s=60.0, ended_s=clock.now_s(), metrics={"loss": 0.5}, sample=sample,
        ))  # fmt: skip
    records.append(RunRecord("horovod", 1, 2, "j-a0000002", "failed", "rank 0 failed", "look at its log"))
    journal = Journal(folder)
    for number, record in enumerate(records):
        journal.add(RunEntry("asked", record.ended_s, number, job=record.job), end_of_run(number, record))
    journal.close()
    folder.write_samples(records)
    with folder.carried():
        pass

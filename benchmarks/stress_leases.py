"""Run many processes that submit, cancel and recover on one state directory, while another process reads the leases.

The passes, the lease and job stores, adoption, cancel and the table of a job's life are gpurun's. Only steps on hosts
are left out, so that as many jobs as possible start and end. Some supervisors are killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpurun import faults
from gpurun.errors import HostFailure
from gpurun.head import spawn
from gpurun.head.spawn import Head
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state.hosts import Cordons
from gpurun.supervisor import life, stop
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.verdict.ends import End, GangEnd

HOSTS, GPUS = 8, 4
INVENTORY = f"""\
version: 1
defaults: {{user: train, generation: pascal, gpus: {GPUS}, fabric: tcp}}
fabrics:
  tcp: {{kind: tcp, interface: eth0}}
racks:
  r1: {{hosts: {{"h[1-{HOSTS}]": {{}}}}}}
"""
DIES = 0.1
"""The share of supervisors that are killed at one of their first fault points."""
MOST_QUEUED = 40


def main(argv: list[str]) -> None:
    """``stress_leases.py worker|watch HOME SECONDS SEED``: one of the processes."""
    what, home, seconds, seed = argv[0], Path(argv[1]), float(argv[2]), int(argv[3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    spawn.Head.start_supervisor = start_supervisor
    print(*{"worker": work, "watch": watch_leases}[what](home, time.monotonic() + seconds, random.Random(seed)))


def stress(home: Path, processes: int, seconds: float) -> dict[str, int]:
    """Run all processes. Returns what they did, and how often a GPU was in two leases or was lost."""
    (home / "inventory.yaml").write_text(INVENTORY)
    with (home / "stderr").open("w") as errors:
        roles = ["watch", *["worker"] * processes]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, role, str(home), str(seconds), str(seed)],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )
            for seed, role in enumerate(roles)
        ]  # fmt: skip
        said = [list(map(int, process.communicate()[0].split())) for process in running]
    assert all(said), (home / "stderr").read_text()[-3000:]
    (reads, doubles, granted), *worked = said
    submits, cancels, recovers = (sum(each) for each in zip(*worked, strict=True))
    leaked, unfinished = drain(home)
    return {
        "processes": processes, "submits": submits, "cancels": cancels, "recovers": recovers, "leases_seen": granted,
        "supervisors_killed": (home / "stderr").read_text().count("fault: "), "reads_by_watcher": reads,
        "double_grants": doubles, "leaked_gpus": leaked, "unfinished_jobs": unfinished,
        "tracebacks": (home / "stderr").read_text().count("Traceback"),
    }  # fmt: skip


def work(home: Path, until: float, chance: random.Random) -> tuple[int, int, int]:
    """Submit, cancel and recover at random until the time is over. Returns the count of each."""
    done = [0, 0, 0]
    ways: list[Callable[[Path, random.Random], None]] = [submit, cancel, recover]
    while time.monotonic() < until:
        which = chance.choices((0, 1, 2), (6, 2, 1))[0]
        ways[which](home, chance)
        done[which] += 1
        if len(JobStore(home).live_ids()) > MOST_QUEUED:
            time.sleep(0.05)
    return done[0], done[1], done[2]


def submit(home: Path, chance: random.Random) -> None:
    spec = JobSpec(name="stress", image="i", gpus=chance.choice((1, 1, 2, 4, 6, 12)), command=("true",), max_restarts=3)
    JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=time.time())
    spawn.Head(home).run_pass(now_s=time.time())


def cancel(home: Path, chance: random.Random) -> None:
    store = JobStore(home)
    ids = store.live_ids()
    folder = store.get(chance.choice(ids)) if ids else None
    if folder is not None and folder.path.exists():
        folder.ask_to_cancel(CancelRequest("cancel", "stress", time.time()))
        Head(home).end_queued(folder, now_s=time.time())


def recover(home: Path, _chance: random.Random | None = None) -> None:
    spawn.Head(home).adopt_orphans()
    spawn.Head(home).run_pass(now_s=time.time())


def start_supervisor(head: spawn.Head, lease: Lease, lock: LeaseLock) -> None:
    """Replace `spawn.Head.start_supervisor` by a fork that runs the job's life without hosts."""
    faults.point()
    if os.fork():
        lock.close()
        return
    chance = random.Random()
    if chance.random() < DIES:
        os.environ["GPURUN_FAULT"] = f"supervisor:{chance.randint(1, 30)}"
    faults.arm_fault("supervisor")
    code = 1
    try:
        carry(head.home, lease, lock, chance)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def carry(home: Path, lease: Lease, lock: LeaseLock, chance: random.Random) -> None:
    rest: tuple[Lease, LeaseLock] | None = (lease, lock)
    if not lease.lost:
        job = SupervisedJob(home, lease, lock)
        life.STEPS = {**life.STEPS, **steps(chance)}
        life.live(job)
        rest = job.lost
        recover(home)
    if rest is not None:
        time.sleep(chance.random() * 0.2)
        with Cordons(home).changing() as cordons:
            for grant in rest[0].grants:
                cordons.pop(grant.host, None)
        LeaseStore(home).release(rest[1])
        recover(home)


def steps(chance: random.Random) -> dict[State, Callable[[SupervisedJob], State]]:
    """Return a job's steps without hosts. Sometimes a host "fails" and keeps its GPUs for a while."""

    def prepare(job: SupervisedJob) -> State:
        job.check_requests(ladder=False)
        return job.move(State.STARTING)

    def start(job: SupervisedJob) -> State:
        job.reach("containers")
        return job.move(State.RUNNING, started_s=job.clock())

    def watch(job: SupervisedJob) -> State:
        time.sleep(chance.random() * 0.1)
        job.check_requests(ladder=True)
        suspects = tuple(job.hosts[:1]) if chance.random() < 0.2 else ()
        raise GangEnd(End(State.FAILED if suspects else State.SUCCEEDED, "", 0, suspects=suspects))

    def end(job: SupervisedJob) -> State:
        suspects = sorted({*job.hosts} & {*job.record.avoid})
        return stop._finish(job, {host: HostFailure("it is silent", host=host) for host in suspects})

    return {State.PREPARING: prepare, State.STARTING: start, State.RUNNING: watch, State.STOPPING: end}


def watch_leases(home: Path, until: float, _chance: random.Random) -> tuple[int, int, int]:
    """Read all leases continuously. Returns counts of reads, of GPUs in two leases at once, and of leases.

    It reads files one after the other, so it may find a GPU in a released lease and then in the next lease. The GPU
    was in two leases at once only if the first lease still exists afterwards.
    """
    store, seen, reads, doubles = LeaseStore(home), set(), 0, 0
    while time.monotonic() < until:
        leases = store.read_all().leases
        reads += 1
        seen.update((lease.name, lease.attempt, lease.granted_s) for lease in leases)
        holder: dict[tuple[str, int], Lease] = {}
        for lease in leases:
            for gpu in [(grant.host, gpu) for grant in lease.grants for gpu in grant.gpus]:
                other = holder.setdefault(gpu, lease)
                doubles += other is not lease and store.read(other.name) == other
    return reads, doubles, len(seen)


def drain(home: Path) -> tuple[int, int]:
    """Let all jobs end. Returns the counts of GPUs that cannot be leased any more, and of jobs that never ended."""
    start = spawn.Head.start_supervisor
    spawn.Head.start_supervisor = start_supervisor
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    deadline = time.monotonic() + 120
    store = JobStore(home)
    try:
        while (store.live_ids() or LeaseStore(home).read_all().leases) and time.monotonic() < deadline:
            recover(home)
            time.sleep(0.05)
    finally:
        spawn.Head.start_supervisor = start
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    unfinished = sum(not record.state.ended for record in store.records(lambda _: None))
    spec = JobSpec(name="all", image="i", gpus=HOSTS * GPUS, command=("true",))
    store.create(spec, inventory=home / "inventory.yaml", now_s=time.time())
    whole = [lease for lease, _ in Allocator(home).run_pass(now_s=time.time()).granted]
    free = sum(len(grant.gpus) for lease in whole for grant in lease.grants)
    return HOSTS * GPUS - free, unfinished


if __name__ == "__main__":
    main(sys.argv[1:])

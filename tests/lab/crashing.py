"""Crash tests: kill a process of gpurun at its N-th fault point, run one command, and check the result.

The image's horovodrun is a shell script that prints numbered lines: the tests are about gpurun's life of a job, not
Horovod, and a crash should take seconds. `tests/lab/test_crashes.py` takes a sample of the points on every run,
`benchmarks/bench_reliability.py` all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import TINY, Cluster
from faulting import kill_supervisor
from stand_in import TAKE_COMMAND

from gpurun.errors import StateError
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.store import JobStore
from gpurun.lab import engine
from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import LeaseStore
from gpurun.node.agent.processes import list_processes
from gpurun.state.hosts import Cordon, Cordons
from gpurun.studies.store import SweepStore

IMAGE = "gpurun/crashtest:3"
LINES = 8
ENDLESS = "endless"
LAUNCHER = f"""#!/bin/sh
trap 'exit 143' TERM
{TAKE_COMMAND}i=0
while case "$*" in *{ENDLESS}*) true ;; *) [ $i -lt {LINES} ] ;; esac
do echo "[0]<stdout>:line $i"; i=$((i+1)); sleep 0.1; done
"""
DOCKERFILE = "FROM gpurun/shell:1\nCOPY horovodrun /bin/horovodrun\n"
FAULT = "fault: "
DEADLINE_S = 90.0


def build_image(folder, image: str = IMAGE, launcher: str = LAUNCHER) -> None:
    """An image whose horovodrun is a script, on the head's engine."""
    (folder / "horovodrun").write_text(launcher)
    (folder / "horovodrun").chmod(0o755)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    subprocess.run(
        ["docker", "build", "-q", "-t", image, str(folder)], env=environ, check=True, stdout=subprocess.DEVNULL
    )


@dataclass(frozen=True)
class Crash:
    """The result of a scenario.

    Attributes:
        place: the fault point at which the victim was killed; None: it has fewer fault points, so it survived.
    """

    place: str | None

    @property
    def died(self) -> bool:
        return self.place is not None


@contextmanager
def fault(cluster: Cluster, role: str, point: int, variable: str = "GPURUN_FAULT") -> Iterator[None]:
    """During the block, new processes of that role die at their `point`-th fault point."""
    cluster.environ[variable] = f"{role}:{point}"
    try:
        yield
    finally:
        del cluster.environ[variable]


def fails(cluster: Cluster, role: str, number: int) -> str | None:
    """A call of a supervisor or a waiter fails once: it lives on, no command helps, and the job succeeds.

    Returns:
        The call that failed; None: the process makes fewer calls.
    """
    is_waiter, hosts = role == "waiter", [host.name for host in cluster.lab.hosts]
    if is_waiter:
        with Cordons(cluster.home).changing() as cordons:
            cordons.update({host: Cordon("cordoned", "test", time.time(), "wait for the waiter") for host in hosts})
    with fault(cluster, role, number, "GPURUN_FAIL"):
        job = submit(cluster)
    if is_waiter:
        with Cordons(cluster.home).changing() as cordons:
            cordons.clear()
    deadline = time.monotonic() + DEADLINE_S
    while not (found := record(cluster, job)).state.ended or LeaseStore(cluster.home).is_alive(job):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert (found.state, found.restarts, found.attempt) == (State.SUCCEEDED, 0, 1), found
    assert logged(cluster, job) == [f"line {line}" for line in range(LINES)]
    waiters, supervisor = cluster.home / "waiters", JobStore(cluster.home).get(job).supervisor_log.plain
    log = waiters / f"{os.getuid()}.log" if is_waiter else supervisor
    text = log.read_text() if log.exists() else ""
    assert "Traceback" not in text, text
    return told(text)


def submit_dies(cluster: Cluster, point: int) -> Crash:
    """After a killed submit, one command makes the job succeed, or there is no job."""
    with fault(cluster, "command", point):
        done = cluster.gpurun(*cluster.submit_args("--launcher", "horovod", image=IMAGE), "--", "true")
    cluster.gpurun("status", "-i", str(cluster.inventory))
    ids = JobStore(cluster.home).ids()
    assert len(ids) <= 1
    for job in ids:
        must_succeed(cluster, job)
    return Crash(told(done.err))


def supervisor_dies(cluster: Cluster, point: int) -> Crash:
    """The next supervisor continues where the killed one stopped: the job succeeds, its log is complete."""
    with fault(cluster, "supervisor", point):
        job = submit(cluster)
    crash = Crash(death_of_supervisor(cluster, job))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_succeed(cluster, job)
    return crash


def supervisor_dies_while_one_waits(cluster: Cluster, point: int) -> Crash:
    """A job that waits for the GPUs of a job whose supervisor dies still gets them."""
    with fault(cluster, "supervisor", point):
        first = submit(cluster, gpus=whole(cluster))
    second = submit(cluster, gpus=whole(cluster))
    crash = Crash(death_of_supervisor(cluster, first))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_succeed(cluster, first)
    must_succeed(cluster, second)
    return crash


def supervisor_dies_while_cancelled(cluster: Cluster, point: int) -> Crash:
    """A cancel completes all its steps, even if supervisors die during it."""
    with fault(cluster, "supervisor", point):
        job = submit(cluster, ENDLESS)
    cluster.gpurun("cancel", "--no-wait", job)
    crash = Crash(death_of_supervisor(cluster, job))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_be_cancelled(cluster, job)
    return crash


def running_gang_is_cancelled(cluster: Cluster, point: int) -> Crash:
    """The supervisor of a running gang dies at its `point`-th step after a cancel."""
    with fault(cluster, "supervisor", 10_000):
        job = submit(cluster, ENDLESS)
    cluster.wait_for_log(job, "line 1")
    kill_supervisor(cluster, job)
    with fault(cluster, "supervisor", point):
        cluster.gpurun("cancel", "--no-wait", job)  # adopts it, then asks
    crash = Crash(death_of_supervisor(cluster, job))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_be_cancelled(cluster, job)
    return crash


def cancel_dies(cluster: Cluster, point: int) -> Crash:
    """A killed cancel either was recorded and takes effect, or the gang continues."""
    job = submit(cluster, ENDLESS)
    cluster.wait_for_log(job, "line 1")
    with fault(cluster, "command", point):
        done = cluster.gpurun("cancel", "--no-wait", job)
    cluster.gpurun("status", "-i", str(cluster.inventory))
    if JobStore(cluster.home).get(job).cancel_request() is None:
        assert done.code == -9
        assert record(cluster, job).state is State.RUNNING
        assert cluster.gpurun("cancel", job).code == 0
    must_be_cancelled(cluster, job)
    return Crash(told(done.err))


def cancel_of_a_queued_job_dies(cluster: Cluster, point: int) -> Crash:
    """The same for a queued job. The job that it waits for continues."""
    first = submit(cluster, gpus=whole(cluster))
    second = submit(cluster, gpus=whole(cluster))
    with fault(cluster, "command", point):
        done = cluster.gpurun("cancel", "--no-wait", second)
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_succeed(cluster, first)
    if JobStore(cluster.home).get(second).cancel_request() is None:
        assert done.code == -9
        must_succeed(cluster, second)
    else:
        must_be_cancelled(cluster, second)
    return Crash(told(done.err))


REPORTS = """
import gpurun_runtime as gpurun
for step in range(4):
    gpurun.report(step, images_per_s=10.0, accuracy=0.5)
"""
PROGRAM = ("--image", TINY, "--launcher", "tasks", "--name", "curve")


def campaign_dies(cluster: Cluster, point: int) -> Crash:
    """The next command continues a killed campaign: each run is measured, by one job."""
    sizes = ("scale", "-i", str(cluster.inventory), "--gpus", "1,2", "--repeat", "2", "--json")
    measure = (*sizes, *PROGRAM, "--", "python3", "-c", REPORTS)
    with fault(cluster, "command", point):
        killed = cluster.gpurun(*measure)
    done = cluster.gpurun(*measure)
    assert done.code == 0, done.err
    runs = json.loads(done.out)["runs"]
    assert [(run["gpus"], run["run"], run["outcome"]) for run in runs] == [
        (gpus, number, "measured") for number in (1, 2) for gpus in (1, 2)
    ]
    assert {run["job"] for run in runs} == set(JobStore(cluster.home).ids()) and len({run["job"] for run in runs}) == 4
    return Crash(told(killed.err))


def conductor_dies(cluster: Cluster, point: int) -> Crash:
    """The next conductor continues a killed sweep: each trial ends, by one job."""
    begin = ("sweep", "-i", str(cluster.inventory), "-n", "1", "--grid", "lr=1,2,3", "--metric", "accuracy:max")
    with fault(cluster, "conductor", point):
        ident = cluster.gpurun(*begin, *PROGRAM, "--", "python3", "-c", REPORTS).out.strip()
        folder, deadline = SweepStore(cluster.home).get(ident), time.monotonic() + DEADLINE_S
        while folder.is_conducted() and time.monotonic() < deadline:
            time.sleep(0.1)
    while not (found := json.loads(cluster.gpurun("sweep", "status", ident, "--json").out))["done"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert found["counts"]["complete"] == 3, found
    assert {trial["job"] for trial in found["trials"]} == set(JobStore(cluster.home).ids()), found
    return Crash(told(Path(str(folder.lock)).read_text()))


def recover_dies(cluster: Cluster, point: int) -> Crash:
    """A recover that dies during an adoption leaves an adopted job, or an orphan that the next command adopts."""
    return _adopter_dies(cluster, point, "recover")


def status_dies(cluster: Cluster, point: int) -> Crash:
    """The same for any other command, such as status."""
    return _adopter_dies(cluster, point, "status", "-i", str(cluster.inventory))


def _adopter_dies(cluster: Cluster, point: int, *command: str) -> Crash:
    job = submit(cluster, gpus=whole(cluster))
    waiting = submit(cluster)
    cluster.wait_for(job, "PREPARING", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED")
    kill_waiter(cluster)
    kill_supervisor(cluster, job)
    with fault(cluster, "command", point):
        done = cluster.gpurun(*command)
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_succeed(cluster, job)
    must_succeed(cluster, waiting)
    return Crash(told(done.err))


def waiter_dies(cluster: Cluster, point: int) -> Crash:
    """A waiter dies before, during or after a grant: it or the next waiter grants the job exactly once."""
    hosts = [host.name for host in cluster.lab.hosts]
    with Cordons(cluster.home).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "test", time.time(), "nothing may start yet") for host in hosts})
    with fault(cluster, "waiter", point):
        jobs = [submit(cluster), submit(cluster)]
    with Cordons(cluster.home).changing() as cordons:  # no command runs a pass for this: the waiter must notice it
        cordons.clear()
    deadline = time.monotonic() + DEADLINE_S
    while WaiterLocks(cluster.home).lives(os.getuid()):
        assert time.monotonic() < deadline, "the waiter neither died nor ended"
        time.sleep(0.02)
    crash = Crash(told((cluster.home / "waiters" / f"{os.getuid()}.log").read_text()))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    for job in jobs:
        must_succeed(cluster, job)
    return crash


def supervisor_of_an_elastic_gang_dies(cluster: Cluster, point: int) -> Crash:
    """A supervisor dies while a host leaves and rejoins the gang. The next fences first; each GPU is in one lease."""
    with fault(cluster, "supervisor", 10_000):
        job = submit(cluster, ENDLESS, min_gpus=1)
    cluster.wait_for_log(job, "line 1")
    kill_supervisor(cluster, job)
    cluster.lab.run(record(cluster, job).granted[1].host, ["docker", "kill", f"gpurun-{job}-1"])
    with fault(cluster, "supervisor", point):
        cluster.gpurun("status", "-i", str(cluster.inventory))
    place = wait_until_whole_or_dead(cluster, job)
    cluster.gpurun("status", "-i", str(cluster.inventory))
    assert wait_until_whole_or_dead(cluster, job, again=True) is None
    assert record(cluster, job).attempt == 1
    cluster.gpurun("cancel", "--no-wait", job)
    crash = Crash(place or death_of_supervisor(cluster, job))
    cluster.gpurun("status", "-i", str(cluster.inventory))
    must_be_cancelled(cluster, job)
    return crash


def wait_until_whole_or_dead(cluster: Cluster, job: str, *, again: bool = False) -> str | None:
    """Wait until an elastic gang has lost and regained a host. Returns the place of its supervisor's death, if any."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        place = told(JobStore(cluster.home).get(job).supervisor_log.read_text())
        lease = LeaseStore(cluster.home).read(job)
        if place is not None and not again:
            return place
        if lease is not None and lease.joins and not lease.apart and len(lease.members) == len(cluster.lab.hosts):
            return None
        time.sleep(0.02)
    raise AssertionError(f"{job} is not whole again: {lease}")


SCENARIOS: Mapping[str, Callable[[Cluster, int], Crash]] = {
    "submit": submit_dies,
    "supervisor": supervisor_dies,
    "supervisor, another job waits": supervisor_dies_while_one_waits,
    "supervisor, cancelled while it starts": supervisor_dies_while_cancelled,
    "supervisor, cancelled while it runs": running_gang_is_cancelled,
    "supervisor of an elastic gang": supervisor_of_an_elastic_gang_dies,
    "cancel": cancel_dies,
    "cancel of a queued job": cancel_of_a_queued_job_dies,
    "recover": recover_dies,
    "status": status_dies,
    "waiter": waiter_dies,
    "campaign": campaign_dies,
    "conductor": conductor_dies,
}


def submit(cluster: Cluster, command: str = "true", *, gpus: int = 2, min_gpus: int | None = None) -> str:
    """Submit a gang over both hosts. Returns its id."""
    recipe = cluster.folder / "recipe.yaml"
    recipe.write_text(f"image: {IMAGE}\nlauncher: horovod\ngpus: {gpus}\ngrace: 1s\ncommand: [{command}]\n")
    each = gpus // len(cluster.lab.hosts)
    elastic = () if min_gpus is None else ("--min-gpus", str(min_gpus))
    done = cluster.gpurun("submit", str(recipe), "-i", str(cluster.inventory), "--gpus-per-host", str(each), *elastic)
    assert done.code == 0, done.err
    return done.out.strip()


def whole(cluster: Cluster) -> int:
    """Return all GPUs of the lab."""
    return sum(host["gpus"] for host in cluster.status()["hosts"])


def record(cluster: Cluster, job: str) -> JobRecord:
    return JobStore(cluster.home).get(job).record()


def told(text: str) -> str | None:
    """Return the place at which a process reports that it was killed."""
    return next((line for line in text.splitlines() if line.startswith(FAULT)), None)


def kill_waiter(cluster: Cluster) -> None:
    """kill -9 this state directory's waiter, if there is one."""
    for process in list_processes():
        environ = Path(f"/proc/{process.pid}/environ")
        if "gpurun.head.waiter " in process.command and f"GPURUN_HOME={cluster.home}\0" in environ.read_text():
            os.kill(process.pid, signal.SIGKILL)
    while WaiterLocks(cluster.home).lives(os.getuid()):
        time.sleep(0.01)


def death_of_supervisor(cluster: Cluster, job: str) -> str | None:
    """Wait until the job's first supervisor has died or finished. Returns the place where it died."""
    log = JobStore(cluster.home).get(job).supervisor_log
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ended = record(cluster, job).state.ended and not LeaseStore(cluster.home).is_alive(job)
        if (place := told(log.read_text() if log.exists() else "")) is not None:
            return place
        if ended and not (cluster.home / "live" / job).exists():
            return _last_words(log)
        time.sleep(0.02)
    raise AssertionError(f"{job} neither died nor ended: {record(cluster, job)}")


def _last_words(log) -> str | None:
    """Return the place where a supervisor died after its job's end: it runs a pass then."""
    time.sleep(0.3)
    return told(log.read_text())


def must_succeed(cluster: Cluster, job: str) -> None:
    """Check that the job succeeds, and its log has every line once, in order."""
    assert cluster.gpurun("wait", job, "--timeout", "60s").code == 0, record(cluster, job)
    assert logged(cluster, job) == [f"line {number}" for number in range(LINES)]


def must_be_cancelled(cluster: Cluster, job: str) -> None:
    """Check that the job is cancelled, and its log has its lines until then, once and in order."""
    cluster.gpurun("wait", job, "--timeout", "60s")
    assert record(cluster, job).state is State.CANCELLED, record(cluster, job)
    lines = logged(cluster, job)
    assert lines == [f"line {number}" for number in range(len(lines))], (lines, cluster.log(job))


def logged(cluster: Cluster, job: str) -> list[str]:
    return [line.rpartition(":")[2] for line in cluster.log(job).splitlines() if "line " in line]


def check_invariants(cluster: Cluster) -> None:
    """Check that no GPU is in two leases or lost, and nothing is left on any host or in the state directory."""
    holdings = LeaseStore(cluster.home).read_all()
    held = [(grant.host, gpu) for lease in holdings.leases for grant in lease.grants for gpu in grant.gpus]
    assert not holdings.damaged
    assert len(held) == len(set(held))
    deadline = time.monotonic() + 15  # the last supervisor may still be exiting
    while LeaseStore(cluster.home).read_all().leases and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.assert_nothing_left()
    store = JobStore(cluster.home)
    assert [record.id for record in store.records(_raise, ids=store.live_ids())] == []


def _raise(error: StateError) -> None:
    raise error

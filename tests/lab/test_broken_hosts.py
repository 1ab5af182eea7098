"""One idle host is broken in some way: no job ends by it, it is out, and it returns by itself after its repair.

`tests/gangs/test_broken_hosts.py` has every other case. Here are real hosts, and what really breaks on them.
`GPURUN_BROKEN=FILE` appends what was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from cluster import SHELL, TINY, Cluster
from ClusterShell.NodeSet import NodeSet
from own_labs import own_lab
from waiting import until

from gpurun.jobs.store import JobStore
from gpurun.lab import LabSpec, engine
from gpurun.state.hosts import Machines

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("broken hosts")]

JOBS = 30
FAT = f"gpurun/fat-{os.getpid()}:1"
READ_ONLY = "mount --bind /home /home && mount -o remount,ro,bind /home"
NOT_WRITABLE = "mkdir -p ~train/.gpurun && mv ~train/.gpurun ~train/.away && mkdir -m 700 ~train/.gpurun"
WRITABLE = "rmdir ~train/.gpurun && mv ~train/.away ~train/.gpurun"
FULL = """
fallocate -l $(($(df --output=avail -B1 /home | tail -1) - 65536)) /home/fill
dd if=/dev/zero of=/home/fill2 bs=4k 2>/dev/null
df /home
"""


@pytest.fixture(scope="module")
def broken_lab():
    """Six hosts with small disks."""
    with own_lab("broken-six", racks=2, hosts=3, gpus=4, disk_mib=2 << 10) as lab:
        yield lab


@pytest.fixture
def cluster(broken_lab, tmp_path):
    broken_lab.up(LabSpec(broken_lab.name, racks=2, hosts=3, gpus=4, disk_mib=2 << 10))
    found = Cluster(broken_lab, tmp_path)
    yield found
    found.cancel_all()
    found.end_processes()


class Faults:
    """Breaks a host, and repairs it."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self.cluster, self.host = cluster, host

    def sh(self, script: str) -> None:
        done = self.cluster.lab.run(self.host, ["sh", "-c", script])
        assert done.code == 0, (script, done.stdout, done.stderr)

    def breaks(self, how: str) -> None:
        scripts = {
            "full": FULL, "read-only": READ_ONLY, "not writable": NOT_WRITABLE,
            "no Docker": "mv /run/docker.sock /run/docker.away",
        }  # fmt: skip
        if how == "dead":
            self.cluster.lab.crash(self.host)
        elif how == "another key":
            self._swap_keys()
        else:
            self.sh(scripts[how])

    def repair(self, how: str) -> None:
        scripts = {
            "full": "rm /home/fill /home/fill2", "read-only": "umount --lazy /home", "not writable": WRITABLE,
            "no Docker": "mv /run/docker.away /run/docker.sock",
        }  # fmt: skip
        if how == "dead":
            self.cluster.lab.boot(self.host)
        elif how == "another key":
            self._swap_keys()
        else:
            self.sh(scripts[how])

    def _swap_keys(self) -> None:
        """Give the host the key of another host in known_hosts; the second time, its own again."""
        file = self.cluster.lab.folder / "known_hosts"
        addresses = {host.name: str(host.address) for host in self.cluster.lab.hosts}
        mine, other = addresses.pop(self.host), next(iter(addresses.values()))
        away = file.with_name("known_hosts.away")
        if away.exists():
            away.replace(file)
            return
        lines = file.read_text().splitlines()
        away.write_text(file.read_text())
        key = next(line.partition(" ")[2] for line in lines if other in line.split(" ")[0])
        file.write_text("".join(f"{line.split(' ')[0]} {key}\n" if mine in line.split(" ")[0] else f"{line}\n"
                                for line in lines))  # fmt: skip


def submit(cluster: Cluster, count: int, *args: str, gpus: int = 4, **changes: object) -> list[str]:
    """Submit a job with the command, and the others as copies of it: a command takes a second of CPU time."""
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", str(gpus), "--image", TINY, "--launcher", "tasks", *args,
        "--", "true",
    )  # fmt: skip
    assert done.code == 0, done.err
    first = done.out.strip()
    store = JobStore(cluster.home)
    folder = store.get(first)
    inventory, spec = Path(folder.record().inventory), folder.spec()
    return [first, *(store.create(spec, inventory=inventory, now_s=time.time()).id for _ in range(count - 1))]


def outs(cluster: Cluster) -> dict[str, float]:
    """Host → since when it is out."""
    found = Machines(cluster.home).read(os.getuid()).values()
    return {machine.name: machine.out.since_s for machine in found if machine.out is not None}


def states(cluster: Cluster, jobs: list[str]) -> list[str]:
    return [cluster.record(job)["state"] for job in jobs]


def has_ended(cluster: Cluster, jobs: list[str]) -> None:
    until(
        lambda: all(cluster.record(job)["ended_s"] is not None for job in jobs), lambda: states(cluster, jobs),
        every_s=1.0,
    )  # fmt: skip


def first_failure_s(cluster: Cluster, jobs: list[str], host: str) -> float:
    """When the first attempt stopped that could not start on the host."""
    at = []
    for job in jobs:
        for line in (cluster.home / "jobs" / job / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "state" and event["state"] == "STOPPING" and host in (event.get("reason") or ""):
                at.append(event["t"])
    return min(at)


def measured(**row: object) -> None:
    if path := os.environ.get("GPURUN_BROKEN"):
        with Path(path).open("a") as stream:
            stream.write(json.dumps(row) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead", "full", "read-only", "not writable", "another key", "no Docker"])
def test_one_of_six_idle_hosts_is_broken_and_thirty_jobs_wait(cluster, how):
    host = cluster.lab.hosts[0].name
    faults = Faults(cluster, host)
    faults.breaks(how)
    try:
        jobs = submit(cluster, JOBS)
        whole = submit(cluster, 1, gpus=24)
        has_ended(cluster, jobs)
        out_s = outs(cluster)
    finally:
        repaired_s = time.time()
        faults.repair(how)
    found = states(cluster, jobs)
    has_ended(cluster, whole)
    back_s = cluster.record(whole[0])["started_s"] - repaired_s
    after_s = out_s.get(host, 0.0) - first_failure_s(cluster, jobs, host)
    measured(how=how, states={each: found.count(each) for each in set(found)}, out_s=after_s, back_s=back_s,
             attempts=sum(cluster.record(job)["attempt"] for job in jobs))  # fmt: skip
    assert found == ["SUCCEEDED"] * JOBS
    assert [cluster.record(job)["restarts"] for job in jobs] == [0] * JOBS
    assert set(out_s) == {host}
    assert states(cluster, whole) == ["SUCCEEDED"] and outs(cluster) == {}


@pytest.mark.story
def test_a_dead_host_takes_no_job_and_returns_by_itself(cluster):
    host = cluster.lab.hosts[0].name
    cluster.lab.run(host, ["mv", "/run/docker.sock", "/run/docker.away"])
    (job,) = submit(cluster, 1, gpus=24)
    until(lambda: host in outs(cluster), lambda: cluster.record(job))
    cluster.wait_for(job, "QUEUED")
    (other,) = submit(cluster, 1)
    cluster.wait_for(other, "SUCCEEDED")
    cluster.lab.run(host, ["mv", "/run/docker.away", "/run/docker.sock"])
    found = cluster.wait_for(job, "SUCCEEDED")
    assert (found["restarts"], outs(cluster)) == (0, {})


@pytest.mark.slow
@pytest.mark.parametrize(("count", "how"), [(3, "off"), (6, "off"), (6, "cut off from the head")])
def test_hosts_are_off_and_ten_jobs_run_after_the_repair(cluster, count, how):
    off = [host.name for host in cluster.lab.hosts][:count]
    for host in off if how == "off" else ():
        cluster.lab.crash(host)
    if how != "off":
        cluster.lab.cut("head")
    jobs = submit(cluster, 8) + submit(cluster, 2, gpus=16)
    until(lambda: set(outs(cluster)) == set(off), lambda: (outs(cluster), states(cluster, jobs)), every_s=1.0)
    has_ended(cluster, jobs[:8] if count < 6 else [])
    assert states(cluster, jobs[8:]) == ["QUEUED"] * 2
    assert "FAILED" not in states(cluster, jobs)
    repaired_s = time.time()
    for host in off if how == "off" else ():
        cluster.lab.boot(host)
    if how != "off":
        cluster.lab.heal("head")
    has_ended(cluster, jobs)
    back_s = max(cluster.record(job)["started_s"] for job in jobs) - repaired_s
    measured(how=f"{count} of 6 {how}", states={"SUCCEEDED": states(cluster, jobs).count("SUCCEEDED")}, back_s=back_s)
    assert states(cluster, jobs) == ["SUCCEEDED"] * 10


@pytest.fixture
def only_host(cluster):
    """The first host, which is all that the inventory has."""
    host = cluster.lab.hosts[0].name
    text = cluster.lab.inventory.read_text().replace("ssh_config: ", f"ssh_config: {cluster.lab.folder}/")
    cluster.inventory = cluster.folder / "one.yaml"
    cluster.inventory.write_text(text[: text.index("\n", text.index(f" {host}:")) + 1])
    return host


def test_the_only_host_is_off_and_ten_jobs_run_after_the_repair(cluster, only_host):
    cluster.lab.crash(only_host)
    jobs = submit(cluster, 10, gpus=1)
    until(lambda: set(outs(cluster)) == {only_host}, lambda: (outs(cluster), states(cluster, jobs)), every_s=0.2)
    until(lambda: states(cluster, jobs) == ["QUEUED"] * 10, lambda: states(cluster, jobs), every_s=0.2)
    repaired_s = time.time()
    cluster.lab.boot(only_host)
    has_ended(cluster, jobs)
    found = [cluster.record(job) for job in jobs]
    measured(how="only host off", started_s=sorted(round(each["started_s"] - repaired_s, 1) for each in found))
    assert [(each["state"], each["restarts"]) for each in found] == [("SUCCEEDED", 0)] * 10


def test_a_timer_takes_a_host_out_and_back_though_nobody_waits(cluster, only_host):
    """`gpurun.head.waiter` runs the same command each minute."""
    cluster.environ["GPURUN_INVENTORY"] = str(cluster.inventory)
    cluster.home.mkdir()  # a timer makes none
    faults = Faults(cluster, only_host)
    faults.breaks("no Docker")
    try:
        assert cluster.gpurun("recover", "--by-timer").code == 0
        until(lambda: set(outs(cluster)) == {only_host}, every_s=0.2)
    finally:
        faults.repair("no Docker")
    until(lambda: cluster.gpurun("recover", "--by-timer").code == 0 and not outs(cluster), every_s=2.0)
    assert [each["state"] for each in cluster.status()["hosts"]] == ["ok"]


@pytest.mark.slow
def test_a_typo_in_ssh_config_makes_all_jobs_wait_with_ssh_s_own_words(cluster):
    config = cluster.lab.folder / "ssh_config"
    before = config.read_text()
    config.write_text(f"{before}\nHostNam typo\n")
    try:
        jobs = submit(cluster, 10)
        until(lambda: len(outs(cluster)) == 6, lambda: (outs(cluster), states(cluster, jobs)), every_s=1.0)
        until(lambda: states(cluster, jobs) == ["QUEUED"] * 10, lambda: states(cluster, jobs), every_s=1.0)
        why = cluster.gpurun("why", jobs[0])
    finally:
        repaired_s = time.time()
        config.write_text(before)
    has_ended(cluster, jobs)
    started = sorted(cluster.record(job)["started_s"] - repaired_s for job in jobs)
    measured(how="ssh_config", started_s=[round(each, 1) for each in started])
    assert states(cluster, jobs) == ["SUCCEEDED"] * 10
    assert "ad configuration option: hostnam" in why.out + why.err


@pytest.mark.parametrize("flag", ["--data=x=host:/nowhere/x", "--mount=/nowhere/x:/x"])
def test_a_job_whose_mount_no_host_has_ends_and_takes_no_host_out(cluster, flag):
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "4", "--image", TINY, "--launcher", "tasks",
        flag, "--", "true",
    )  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    found = cluster.wait_for(job, "FAILED")
    assert "/nowhere/x" in found["reason"] and "a check finds no fault" in found["reason"], found
    assert (found["attempt"], outs(cluster)) == (3, {})
    measured(how=flag, reason=found["reason"], seconds=found["ended_s"] - found["submitted_s"])


@pytest.mark.slow
def test_an_image_that_fits_on_no_host_waits_and_why_names_what_each_host_lacks(cluster, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {SHELL}\nCOPY zeros /zeros\n")
    with (tmp_path / "zeros").open("wb") as stream:
        stream.truncate(900 << 20)
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    subprocess.run(["docker", "build", "-q", "-t", FAT, str(tmp_path)], env=environ, check=True, capture_output=True)
    try:
        done = cluster.gpurun("submit", "-i", str(cluster.inventory), "-n", "4", "--image", FAT, "--launcher", "tasks",
                              "--", "true")  # fmt: skip
        assert done.code == 0, done.err
        job = done.out.strip()
        until(lambda: len(cluster.record(job)["start_failures"]) >= 4, lambda: cluster.record(job), every_s=1.0)
        why = cluster.gpurun("why", job)
    finally:
        subprocess.run(["docker", "rmi", "-f", FAT], env=environ, check=True, capture_output=True)
    found = cluster.record(job)
    measured(how="image", lacks={each["host"]: each["lacks_mib"] for each in found["start_failures"]}, why=why.out)
    assert (found["ended_s"], found["restarts"], outs(cluster)) == (None, 0, {})
    rows = [line.strip().partition(":")[0] for line in why.out.splitlines() if "GiB more needed" in line]
    assert len(NodeSet.fromlist(rows)) >= 4, why.out

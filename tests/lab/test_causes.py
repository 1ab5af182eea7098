"""Causes that end a gang or keep its GPUs: gpurun finds the host, names the cause, and avoids it for the next gang."""

from __future__ import annotations

import time

import pytest
from cluster import Cluster
from crashing import build_image
from faulting import events
from own_labs import own_lab

from gpurun.lab.gpus import state
from gpurun.lab.paths import HostFolder
from gpurun.state.cordons import read_cordons

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("causes")]

IMAGE = "gpurun/causestest:1"
LAUNCHER = """#!/bin/sh
test "$HOROVOD_RANK" || HOROVOD_RANK=0 exec "$0" "$@"  # now it is a rank, and gets its SIGTERM
echo "[0]<stdout>:begun on attempt $GPURUN_ATTEMPT"
i=0
while [ ! -e /run/gpurun/end ] && [ $i -lt ${LINES:-600} ]; do i=$((i+1)); sleep 0.1; done
test ! -e /run/gpurun/end || cat /run/gpurun/end
exit ${CODE:-0}
"""


@pytest.fixture(scope="module")
def causes_lab(tmp_path_factory):
    with own_lab("causes", racks=1, hosts=4, gpus=2, disk_mib=1024) as lab:
        build_image(tmp_path_factory.mktemp("image"), IMAGE, LAUNCHER)
        yield lab


@pytest.fixture
def cluster(causes_lab, tmp_path):
    made = Cluster(causes_lab, tmp_path)
    yield made
    for host in causes_lab.hosts:
        causes_lab.boot(host.name)
        hardware(made, host.name).joinpath("kmsg").write_text("")
        state.save(state.healthy(causes_lab.name, host), hardware(made, host.name) / state.FILE)
    for job in made.status()["jobs"]:
        if job["ended_s"] is None:
            made.gpurun("cancel", job["id"])
    deadline = time.monotonic() + 90
    while list((made.home / "leases").glob("[!.]*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    made.assert_nothing_left()


def hardware(cluster, host):
    return HostFolder(cluster.lab.folder / "hosts" / host).hardware


def start(cluster, *args):
    """A gang of two hosts that runs; its id and its second host."""
    done = cluster.gpurun(*cluster.submit_args(*args, image=IMAGE), "--", "true")
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, "begun on attempt 1")
    return job, cluster.job(job)["hosts"][1]


def gpu_of(cluster, job, host):
    return next(grant["gpus"][0] for grant in cluster.job(job)["grants"] if grant["host"] == host)


def test_a_stranger_keeps_the_gpu_out_of_use_until_it_is_gone(cluster):
    job, host = start(cluster)
    stranger = cluster.lab.run(host, ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], user="alice")
    pid = stranger.stdout.decode().strip()
    state.change(hardware(cluster, host) / state.FILE, gpu_of(cluster, job, host), {"processes": f"{pid}:512"})
    assert cluster.gpurun("cancel", job).code == 0
    rows = {row["host"]: row for row in cluster.status()["hosts"]}
    assert (rows[host]["state"], rows[host]["free"]) == ("lost", 1)
    named = f"held by pid {pid} of alice (sleep 300)"
    assert any(named in e.get("reason", "") for e in events(cluster, job) if e["kind"] == "host")
    assert named in read_cordons(cluster.home)[host].evidence
    cluster.lab.run(host, ["kill", pid])
    deadline = time.monotonic() + 60
    while list((cluster.home / "leases").glob("[!.]*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert host not in read_cordons(cluster.home)


def test_the_proof_costs_the_end_of_a_job_next_to_nothing(cluster):
    """From the launcher's end to the job's: the fence of two hosts and its question to NVML included."""

    def end_s() -> float:
        done = cluster.gpurun(*cluster.submit_args("-e", "LINES=1", image=IMAGE), "--follow", "--", "true")
        assert done.code == 0, done.err
        newest = max(cluster.status()["jobs"], key=lambda job: job["submitted_s"])["id"]
        times = {e["state"]: e["t"] for e in events(cluster, newest) if e["kind"] == "state"}
        return times["SUCCEEDED"] - times["STOPPING"]

    took = sorted(end_s() for _ in range(5))
    assert took[0] < 0.6


def kernel_says(cluster, host, line):
    """Append a line to the host's kernel log, as the kernel does now."""
    with hardware(cluster, host).joinpath("kmsg").open("a") as log:
        log.write(f"4,1,{int(time.monotonic() * 1e6)},-;{line}\n")


def until_again(cluster, job, attempt=2):
    cluster.wait_for_log(job, f"begun on attempt {attempt}")
    return cluster.job(job)


def say_at_the_end(cluster, job, text=""):
    """Write the text that the launcher prints at exit, while the disk has room."""
    first = cluster.job(job)["hosts"][0]
    path = f"/home/train/.gpurun/jobs/{job}/run/new"
    assert cluster.lab.run(first, ["sh", "-c", f"cat >{path}"], stdin=text.encode()).code == 0
    return lambda: cluster.lab.run(first, ["mv", path, path[: -len("new")] + "end"]).code == 0


def end(cluster, job, text=""):
    """Let the launcher print `text` and exit."""
    assert say_at_the_end(cluster, job, text)()


def seen(cluster, job, kind):
    """Return the event in which a host reported this kind of cause."""
    deadline = time.monotonic() + 15
    while True:
        found = [e for e in events(cluster, job) if e["kind"] == "host" and e["state"] == kind]
        if found or time.monotonic() > deadline:
            assert found, events(cluster, job)
            return found[0]
        time.sleep(0.1)


def test_an_xid_79_takes_the_host_out_of_use_and_the_gang_elsewhere(cluster):
    job, host = start(cluster, "--max-restarts", "1")
    gpu = gpu_of(cluster, job, host)
    bus = state.load(hardware(cluster, host) / state.FILE)[f"gpu {gpu}"]["pci"].rpartition(".")[0]
    kernel_says(cluster, host, "NVRM: Xid (PCI:0000:ee:00): 79, a GPU that nobody of this gang has")
    kernel_says(cluster, host, f"NVRM: Xid (PCI:{bus}): 13, pid=1, name=python3, Graphics Exception")
    kernel_says(
        cluster, host, f"NVRM: Xid (PCI:{bus}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    planted = time.time()
    found = until_again(cluster, job)
    assert host not in found["hosts"]
    cordon = read_cordons(cluster.home)[host]
    assert (cordon.state, cordon.by) == ("cordoned", "gpurun")
    assert "Xid 79" in cordon.reason and "(rank 1)" in cordon.reason and job in cordon.reason
    assert cordon.evidence.startswith(f"NVRM: Xid (PCI:{bus}): 79")
    stopping = next(e for e in events(cluster, job) if e["kind"] == "state" and e["state"] == "STOPPING")
    assert stopping["t"] - planted < 8
    end(cluster, job)
    cluster.wait_for(job, "SUCCEEDED")


def test_a_gpu_that_nvml_lost_is_fenced_only_when_it_is_back(cluster):
    job, host = start(cluster, "--max-restarts", "1")
    gpus = hardware(cluster, host) / state.FILE
    state.change(gpus, gpu_of(cluster, job, host), {"error": "15"})
    assert host not in until_again(cluster, job)["hosts"]
    rows = {row["host"]: row for row in cluster.status()["hosts"]}
    assert (rows[host]["state"], rows[host]["free"]) == ("cordoned", 1)
    assert "lost" in read_cordons(cluster.home)[host].reason
    for gpu in range(2):
        state.change(gpus, gpu, {"error": "0"})
    deadline = time.monotonic() + 60
    while {row["host"]: row for row in cluster.status()["hosts"]}[host]["free"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert read_cordons(cluster.home)[host].state == "cordoned", "hardware stays out of use until a person says so"
    end(cluster, job)
    cluster.wait_for(job, "SUCCEEDED")


def test_memory_that_ran_out_is_the_cause_not_the_container_that_ended(cluster):
    job, host = start(cluster, "--max-restarts", "1")
    name = f"gpurun-{job}-1"
    ident = cluster.lab.run(host, ["docker", "inspect", "-f", "{{.Id}}", name]).stdout.decode().strip()
    kernel_says(
        cluster, host, "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        f"task_memcg=/docker/{ident},task=python3,pid=99999,uid=1500",
    )  # fmt: skip
    cluster.lab.run(host, ["docker", "kill", name])
    assert host not in until_again(cluster, job)["hosts"]
    stopping = next(e for e in events(cluster, job) if e["kind"] == "state" and e["state"] == "STOPPING")
    assert stopping["reason"].startswith(f"{host}: out of memory on the host")
    assert host not in read_cordons(cluster.home), "it was not its hardware"
    end(cluster, job)
    cluster.wait_for(job, "SUCCEEDED")


def test_a_full_disk_is_named_with_its_host(cluster):
    job, host = start(cluster, "-e", "CODE=1")
    cluster.lab.run(host, ["sh", "-c", "dd if=/dev/zero of=/var/lib/full bs=1M 2>/dev/null"])
    try:
        seen(cluster, job, "disk-full")
        end(
            cluster, job, "[1]<stderr>:OSError: [Errno 28] No space left on device: '/out/checkpoint'\n"
            "Process name: 1\nExit code:    1\n",
        )  # fmt: skip
        found = cluster.wait_for(job, "FAILED")
    finally:
        cluster.lab.run(host, ["rm", "/var/lib/full"])
    assert found["reason"] == f"{host}: Docker's disk is full (rank 1)"
    assert found["first_failure"]["evidence"].endswith("MiB free at /var/lib/docker")
    assert "No space left on device" in found["first_failure"]["excerpt"][-1]
    assert host not in read_cordons(cluster.home)


@pytest.mark.parametrize("which", [0, 1])
def test_the_next_attempt_avoids_the_host_whose_disk_was_full(cluster, which):
    job, _ = start(cluster, "-e", "CODE=1", "--max-restarts", "1")
    host = cluster.job(job)["hosts"][which]
    ends = say_at_the_end(
        cluster, job, f"[{which}]<stderr>:OSError: [Errno 28] No space left on device: '/out/checkpoint'\n"
        f"Process name: {which}\nExit code:    1\n",
    )  # fmt: skip
    cluster.lab.run(host, ["sh", "-c", "dd if=/dev/zero of=/var/lib/full bs=1M 2>/dev/null"])
    try:
        assert ends()
        assert host not in until_again(cluster, job)["hosts"]
    finally:
        cluster.lab.run(host, ["rm", "/var/lib/full"])
    assert host not in read_cordons(cluster.home)


def test_a_gang_that_a_full_disk_keeps_from_starting_starts_elsewhere(cluster):
    host = min(host.name for host in cluster.lab.hosts)
    cluster.lab.run(host, ["sh", "-c", "dd if=/dev/zero of=/var/lib/full bs=1M 2>/dev/null"])
    try:
        done = cluster.gpurun(*cluster.submit_args("--max-restarts", "1", image=IMAGE), "--", "true")
        job = done.out.strip()
        cluster.wait_for(job, "RUNNING")
        placed = [
            [one["host"] for one in event["hosts"]] for event in events(cluster, job) if event["kind"] == "placement"
        ]
        assert host in placed[0] and host not in placed[1], placed
    finally:
        cluster.lab.run(host, ["rm", "/var/lib/full"])


def test_a_programs_own_fault_is_told_as_such(cluster):
    job, host = start(cluster, "-e", "CODE=1", "--max-restarts", "1")
    gpu = gpu_of(cluster, job, host)
    bus = state.load(hardware(cluster, host) / state.FILE)[f"gpu {gpu}"]["pci"].rpartition(".")[0]
    kernel_says(cluster, host, f"NVRM: Xid (PCI:{bus}): 31, pid=7, name=python3, MMU Fault: ENGINE GRAPHICS")
    end(cluster, job, "[1]<stderr>:CUDA error: an illegal memory access\nProcess name: 1\nExit code:    134\n")
    found = cluster.wait_for(job, "FAILED")
    assert (found["restarts"], found["code"], found["first_failure"]["rank"]) == (0, 1, 1)
    assert "failed first, with exit code 134" in found["reason"] and "Xid 31" in found["reason"]
    assert host not in read_cordons(cluster.home)


def test_the_same_failure_twice_without_progress_ends_the_job(cluster):
    job, _ = start(cluster, "--max-restarts", "4")

    def fail(attempt):
        first = cluster.job(job)["hosts"][0]
        cluster.lab.run(first, ["docker", "rm", "-f", f"gpurun-{job}-{attempt}"])

    fail(1)
    cluster.wait_for(job, "QUEUED")
    until_again(cluster, job)
    fail(2)
    found = cluster.wait_for(job, "FAILED")
    assert found["reason"].endswith("attempt 1 failed the same way and no progress was made since")
    assert found["restarts"] == 1

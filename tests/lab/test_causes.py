"""Causes that end a gang or keep its GPUs: gpurun finds the host, names the cause, and avoids it for the next gang."""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager

import pytest
from cluster import TINY, Cluster
from faulting import adopt, events, hosts_of, kill_supervisor, stopping_reason, wait_until
from own_labs import own_lab

from gpurun.history.goodput import PARTS
from gpurun.lab.gpus import FILE, change, healthy, load_gpus, save
from gpurun.lab.spec import HostFolder
from gpurun.leases.store import LeaseStore
from gpurun.state.hosts import Cordons

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("causes")]

IMAGE = "gpurun/shell:1"
WAITS = (
    'echo "begun on attempt $GPURUN_ATTEMPT"; until [ -e "$GPURUN_RUN/end" ]; do sleep 0.1; done; . "$GPURUN_RUN/end"'
)
NO_SPACE = "echo \"OSError: [Errno 28] No space left on device: '/out/checkpoint'\" >&2; exit 1"


@pytest.fixture(scope="module")
def causes_lab():
    with own_lab("causes-roomy", racks=1, hosts=4, gpus=2, disk_mib=2 << 10) as lab:
        yield lab


@pytest.fixture
def cluster(causes_lab, tmp_path):
    made = Cluster(causes_lab, tmp_path)
    yield made
    for host in causes_lab.hosts:
        causes_lab.boot(host.name)
        hardware(made, host.name).joinpath("kmsg").write_text("")
        save(healthy(causes_lab.name, host), hardware(made, host.name) / FILE)
    made.cancel_all()
    wait_until(lambda: not list((made.home / "leases").glob("[!.]*")))
    made.assert_nothing_left()


def hardware(cluster, host):
    return HostFolder(cluster.lab.folder / "hosts" / host).hardware


def start(cluster, *args, command=("sh", "-c", WAITS), attempt=1):
    """Start a gang of two hosts and wait until the ranks of an attempt run; its id and its second host."""
    done = cluster.gpurun(*cluster.submit_args("--launcher", "tasks", *args, image=IMAGE), "--", *command)
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, f"begun on attempt {attempt}", times=2)
    return job, hosts_of(cluster, job)[1]


def gpu_of(cluster, job, host):
    return next(grant.gpus[0] for grant in LeaseStore(cluster.home).read(job).grants if grant.host == host)


def bus_of(cluster, job, host):
    """Return the job's GPU on the host as the kernel's log names it."""
    gpu = gpu_of(cluster, job, host)
    return load_gpus(hardware(cluster, host) / FILE)[f"gpu {gpu}"]["pci"].rpartition(".")[0]


def row_of(cluster, host):
    return {row["host"]: row for row in cluster.status()["hosts"]}[host]


def kernel_says(cluster, host, line):
    """Append a line to the host's kernel log, as the kernel does now."""
    with hardware(cluster, host).joinpath("kmsg").open("a") as log:
        log.write(f"4,1,{int(time.monotonic() * 1e6)},-;{line}\n")


def wait_until_again(cluster, job, attempt=2):
    """Wait until both ranks of this attempt run; returns its hosts."""
    cluster.wait_for_log(job, f"begun on attempt {attempt}", times=2)
    return hosts_of(cluster, job)


def say_at_the_end(cluster, job, host, script):
    """Hand the host's rank its last commands, while the disk has room. Returns what lets it run them."""
    path = f"/home/train/.gpurun/jobs/{job}/run/new"
    assert cluster.lab.run(host, ["sh", "-c", f"cat >{path}"], stdin=script.encode()).code == 0
    return lambda: cluster.lab.run(host, ["mv", path, path[: -len("new")] + "end"]).code == 0


@contextmanager
def full_disk(cluster, host, room_mib=8):
    """Fill the disk of the host, of its Docker engine and of what ranks print, but for so much."""
    fill = f"""dd if=/dev/zero of=/var/lib/full bs=1M 2>/dev/null \
        {f'count=$(($(df -m /var/lib | tail -1 | tr -s " " | cut -d " " -f 4) - {room_mib}))' if room_mib else ""}"""
    cluster.lab.run(host, ["sh", "-c", fill])
    try:
        yield
    finally:
        cluster.lab.run(host, ["rm", "/var/lib/full"])


def wait_for_cause(cluster, job, kind):
    """Wait until a host has reported this kind of cause."""
    wait_until(lambda: any(e["kind"] == "host" and e["state"] == kind for e in events(cluster, job)))


@pytest.mark.story
def test_a_stranger_keeps_the_gpu_out_of_use_until_it_is_gone(cluster):
    job, host = start(cluster)
    stranger = cluster.lab.run(host, ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], user="alice")
    pid = stranger.stdout.decode().strip()
    change(hardware(cluster, host) / FILE, gpu_of(cluster, job, host), {"processes": f"{pid}:512"})
    assert cluster.gpurun("cancel", job).code == 0
    row = row_of(cluster, host)
    assert (row["state"], row["free"]) == ("lost", 1)
    named = f"held by pid {pid} of alice (sleep 300)"
    assert any(named in e.get("reason", "") for e in events(cluster, job) if e["kind"] == "host")
    assert named in Cordons(cluster.home).read()[host].evidence
    cluster.lab.run(host, ["kill", pid])
    wait_until(lambda: not list((cluster.home / "leases").glob("[!.]*")))
    assert host not in Cordons(cluster.home).read()


@pytest.mark.story
def test_hardware_that_fails_takes_its_host_out_of_use_and_the_gang_elsewhere(cluster):
    """The first attempt's GPU has an Xid 79. The second attempt's GPU is lost: it is fenced only when NVML answers."""
    job, host = start(cluster, "--max-restarts", "1")
    bus = bus_of(cluster, job, host)
    kernel_says(cluster, host, "NVRM: Xid (PCI:0000:ee:00): 79, a GPU that nobody of this gang has")
    kernel_says(cluster, host, f"NVRM: Xid (PCI:{bus}): 13, pid=1, name=python3, Graphics Exception")
    kernel_says(
        cluster, host, f"NVRM: Xid (PCI:{bus}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    hosts = wait_until_again(cluster, job)
    assert host not in hosts
    cordon = Cordons(cluster.home).read()[host]
    assert (cordon.state, cordon.by) == ("cordoned", "gpurun")
    assert "Xid 79" in cordon.reason and "(rank 1)" in cordon.reason and job in cordon.reason
    assert cordon.evidence.startswith(f"NVRM: Xid (PCI:{bus}): 79")

    gpus = hardware(cluster, hosts[1]) / FILE
    change(gpus, gpu_of(cluster, job, hosts[1]), {"error": "15"})
    wait_until(lambda: cluster.record(job)["state"] == "FAILED")
    row = row_of(cluster, hosts[1])
    assert (row["state"], row["free"]) == ("cordoned", 1)
    assert "lost" in Cordons(cluster.home).read()[hosts[1]].reason
    for gpu in range(2):
        change(gpus, gpu, {"error": "0"})
    wait_until(lambda: not list((cluster.home / "leases").glob("[!.]*")))
    assert row_of(cluster, hosts[1])["free"] == 2
    assert Cordons(cluster.home).read()[hosts[1]].state == "cordoned", (
        "hardware stays out of use until a person says so"
    )


@pytest.mark.story
def test_three_gangs_fail_beside_each_other_and_each_learns_its_own_cause(cluster):
    """One runs out of its host's memory, one has a full disk, one is at fault itself. No hardware is to blame."""
    hungry, host = start(cluster, "--max-restarts", "1")
    here = hosts_of(cluster, hungry)
    there = [each.name for each in cluster.lab.hosts if each.name not in here]
    writer, full = start(cluster, "--host", ",".join(there))
    faulty, same = start(cluster, "--host", ",".join(here), "--max-restarts", "1")
    assert (host, same) == (here[1], hosts_of(cluster, faulty)[1])

    ends = say_at_the_end(cluster, writer, full, NO_SPACE)
    with full_disk(cluster, full):
        wait_for_cause(cluster, writer, "disk-full")
        assert ends()
        wait_until(lambda: cluster.record(writer)["ended_s"])
    bus = bus_of(cluster, faulty, same)
    kernel_says(cluster, same, f"NVRM: Xid (PCI:{bus}): 31, pid=7, name=python3, MMU Fault: ENGINE GRAPHICS")
    says = "echo 'CUDA error: an illegal memory access' >&2; exit 134"
    assert say_at_the_end(cluster, faulty, same, says)()
    name = f"gpurun-{hungry}-1"
    ident = cluster.lab.run(host, ["docker", "inspect", "-f", "{{.Id}}", name]).stdout.decode().strip()
    kernel_says(
        cluster, host, "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        f"task_memcg=/docker/{ident},task=python3,pid=99999,uid=1500",
    )  # fmt: skip
    cluster.lab.run(host, ["docker", "kill", name])

    found = cluster.record(writer)
    assert (found["state"], found["reason"]) == ("FAILED", f"{full}: Docker's disk is full (rank 1)")
    assert found["first_failure"]["evidence"].endswith("MiB free at /var/lib/docker")
    assert "No space left on device" in found["first_failure"]["excerpt"][-1]
    wait_until(lambda: cluster.record(faulty)["ended_s"])
    found = cluster.record(faulty)
    assert (found["state"], found["restarts"], found["code"]) == ("FAILED", 0, 1)
    assert found["first_failure"]["rank"] == 1
    assert "failed first, with exit code 134" in found["reason"] and "Xid 31" in found["reason"]
    assert host not in wait_until_again(cluster, hungry)
    assert stopping_reason(cluster, hungry).startswith(f"{host}: the host ran out of memory")
    assert Cordons(cluster.home).read() == {}, "it was nobody's hardware"


def test_a_gang_avoids_a_host_whose_disk_is_full_before_and_after_its_start(cluster):
    first = min(host.name for host in cluster.lab.hosts)
    with full_disk(cluster, first, room_mib=0):
        job, host = start(cluster, "--max-restarts", "2", attempt=2)
        placed = [[one["host"] for one in e["hosts"]] for e in events(cluster, job) if e["kind"] == "placement"]
        assert first in placed[0] and first not in placed[1], placed
    ends = say_at_the_end(cluster, job, host, NO_SPACE)
    with full_disk(cluster, host):
        wait_for_cause(cluster, job, "disk-full")
        assert ends()
        assert host not in wait_until_again(cluster, job, attempt=3)
    assert Cordons(cluster.home).read() == {}


@pytest.mark.xfail(
    strict=True,
    reason="gpurun blames a full disk only if a rank says so, and a rank prints to a file on that disk",
)
def test_a_disk_without_any_room_is_the_cause_though_its_rank_cannot_complain(cluster):
    job, host = start(cluster)
    ends = say_at_the_end(cluster, job, host, NO_SPACE)
    with full_disk(cluster, host, room_mib=0):
        wait_for_cause(cluster, job, "disk-full")
        assert ends()
        wait_until(lambda: cluster.record(job)["ended_s"])
    assert cluster.record(job)["reason"] == f"{host}: Docker's disk is full (rank 1)"


def test_the_same_failure_twice_without_progress_ends_the_job(cluster):
    job, _ = start(cluster, "--max-restarts", "4")
    for attempt in (1, 2):
        cluster.wait_for_log(job, f"begun on attempt {attempt}", times=2)
        cluster.lab.run(hosts_of(cluster, job)[0], ["docker", "rm", "-f", f"gpurun-{job}-{attempt}"])
    wait_until(lambda: cluster.record(job)["ended_s"])
    found = cluster.record(job)
    assert (found["state"], found["restarts"]) == ("FAILED", 1)
    assert found["reason"].endswith("attempt 1 failed the same way, and the job has made no progress since")


@pytest.mark.alone
def test_the_proof_costs_the_end_of_a_job_next_to_nothing(cluster):
    """From the ranks' end to the job's: the fence of two hosts and its question to NVML included."""

    def end_s() -> float:
        job, _ = start(cluster, command=("sh", "-c", 'echo "begun on attempt 1"'))
        wait_until(lambda: cluster.record(job)["ended_s"])
        times = {e["state"]: e["t"] for e in events(cluster, job) if e["kind"] == "state"}
        return times["SUCCEEDED"] - times["STOPPING"]

    assert min(end_s() for _ in range(5)) < 0.6


IDLE_POOLS = """
pools:
  notebooks: {reservation: 4, idle_timeout: 8s, idle_grace: 9s}
  batch: {reservation: 1, idle_timeout: 8s, idle_grace: 4s, idle_action: preempt}
  quiet: {reservation: 1, idle_timeout: 8s, idle_action: tell}
"""


def told(cluster, job):
    return [event["text"] for event in events(cluster, job) if "less than 5 % busy" in event.get("text", "")]


def test_an_idle_job_is_told_and_ended_and_another_is_preempted_as_its_pool_says(cluster):
    """A killed supervisor changes nothing of it, and a job with one busy GPU is left alone."""
    plain, sent = cluster.inventory, cluster.folder / "sent"
    cluster.inventory = plain.with_name("idle.yaml")
    cluster.inventory.write_text(plain.read_text() + IDLE_POOLS)
    notify = ("--notify", f"idle=command:tee -a {sent}")
    try:
        busy, host = start(cluster, "--pool", "notebooks")
        change(hardware(cluster, host) / FILE, gpu_of(cluster, busy, host), {"utilisation": "60"})
        refused = cluster.submit("--pool", "notebooks", "--idle-timeout", "1h", image=IMAGE)
        assert refused.code == 2 and "is longer than idle_timeout 8s of pool notebooks" in refused.err, refused.err
        ended, _ = start(cluster, "--pool", "notebooks", *notify)
        one = (
            "-n",
            "1",
            "--launcher",
            "tasks",
            "--image",
            IMAGE,
            "-i",
            str(cluster.inventory),
            "--",
            "sh",
            "-c",
            WAITS,
        )
        preempted, quiet = (cluster.gpurun("submit", "--pool", pool, *one).out.strip() for pool in ("batch", "quiet"))
        cluster.wait_until(ended, lambda: told(cluster, ended) and sent.exists() and sent.read_text().endswith("}\n"))
        kill_supervisor(cluster, ended)
        adopt(cluster, ended)
        wait_until(lambda: cluster.record(ended)["ended_s"] is not None)
        found = cluster.record(ended)
        assert (found["state"], found["first_failure"]["kind"]) == ("FAILED", "idle"), found
        assert re.fullmatch(
            r"the job was idle: all GPUs have been less than 5 % busy for \d+s, and no rank has reported a step or a "
            r"checkpoint \(`idle_timeout` of pool notebooks: 8s\)", found["reason"],
        ), found["reason"]  # fmt: skip
        (words,) = told(cluster, ended)
        assert words.endswith("gpurun ends the job in 9s unless a GPU or a rank works")
        (message,) = map(json.loads, sent.read_text().splitlines())
        assert (message["event"], message["job"], message["state"]) == ("idle", ended, "RUNNING")
        assert "is idle: all GPUs have been" in message["text"]
        wait_until(lambda: cluster.record(preempted)["state"] == "QUEUED")
        again = cluster.record(preempted)
        assert again["reason"].startswith("preempted: the job was idle: all GPUs") and not again["restarts"], again
        wait_until(lambda: told(cluster, quiet))
        for job in (busy, quiet):
            assert cluster.record(job)["state"] == "RUNNING"
        assert "gpurun" not in told(cluster, quiet)[0] and told(cluster, busy) == []
        rows = json.loads(cluster.gpurun("history", "--json").out)["attempts"]
        assert {row["job"]: (row["outcome"], row["cause"]) for row in rows} == {
            ended: ("FAILED", "idle"), preempted: ("PREEMPTED", ""),
        }  # fmt: skip
        assert all(row["idle_gpu_s"] > 0.5 * row["gpu_s"] for row in rows), rows
    finally:
        cluster.cancel_all()
        wait_until(lambda: not list((cluster.home / "leases").glob("[!.]*")))
        cluster.inventory.unlink()
        cluster.inventory = plain


STEPS = """
import os, sys, time
sys.path.append("/gpurun/python")
import gpurun_runtime as gpurun
print("begun on attempt", os.environ["GPURUN_ATTEMPT"], flush=True)
time.sleep(3)
for step in range(1, 1000):
    time.sleep(0.2)
    gpurun.progress(step)
    print("step", step, "at", time.time(), flush=True)
    if step % 60 == 0:
        time.sleep(2)
        gpurun.checkpointed(step)
    if step == 120:
        break
"""


def test_goodput_of_a_job_with_one_restart_adds_up_to_the_granted_time(cluster):
    """It saves nothing, so the second attempt repeats all steps of the first one."""
    for host in cluster.lab.hosts:
        for gpu in range(2):
            change(hardware(cluster, host.name) / FILE, gpu, {"utilisation": "80"})
    flags = ("--launcher", "tasks", "--max-restarts", "1")
    done = cluster.gpurun(*cluster.submit_args(*flags, image=TINY), "--", "python3", "-c", STEPS)
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, "step 40 at", times=2)
    host = hosts_of(cluster, job)[1]
    assert cluster.lab.run(host, ["docker", "kill", f"gpurun-{job}-1"]).code == 0
    wait_until(lambda: cluster.record(job)["ended_s"] is not None)
    assert cluster.record(job)["state"] == "SUCCEEDED", cluster.record(job)
    second, first = json.loads(cluster.gpurun("history", "--json").out)["attempts"]
    states = [(event["state"], event["t"]) for event in events(cluster, job) if event["kind"] == "state"]
    placed = [event["t"] for event in events(cluster, job) if event["kind"] == "placement"]
    ended = [t for state, t in states if state in ("QUEUED", "SUCCEEDED")][-2:]
    for row, begun_s, ended_s in zip((first, second), placed, ended, strict=True):
        parts = {part: row[part] for part in PARTS}
        assert sum(parts.values()) == pytest.approx(row["gpu_s"], rel=0.01), row
        assert row["gpu_s"] == pytest.approx(2 * (ended_s - begun_s), rel=0.05, abs=4.0), "by the job's own events"
        assert parts["running_gpu_s"] == 0.0 and parts["start_gpu_s"] > 2 * 3.0 and parts["steps_gpu_s"] > 0.0, parts
    assert (first["outcome"], first["cause"], first["lost_gpu_s"]) == ("RETRIED", "container", 0.0)
    assert (second["outcome"], second["lost_cause"]) == ("SUCCEEDED", "container"), second
    times = re.findall(r"\[0\]<stdout>:step (\d+) at ([\d.]+)", cluster.log(job))
    begin = [number for number, (step, _) in enumerate(times) if step == "1"][1]
    reached, again = int(times[begin - 1][0]), {int(step): float(at_s) for step, at_s in times[begin:]}
    assert second["lost_gpu_s"] / 2 == pytest.approx(again[reached + 1] - again[1], abs=5.0)
    assert second["checkpoint_gpu_s"] / 2 == pytest.approx(2.0 + 0.2 + 2.0, abs=2.5), "of the first, ranks may be late"
    made = json.loads(cluster.gpurun("report", "--json").out)
    spent = made["gpu_time"]
    assert list(spent.pop("lost_by_cause")) == ["container"]
    assert sum(spent.values()) == pytest.approx(made["total"]["gpu_s"], rel=0.01) and spent["unknown"] == 0.0


LOST_PEER = "echo 'RuntimeError: NCCL error: remote process exited or there was a network error' >&2; exit 1"


def test_lost_connections_beside_a_link_that_went_down_are_the_hosts_fault_and_use_no_retry(cluster):
    """Without the link they are the program's: it has a retry, and nobody is avoided."""
    ends = 'test "$GPURUN_ATTEMPT" = 1 || exit 0; '
    flags = ("--max-restarts", "1", "--retry", "1", "--retry-wait", "1s")
    job, host = start(cluster, *flags, command=("sh", "-c", WAITS.replace("until", ends + "until")))
    kernel_says(cluster, host, "veth0: renamed from eth0")
    kernel_says(cluster, host, "mlx5_core 0000:3b:00.0 ens1f0np0: Link down")
    wait_for_cause(cluster, job, "link")
    assert cluster.record(job)["state"] == "RUNNING", "alone it ends nothing"
    assert say_at_the_end(cluster, job, host, LOST_PEER)()
    wait_until(lambda: cluster.record(job)["ended_s"])
    found = cluster.record(job)
    assert (found["state"], found["restarts"], found["retries"], found["avoid"]) == ("SUCCEEDED", 1, 0, [host])
    assert f"{host}: the network link of ens1f0np0 went down (rank 1)" in str(events(cluster, job))
    assert host not in Cordons(cluster.home).read()

    job, host = start(cluster, *flags, command=("sh", "-c", WAITS.replace("until", ends + "until")))
    assert say_at_the_end(cluster, job, host, LOST_PEER)()
    wait_until(lambda: cluster.record(job)["ended_s"])
    found = cluster.record(job)
    assert (found["state"], found["restarts"], found["retries"], found["avoid"]) == ("SUCCEEDED", 0, 1, [])

"""Two jobs on one host: one takes all memory, processes, disk and cores that it can get; the other trains on."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager

import pytest
from cluster import TINY, Cluster
from faulting import events, wait_until
from own_labs import own_lab

from gpurun.lab import host

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("neighbours")]

HOST = "gpu-r1-01"
SHARE_MIB = 512
"""The memory of one of the two GPUs; all else of the machine is the host's own."""
PERIOD_US = 100_000

TRAINER = """
import os, time
ends, steps, weights = os.environ["GPURUN_RUN"] + "/end", 0, b"w" * (100 << 20)
print("begun", flush=True)
while not os.path.exists(ends):
    with open("/tmp/checkpoint", "wb") as stream:
        stream.write(weights[:1 << 20])
        os.fsync(stream.fileno())
    worker = os.fork() or os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0
    steps += 1
    time.sleep(0.05)
print("trained for", steps, "steps", flush=True)
"""
MEMORY = "print('begun', flush=True)\nhoard = [b'x' * (16 << 20) for _ in iter(int, 1)]"
SHM = "print('begun', flush=True)\nstream = open('/dev/shm/hoard', 'wb')\nwhile True: stream.write(b'x' * (1 << 20))"
FORKS = "import os, time\nprint('begun', flush=True)\nwhile os.fork(): pass\ntime.sleep(1000)"
DISK = """
import os, time
print("begun", flush=True)
while not os.path.exists(os.environ["GPURUN_RUN"] + "/go"): time.sleep(0.1)
with open("/tmp/hoard", "wb") as stream:
    while True:
        stream.write(b"x" * (4 << 20))
        stream.flush()
        time.sleep(0.05)
"""
CORES = "import os\nos.fork(), os.fork()\nprint('begun', flush=True)\nwhile True: pass"


@pytest.fixture(scope="module")
def neighbours_lab():
    with own_lab("neighbours", racks=1, hosts=1, gpus=2, disk_mib=4 << 10) as lab:
        yield lab


@pytest.fixture
def cluster(neighbours_lab, tmp_path):
    """A cluster whose host keeps all but 1 GiB of its memory."""
    made = Cluster(neighbours_lab, tmp_path)
    total = json.loads(made.lab.run(HOST, ["docker", "info", "--format", "{{json .MemTotal}}"]).stdout)
    system_mib = (total >> 20) - 2 * SHARE_MIB
    text = neighbours_lab.inventory.read_text().replace("ssh_config: ", f"ssh_config: {neighbours_lab.folder}/")
    made.inventory = tmp_path / "inventory.yaml"
    made.inventory.write_text(text.replace("defaults: {", f"defaults: {{system_memory_mib: {system_mib}, "))
    yield made
    made.cancel_all()
    made.assert_nothing_left()
    made.end_processes()


def start(cluster, program, *flags):
    """Start a job of one GPU, and wait until its rank has begun."""
    args = cluster.submit_args("--launcher", "tasks", *flags, gpus=1, image=TINY)
    done = cluster.gpurun(*args, "--", "python3", "-c", program)
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for_log(job, "begun")
    return job


def ended(cluster, job):
    wait_until(lambda: cluster.record(job)["ended_s"])
    return cluster.record(job)


def tell(cluster, job, word):
    cluster.lab.run(HOST, ["touch", f"/home/train/.gpurun/jobs/{job}/run/{word}"])


def finish(cluster, trainer):
    """Let the trainer end, and check that it ends well."""
    assert cluster.record(trainer)["state"] == "RUNNING", cluster.record(trainer)
    tell(cluster, trainer, "end")
    found = ended(cluster, trainer)
    assert found["state"] == "SUCCEEDED", found
    assert re.search(r"trained for \d+ steps", cluster.log(trainer))


def counted(cluster, job, name):
    """Return a file of the control group of the job's container; the names are those of cgroup v1 or v2."""
    found = cluster.lab.run(HOST, ["docker", "inspect", "-f", "{{.Id}}", f"gpurun-{job}-1"])
    ident = found.stdout.decode().strip()
    for place in host.cgroup(cluster.lab.name, HOST).places():
        for file in place.glob(f"**/{ident}/{name}"):
            return file.read_text().strip()
    return None


def quota_us(cluster, job):
    """Return the quota of a container's cores in each period; None if it has none."""
    v1, v2 = counted(cluster, job, "cpu.cfs_quota_us"), counted(cluster, job, "cpu.max")
    text = v1 or (v2 or "max").split()[0]
    return None if text in ("-1", "max") else int(text)


def throttled(cluster, job):
    return dict(line.split() for line in counted(cluster, job, "cpu.stat").splitlines())


def test_who_takes_more_memory_than_its_share_is_killed_and_named_and_its_neighbour_trains_on(cluster):
    trainer = start(cluster, TRAINER)
    for program in (MEMORY, FORKS):
        hog = start(cluster, program, "--max-restarts", "1")
        found = ended(cluster, hog)
        assert (found["state"], found["code"], found["restarts"]) == ("FAILED", 1, 0), found
        assert f"out of memory: the job had {SHARE_MIB} MiB on this host and used" in found["reason"], found
        assert f"--memory {2 * SHARE_MIB}MiB" in found["reason"]
        assert found["first_failure"]["kind"] == "oom"
    shm = start(cluster, SHM)
    assert ended(cluster, shm)["state"] == "FAILED"
    assert "No space left on device" in cluster.log(shm), "half of the share: a program is told instead of killed"
    why = cluster.gpurun("why", trainer).out
    assert f"{HOST}: {SHARE_MIB}MiB of memory (up to {SHARE_MIB // 2}MiB of it in /dev/shm)" in why
    finish(cluster, trainer)


def test_cores_are_divided_while_two_jobs_are_there_and_only_then(cluster, record_property):
    """The measure is what the kernel allowed: this machine has other work."""
    trainer = start(cluster, TRAINER)
    assert quota_us(cluster, trainer) is None
    hog = start(cluster, CORES, "--cpus", "0.1")
    shares = PERIOD_US // 10, PERIOD_US
    cluster.wait_until(hog, lambda: (quota_us(cluster, hog), quota_us(cluster, trainer)) == shares)
    before, used_before = throttled(cluster, hog), used_us(cluster, hog)
    cluster.wait_until(hog, lambda: int(throttled(cluster, hog)["nr_throttled"]) >= int(before["nr_throttled"]) + 20)
    used, after = used_us(cluster, hog) - used_before, throttled(cluster, hog)
    periods = int(after["nr_periods"]) - int(before["nr_periods"]) + 2
    record_property("hog", f"{used / 1e6:.2f} s of CPU in {periods} periods; {after}")
    record_property("trainer", f"{used_us(cluster, trainer) / 1e6:.2f} s of CPU; {throttled(cluster, trainer)}")
    assert used <= 1.2 * periods * PERIOD_US // 10, "four processes, but no more than a tenth of a core"
    assert int(throttled(cluster, trainer)["nr_throttled"]) <= 2, "it needs less than its core"
    assert cluster.gpurun("cancel", hog).code == 0
    wait_until(lambda: quota_us(cluster, trainer) is None)
    finish(cluster, trainer)


def used_us(cluster, job):
    v1 = counted(cluster, job, "cpuacct.usage")
    return int(v1) // 1000 if v1 else int(throttled(cluster, job)["usage_usec"])


@contextmanager
def nearly_full(cluster, room_mib):
    size = f"$(($(df -m /var/lib | tail -1 | tr -s ' ' | cut -d ' ' -f 4) - {room_mib}))"
    assert cluster.lab.run(HOST, ["sh", "-c", f"fallocate -l {size}M /var/lib/full"]).code == 0
    try:
        yield
    finally:
        cluster.lab.run(HOST, ["rm", "/var/lib/full"])


def test_who_fills_the_disk_is_ended_and_named_and_its_neighbour_saves_on(cluster):
    trainer = start(cluster, TRAINER)
    for place, flags in (("/tmp", ()), ("/out", ("--outputs", "/out"))):
        hog = start(cluster, DISK.replace("/tmp", place), "--max-restarts", "1", *flags)
        with nearly_full(cluster, room_mib=500):  # 5 % are 205 MiB
            tell(cluster, hog, "go")
            found = ended(cluster, hog)
        assert (found["state"], found["code"], found["restarts"]) == ("FAILED", 1, 0), found
        assert "the job filled Docker's disk with" in found["reason"], found
    finish(cluster, trainer)
    told = [e["reason"] for e in events(cluster, trainer) if e["kind"] == "host" and e["state"] == "disk-full"]
    assert not [reason for reason in told if "the job filled" in reason], "it may be told of a full disk, not blamed"


def test_the_victim_of_a_host_without_memory_is_told_that_the_host_is_at_fault(cluster):
    """The limit of the group of all containers stands for the memory of the host."""
    trainer = start(cluster, TRAINER)
    place = next(each for each in host.cgroup(cluster.lab.name, HOST).places() if (each / "memory.stat").exists())
    limit = next(each for name in ("memory.max", "memory.limit_in_bytes") if (each := place / name).exists())
    limit.write_text(str(250 << 20))
    try:
        victim = start(cluster, MEMORY)
        found = ended(cluster, victim)
    finally:
        limit.write_text("-1" if limit.name == "memory.limit_in_bytes" else "max")
    assert (found["state"], found["code"]) == ("FAILED", 4), found
    assert "the host ran out of memory" in found["reason"], found
    finish(cluster, trainer)

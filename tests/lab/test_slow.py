"""A rank that is slowed by 30 % is named with its host and reason, on real hosts; a quiet gang names nobody."""

from __future__ import annotations

import json

import pytest
from at_once import finish, start
from cluster import Cluster
from faulting import events
from waiting import until

from gpurun.lab import gpus

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("slow")]

FOR_S = 30.0
PROGRAM = """
import contextlib, hashlib, json, os, socket, sys, time
import gpurun_runtime as g

factor, steps, marks = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "marks"
me, size = g.gang().rank, g.gang().size
path = os.environ["GPURUN_RUN"] + "/"

def meet(step):  # all ranks wait for the slowest one, as in an allreduce; rank 0 collects and releases
    if me:
        line.sendall(b"x"); line.recv(1)
    else:
        for each in lines: each.recv(1)
        for each in lines: each.sendall(b"x")

port = 23000 + int(os.environ["GPURUN_JOB"][2:6], 16) % 4000
if me == 0:
    server = socket.create_server(("", port)); lines = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            line = socket.create_connection((g.gang().addresses[0], port)); break
        except OSError:
            time.sleep(0.1)
took = []
time.sleep(3.0 if me == 1 else 0)  # it compiles for longer
for step in range(steps):
    begun = time.monotonic()
    with g.compute() if marks else contextlib.nullcontext():
        time.sleep(0.05)
        for _ in range(20):
            hashlib.sha256(bytes(200000)).digest()
        if me == 2:
            time.sleep((factor - 1.0) * (time.monotonic() - begun))
    took.append(round(time.monotonic() - begun, 5))
    meet(step)
    if step % 100 == 99:
        time.sleep(0.5)  # a checkpoint
    g.progress(step + 1, of=steps)
with open(os.environ["GPURUN_OUTPUTS"] + "/took.%d" % me, "w") as out:
    json.dump(took, out)
"""


@pytest.fixture
def busy(cluster: Cluster):
    """The lab, whose GPUs are in use. `busy(host, gpu, **facts)` changes the stand-in; its state returns at the end."""
    cluster.environ["GPURUN_SLOW_FOR_S"] = str(FOR_S)
    files = {host.name: cluster.lab.folder / "hosts" / host.name / "hardware" / gpus.FILE for host in cluster.lab.hosts}
    before = {path: path.read_text() for path in files.values()}

    def change(host: str, gpu: int, **facts: object) -> None:
        gpus.change(files[host], gpu, {key: str(value) for key, value in facts.items()})

    for host in cluster.lab.hosts:
        for gpu in range(2):
            change(host.name, gpu, utilisation=100)
    yield change
    cluster.cancel_all()
    for path, text in before.items():
        path.write_text(text)


def gang(cluster: Cluster, factor: float, steps: int, how: str = "marks") -> str:
    """Start four ranks, each on a host of its own."""
    args = ("python3", "-c", PROGRAM, str(factor), str(steps), how)
    job = start(cluster, "tasks", *args, gpus=4, outputs="/out")
    cluster.wait_for(job, "RUNNING")
    return job


def named(cluster: Cluster, job: str) -> list[str]:
    return [event["text"] for event in events(cluster, job) if "slow" in event]


def place(cluster: Cluster, job: str, rank: int) -> tuple[str, int]:
    grant = cluster.record(job)["granted"][rank]
    return grant["host"], grant["gpus"][0]


def test_a_rank_that_is_slowed_by_a_third_is_named_and_a_quiet_gang_beside_it_names_nobody(cluster, busy):
    slowed = gang(cluster, 1.3, 2000)
    host, gpu = place(cluster, slowed, 2)
    busy(host, gpu, pcie_width=8)
    quiet = gang(cluster, 1.0, 600)
    begun_s = next(event["t"] for event in events(cluster, slowed) if event.get("state") == "RUNNING")
    (text,) = until(lambda: named(cluster, slowed), every_s=0.5)
    at_s = next(event["t"] for event in events(cluster, slowed) if "slow" in event)
    assert text.startswith(f"rank 2 on {host} is slow: for 30s, its own work took"), text
    assert "the GPU's PCIe link uses 8 of 16 lanes" in text
    assert at_s - begun_s <= 2 * FOR_S
    assert text in cluster.job(slowed)["warnings"]
    assert text in cluster.gpurun("why", slowed).out and text in cluster.gpurun("status", slowed).out
    cluster.gpurun("cancel", slowed)
    finish(cluster, quiet, "SUCCEEDED", 0)
    assert named(cluster, quiet) == []
    inventory = (host, "-i", str(cluster.inventory), "--json")
    (shown,) = json.loads(cluster.gpurun("inventory", "show", *inventory).out)["hosts"]
    assert (shown["slow"]["times"], shown["slow"]["why"]) == (1, text)
    found = json.loads(cluster.gpurun("doctor", *inventory).out)
    assert [each["hosts"] for each in found["notes"] if each["check"] == "named-slow"] == [[host]]
    assert [each["hosts"] for each in found["findings"] if each["check"] == "gpu-pcie"] == [[host]]


def test_a_throttled_gpu_is_named_although_the_program_marks_nothing(cluster, busy):
    job = gang(cluster, 1.0, 2000, "silent")
    host, gpu = place(cluster, job, 3)
    busy(host, gpu, throttle="0x40", sm_mhz=900)
    (text,) = until(lambda: named(cluster, job), every_s=0.5)
    assert text.startswith(f"rank 3 on {host} is slow: for 30s, the clock of GPU {gpu} was 39 % lower"), text
    assert "hardware thermal slowdown" in text
    quiet = gang(cluster, 1.0, 500)
    cluster.gpurun("cancel", job)
    busy(host, gpu, throttle="0x04", sm_mhz=900)
    finish(cluster, quiet, "SUCCEEDED", 0)
    assert named(cluster, quiet) == [], "a power cap is no fault"


def doctor(cluster: Cluster, *hosts: str) -> dict:
    return json.loads(cluster.gpurun("doctor", *hosts, "-i", str(cluster.inventory), "--json").out)


def state_of(cluster: Cluster, host: str) -> dict:
    return next(each for each in cluster.status()["hosts"] if each["host"] == host)


def test_doctor_names_the_host_of_each_gpu_that_slows_a_gang(cluster, busy):
    hot, narrow, worn, old = (host.name for host in cluster.lab.hosts)
    busy(hot, 0, throttle="0x60")
    busy(narrow, 1, pcie_width=8)
    busy(worn, 0, retirement_pending=1)
    busy(old, 1, pcie_generation=1)
    found = {(each["check"], *each["hosts"]): each for each in doctor(cluster)["findings"]}
    said = {
        ("gpu-throttle", hot): "software thermal slowdown, hardware thermal slowdown",
        ("gpu-pcie", narrow): "GPU 1: the PCIe link uses 8 of 16 lanes",
        ("gpu-ecc", worn): "bad memory pages or rows, which only a GPU reset takes out of use",
        ("gpu-pcie", old): "GPU 1: the PCIe link uses generation 1 of 3 under load",
    }
    assert set(said) == set(found)
    assert all(words in found[key]["evidence"] and found[key]["remedy"] for key, words in said.items())


def test_a_host_that_was_out_passes_its_burn_in_or_stays_out_with_the_reason(cluster, busy):
    """Somebody reseats a lost GPU, at first badly: half of its lanes have no contact."""
    cluster.home.mkdir()
    host = cluster.lab.hosts[0].name
    busy(host, 0, error=15)
    doctor(cluster, host)
    assert state_of(cluster, host)["state"] == "out"
    busy(host, 0, error=0, pcie_width=8)
    for _ in range(2):
        doctor(cluster, host)
        found = state_of(cluster, host)
        assert found["state"] == "out" and "8 of 16 lanes" in json.dumps(found), found
    busy(host, 0, pcie_width=16)
    doctor(cluster, host)
    assert state_of(cluster, host)["state"] == "ok", "doctor made both checks"

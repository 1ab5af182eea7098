"""A script that saves beside itself, as PyTorch's tutorials do, continues from its snapshot after a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import TINY, Cluster
from faulting import hosts_of
from waiting import until

from gpurun.lab import LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("power cuts")]

TRAIN = """
import os, sys, time
import helper
epoch = 0
if os.path.exists("snapshot.pt"):
    epoch = int(open("snapshot.pt").read().split()[0])
    print("Loading snapshot", epoch, flush=True)
print("begins at", epoch, "beside", os.listdir("."), flush=True)
while epoch < int(sys.argv[1]):
    epoch += 1
    with open("snapshot.pt", "w") as file:
        file.write(f"{epoch} ")
        file.flush()
        time.sleep(0.2)
        file.write("whole")
    with open("helper.py", "a") as file:
        file.write("#")
    print("Epoch", epoch, "saved", flush=True)
    time.sleep(6)
print("helper has", open("helper.py").read(), flush=True)
"""


def submit(cluster: Cluster, folder: Path, epochs: int, *flags: str) -> str:
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("")
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "1", "--image", TINY, "--workdir", str(folder),
        "--launcher", "tasks", "--outputs-every", "1s", "--max-restarts", "9", "--grace", "1s", *flags,
        "--", "python3", "train.py", str(epochs),
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def volumes(cluster: Cluster, host: str) -> str:
    return str(cluster.lab.run(host, ["docker", "volume", "ls", "-q"]).stdout)


def test_a_script_that_saves_beside_itself_never_begins_anew(named_lab, tmp_path):
    lab = named_lab("beside")
    lab.up(LabSpec(lab.name, racks=1, gpus=1))
    cluster = Cluster(lab, tmp_path)
    folder = tmp_path / "it's, a: folder"
    folder.mkdir()
    try:
        job = submit(cluster, folder, 9)

        def has_whole() -> bool:
            return any((cluster.home / "jobs" / job / "outputs.whole").glob("[0-9]*"))

        until(has_whole, lambda: cluster.log(job), every_s=0.5)
        (first,) = hosts_of(cluster, job)
        assert f"gpurun-layer-{job}-1" in volumes(cluster, first)
        lab.crash(first)
        until(lambda: "Loading snapshot" in cluster.log(job), lambda: cluster.log(job), every_s=0.5)
        shown = cluster.gpurun("status", job)
        assert "snapshot.pt" in shown.out, shown.out
        lab.boot(first)
        log = cluster.log(job)
        begun = [int(line.split("begins at ")[1].split()[0]) for line in log.splitlines() if "begins at" in line]
        assert begun[0] == 0 and begun[1] > 0, log
        done = cluster.gpurun("wait", job)
        assert done.code == 0, cluster.log(job)
        assert (folder / "helper.py").read_text() == "", "the head's copy and the folder stay as they are"
        assert (cluster.home / "jobs" / job / "outputs/@workspace/snapshot.pt").read_text() == "9 whole"
        assert sorted(path.name for path in (cluster.home / "jobs" / job / "outputs/@workspace").iterdir()) == [
            "helper.py", "snapshot.pt",
        ]  # fmt: skip
        until(lambda: "layer" not in "".join(volumes(cluster, host.name) for host in lab.hosts), every_s=1.0)
        for host in lab.hosts:
            left = lab.run(host.name, ["sh", "-c", "ls -A /home/train/.gpurun/jobs /home/train/.gpurun/outputs"])
            assert job not in str(left.stdout), left
        refused = submit(cluster, folder, 1, "--workdir-read-only")
        cluster.gpurun("wait", refused)
        assert "Read-only file system" in cluster.log(refused)
    finally:
        cluster.end_processes()

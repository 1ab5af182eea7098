"""``gpurun rerun``: a job runs again unchanged, even if the workdir or the image's name has changed."""

from __future__ import annotations

import json

import pytest
from cluster import TRAIN

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

SCRIPT = """
import hashlib, os, random
import gpurun_runtime as gpurun
random.seed(int(os.environ["SEED"]))
value = sum(random.random() for _ in range(100_000))
gpurun.report(1, value=value)
print("digest", hashlib.sha256(repr(value).encode()).hexdigest())
"""


def test_the_same_inputs_give_the_same_result(cluster, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT)
    done = cluster.submit(
        "--workdir",
        str(work),
        "--launcher",
        "tasks",
        "-e",
        "SEED=7",
        gpus=1,
        image=TRAIN,
        command=["python3", "train.py"],
    )
    assert done.code == 0, done.err
    (first,) = cluster.status()["jobs"]
    (work / "train.py").write_text("raise SystemExit(3)")
    done = cluster.gpurun("rerun", first["id"], "--follow", "--name", "again")
    assert done.code == 0, done.err + done.out
    second = next(job for job in cluster.status()["jobs"] if job["name"] == "again")
    shown = [json.loads(cluster.gpurun("show", job["id"], "--json").out) for job in (first, second)]
    assert shown[0]["inputs"] == shown[1]["inputs"] and shown[0]["metrics"] == shown[1]["metrics"] != {}
    assert shown[0]["inputs"]["code"].startswith("sha256:") and shown[0]["inputs"]["image_id"].startswith("sha256:")
    digests = {line for job in (first, second) for line in cluster.log(job["id"]).splitlines() if "digest" in line}
    assert len({line.rpartition(" ")[2] for line in digests}) == 1
    assert cluster.gpurun("diff", first["id"], second["id"]).err.strip() == "the same"

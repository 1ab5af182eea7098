"""``gpurun rerun``: a job runs again unchanged, even if the workdir or the image's name has changed."""

from __future__ import annotations

import json

import pytest
from at_once import finish, printed, start

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("rerun")]

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
    first = start(cluster, "tasks", "python3", "train.py", gpus=1, workdir="../work", flags=("-e", "SEED=7"))
    finish(cluster, first, "SUCCEEDED", 0)
    (work / "train.py").write_text("raise SystemExit(3)")
    done = cluster.gpurun("rerun", first, "--name", "again")
    assert done.code == 0, done.err
    second = done.out.strip()
    assert finish(cluster, second, "SUCCEEDED", 0)["name"] == "again"
    shown = [json.loads(cluster.gpurun("show", job, "--json").out) for job in (first, second)]
    assert shown[0]["inputs"] == shown[1]["inputs"] and shown[0]["metrics"] == shown[1]["metrics"] != {}
    assert shown[0]["inputs"]["code"].startswith("sha256:") and shown[0]["inputs"]["image_id"].startswith("sha256:")
    assert printed(cluster, first, 0) == printed(cluster, second, 0) != []
    assert cluster.gpurun("diff", first, second).err.strip() == "the jobs are the same"

"""A package that the image lacks: built once on the head, one layer to each host, and nothing the second time."""

from __future__ import annotations

import json
import os

import pytest
from cluster import TINY
from imaging import Head
from wheels import make_wheel

from gpurun.lab import engine

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("environments")]


def test_ranks_import_what_the_image_lacks(cluster, tmp_path):
    name = f"tiny{os.getpid()}"  # no other test's environment
    make_wheel(tmp_path / "wheels", name, "1.0")
    (tmp_path / "r.txt").write_text(f"{name}==1.0\n")
    (tmp_path / "recipe.yaml").write_text("python: {requirements: r.txt, index: ./wheels}\n")
    args = cluster.submit_args("--launcher", "tasks", gpus=2, image=TINY)
    args[1:1] = [str(tmp_path / "recipe.yaml")]
    head = Head(engine.ensure())
    program = f"import {name}; print('found', {name}.VERSION)"
    try:
        done = cluster.gpurun(*args, "--follow", "--", "python3", "-c", program)
        assert done.code == 0, done.err
        assert "python: " in done.err
        (job,) = cluster.status()["jobs"]
        assert cluster.log(job["id"]).count("found 1.0") == 2
        inputs = json.loads(cluster.gpurun("show", job["id"], "--json").out)["inputs"]
        head.made.append(inputs["image"])
        assert inputs["python.packages"] == [f"{name}==1.0"] and inputs["python.base"] == TINY
        again = cluster.gpurun("ship", inputs["image"], ",".join(job["hosts"]), "-i", str(cluster.inventory), "--json")
        assert json.loads(again.out)["bytes_missing"] == 0
        planned = cluster.gpurun(*args, "--dry-run", "--json", "--", "true")
        assert json.loads(planned.out)["environment"]["built"], planned.err
        listed = json.loads(
            cluster.gpurun("images", ",".join(job["hosts"]), "-i", str(cluster.inventory), "--json").out
        )
        assert all(inputs["image"] in json.dumps(found) for found in listed["images"].values())
    finally:
        for host in cluster.lab.hosts:
            for image in head.made:
                cluster.lab.run(host.name, ["docker", "rmi", "-f", image])
        head.close()

"""TensorBoard on the head shows the curve that a job on a real host writes, while it writes it."""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection
from subprocess import PIPE, Popen
from urllib.parse import urlsplit

import pytest
from boards import write
from cluster import TINY

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("tensorboard")]

RECIPE = f"""
name: curve
image: {TINY}
launcher: tasks
gpus: 1
command: [python3, /workspace/train.py]
workdir: .
outputs: /out
outputs_every: 1s
"""
PROGRAM = """
import os, pathlib, time
(source,) = pathlib.Path("/workspace").glob("curve/*tfevents*")
records, logs = source.read_bytes(), pathlib.Path(os.environ["GPURUN_OUTPUTS"], "logs")
logs.mkdir()
with open(logs / source.name, "wb", buffering=0) as file:
    while records:
        size = 8 + 4 + int.from_bytes(records[:8], "little") + 4
        file.write(records[:size])
        records = records[size:]
        time.sleep(0.2)
time.sleep(600)
"""
"""Writes a curve that is there already event by event, as a training script does: the image has no TensorFlow."""


def test_the_curve_of_a_job_grows_in_tensorboard_while_it_trains(cluster, tmp_path):
    folder = tmp_path / "recipe"
    write(folder / "curve", 1, 1000)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "train.py").write_text(PROGRAM)
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory))
    assert done.code == 0, done.err
    job = done.out.strip()
    board = Popen([sys.executable, "-m", "gpurun", "tensorboard", job], env=cluster.environ, stdout=PIPE, text=True)
    try:
        url = urlsplit(board.stdout.readline().strip())
        connection = HTTPConnection("127.0.0.1", url.port, timeout=30)
        connection.request("GET", f"/?{url.query}")
        answer = connection.getresponse()
        answer.read()
        cookie = answer.headers["Set-Cookie"].partition(";")[0]

        def curve():
            path = f"/data/plugin/scalars/scalars?tag=loss&run=curve-{job}/logs"
            connection.request("GET", path, headers={"Cookie": cookie})
            answer = connection.getresponse()
            body = answer.read()
            return [step for _, step, _ in json.loads(body)] if answer.status == 200 else []

        cluster.wait_until(job, lambda: len(curve()) >= 5)
        first = curve()
        cluster.wait_until(job, lambda: len(curve()) >= len(first) + 5)
        assert curve()[: len(first)] == first == list(range(1, len(first) + 1))
        assert cluster.record(job)["state"] == "RUNNING"
    finally:
        board.terminate()
        assert board.wait(30) == 0
        cluster.gpurun("cancel", job)
        cluster.wait_for(job, "CANCELLED")

"""TensorBoard on the head shows the curve that a job on a real host writes, while it writes it."""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection
from subprocess import PIPE, Popen
from urllib.parse import urlsplit

import pytest
from cluster import TRAIN
from faulting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

RECIPE = f"""
name: curve
image: {TRAIN}
launcher: tasks
gpus: 1
command: [python3]
outputs: /out
outputs_every: 2s
"""
PROGRAM = """
import os, time
import tensorflow as tf
writer = tf.summary.create_file_writer(os.environ["GPURUN_OUTPUTS"] + "/logs")
for step in range(1, 100):
    with writer.as_default():
        tf.summary.scalar("loss", 1 / step, step=step)
    writer.flush()
    time.sleep(0.5)
"""


def test_the_curve_of_a_job_grows_in_tensorboard_while_it_trains(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory), "--", "python3", "-c", PROGRAM)
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

        wait_until(lambda: len(curve()) >= 5)
        first, began = curve(), time.monotonic()
        wait_until(lambda: len(curve()) >= len(first) + 5)
        assert curve()[: len(first)] == first == list(range(1, len(first) + 1))
        assert time.monotonic() - began < 30, "2 s until it is copied, 5 s each until gpurun and TensorBoard look"
        assert json.loads(cluster.gpurun("status", job, "--json").out)["jobs"][0]["state"] == "RUNNING"
    finally:
        board.terminate()
        assert board.wait(30) == 0
        cluster.gpurun("cancel", job)
        cluster.wait_for(job, "CANCELLED")

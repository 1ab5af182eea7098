"""A job with a curve, and calls of ``gpurun tensorboard`` as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


def new_job(home, **changes):
    spec = JobSpec(**{"name": "cnn", "image": "i", "gpus": 4, "command": ("x",), "outputs": "/out", **changes})
    return JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=time.time())


def write(folder, first, last):
    """A curve as a training script writes it: loss = 1 / step."""
    from tensorboard.compat.proto.event_pb2 import Event  # 0.3 s, which processes without these tests save
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step in range(first, last):
        value = Summary.Value(tag="loss", simple_value=1 / step)
        writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=Summary(value=[value])))
    writer.close()


class Call:
    """One call of the command; `get` asks its server as a browser would."""

    def __init__(self, home, *argv):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpurun", "tensorboard", *argv],
            env={**os.environ, "GPURUN_HOME": str(home), "SSH_CONNECTION": "1 2 3 4"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = self.process.stdout.readline().strip()
        self.port = urlsplit(self.url).port
        self.cookie = ""

    def get(self, path):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers={"Cookie": self.cookie} if self.cookie else {})
        answer = connection.getresponse()
        if "Set-Cookie" in answer.headers:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer.status, answer.read()

    def curve(self, run):
        status, body = self.get(f"/data/plugin/scalars/scalars?tag=loss&run={run}")
        return [step for _, step, _ in json.loads(body)] if status == 200 else []

    def folders(self):
        return list(Path(tempfile.gettempdir()).glob(f"gpurun-tensorboard-{self.process.pid}-*"))


def until(check, timeout_s=60):
    end_s = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < end_s
        time.sleep(0.2)
    return found

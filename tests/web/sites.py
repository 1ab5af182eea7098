"""A state directory with jobs, and the pages of it as an application to ask."""

from __future__ import annotations

import json
import time

from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.look import open_cluster
from gpurun.quantities import duration
from gpurun.views.loopback import Door
from gpurun.views.web import Pages

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"n[1-8]": {}}}}
"""
TOKEN = "t0ken-of-this-call"
HOSTILE = "<script>alert(1)</script>\x1b[2J'\"><img src=x onerror=alert(2)>"


def new_job(home, name="cnn", gpus=4):
    spec = JobSpec(name=name, image="i", gpus=gpus, command=("x",))
    return JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=time.time())


def log(folder, *lines, reports=()):
    """Write a job's log as its supervisor does: lines of rank 0, and what the rank reports."""
    text = [f"2026-01-01T00:00:00.{at:09}Z o@1/n1/0:{at + 1} [0]<stdout>:{line}\n" for at, line in enumerate(lines)]
    for step, metrics in reports:
        told = json.dumps({"step": step, "time": 1.7e9 + step, "metrics": metrics})
        text.append(f"2026-01-01T00:00:01.{step:09}Z m@1/n1/0:{step + 1} [0]<metrics>:{told}\n")
    with folder.log.plain.open("a") as stream:
        stream.writelines(text)


def pages(home):
    environ = {"GPURUN_HOME": str(home), "GPURUN_INVENTORY": str(home.parent / "inventory.yaml")}
    return Door(Pages(JobStore(home), lambda: open_cluster(None, environ), duration), TOKEN, "gpurun web")


def ask(door, path="/", *, cookie=None, query="", host="127.0.0.1:8000", method="GET"):
    told = {}

    def start(status, headers):
        told.update(status=int(status.split()[0]), headers=dict(headers))

    sent = f"{door._cookie}={TOKEN}" if cookie is None else cookie
    environ = {
        "PATH_INFO": path, "QUERY_STRING": query, "HTTP_COOKIE": sent, "HTTP_HOST": host, "REQUEST_METHOD": method,
    }  # fmt: skip
    body = b"".join(door(environ, start)).decode()
    return told["status"], told["headers"], body

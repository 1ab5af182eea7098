#!/usr/bin/env python3
"""Make the pictures of docs/views.md: `gpurun status` and `gpurun top` as SVG, `gpurun web` in a browser as PNG.

    .venv/bin/python .ci/screenshots.py [FOLDER]     FOLDER: docs unless given

The cluster is made up: a state directory in a temporary folder, with jobs that hold GPUs and no process behind them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP))

from rich.console import Console
from rich.text import Text

from gpurun.facts import (
    GpuSample,
    HostSample,
)
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import WaiterLocks, open_cluster
from gpurun.quantities import duration
from gpurun.state.hosts import Cordon, Cordons
from gpurun.views.app import (
    Actions,
    TopApp,
)
from gpurun.views.feed import Feed
from gpurun.views.rows import leased_hosts

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks:
  r1: {hosts: {"gpu-r1-[01-08]": {}}}
  r2: {hosts: {"gpu-r2-[01-08]": {generation: volta, gpus: 8}}}
  r3: {hosts: {"gpu-r3-[01-08]": {generation: volta, gpus: 8}}}
"""
JOBS = (("resnet50", 16), ("bert-large", 32), ("sweep-lr-0.1", 2), ("sweep-lr-0.01", 2), ("notebook", 1), ("llama", 64),
        ("vit", 8), ("eval", 4), ("llama-long", 64))  # fmt: skip
COLUMNS = 100


def make_cluster(folder: Path) -> list[object]:
    """A state directory with running and waiting jobs. Returns locks that must stay open."""
    home, path = folder / "state", folder / "inventory.yaml"
    path.write_text(INVENTORY)
    os.environ.update(GPURUN_HOME=str(home), GPURUN_INVENTORY=str(path), XDG_CACHE_HOME=str(folder / "cache"))
    store, held = JobStore(home), []
    held.append(WaiterLocks(home).take())
    for at, (name, gpus) in enumerate(JOBS):
        spec = JobSpec(name=name, image="me/train:1", gpus=gpus, command=("python3", "train.py"))
        store.create(spec, inventory=path, now_s=time.time() - 9000 + 700 * at)
    held += [lock for _, lock in Allocator(home).run_pass(now_s=time.time()).granted]
    for record in list(store.live_records()):
        if record.granted:
            started_s = record.submitted_s + 40
            store.get(record.id).write(record.but(state=State.RUNNING, started_s=started_s, attempt=1))
    with Cordons(home).changing() as cordons:
        cordons["gpu-r1-08"] = Cordon("cordoned", "ada", time.time(), "fan")
    return held


def write_log(home: Path) -> str:
    """A log with a curve for each job that runs; the first one's id."""
    job = min(JobStore(home).live_records(), key=lambda record: record.submitted_s)
    rng, lines = random.Random(1), []
    for step in range(1, 400):
        loss = 2.2 * math.exp(-step / 120) + 0.35 + rng.random() * 0.05
        told = {"step": step, "time": 1.7e9 + step, "metrics": {"loss": loss, "accuracy": 1 - loss / 3}}
        lines.append(f"2026-01-01T00:00:00.{step:09}Z m@1/n/0:{step} [0]<metrics>:{json.dumps(told)}\n")
        if step % 20 == 0:
            lines.append(f"2026-01-01T00:00:00.{step:09}Z o@1/n/0:{step} [0]<stdout>:step {step}: loss {loss:.4f}\n")
    for record in JobStore(home).live_records():
        if record.granted:
            (home / "jobs" / record.id / "log").write_text("".join(lines))
    return job.id


def picture_status(folder: Path) -> None:
    """What a terminal of 100 columns shows."""
    argv = [sys.executable, "-m", "gpurun", "status"]
    with mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}):
        os.environ.pop("NO_COLOR", None)
        said = subprocess.run(
            ["script", "-qec", " ".join(argv), "/dev/null"], capture_output=True, text=True, check=True
        ).stdout
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="256", force_terminal=True)
        console.print(Text.from_ansi(re.sub(r"\r", "", said)), end="")
    drawn = console.export_svg(title="gpurun status", unique_id="status")
    (folder / "status.svg").write_text(without_fonts(drawn), encoding="utf-8")


def without_fonts(svg: str) -> str:
    """A picture that asks no other server for Rich's font: the reader's own monospaced one does."""
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def picture_top(folder: Path, home: Path) -> None:
    """The first screen, with made-up samples and a host that does not answer."""
    feed = Feed(JobStore(home), lambda: open_cluster(None, os.environ))
    feed.refresh()
    rng = random.Random(2)
    samples = {name: _sample(rng, 8 if "r1" not in name else 4) for name in leased_hosts(feed.latest().picture)}
    samples["gpu-r3-04"] = HostSample(problem="the connection timed out")

    async def draw() -> None:
        app = TopApp(feed, Actions(str, str), duration)
        async with app.run_test(size=(120, 34)) as pilot:
            await pilot.pause(0.5)
            (folder / "top.svg").write_text(without_fonts(app.export_screenshot(title="gpurun top")))

    with mock.patch.object(feed.sampling, "latest", lambda: samples):
        asyncio.run(draw())


def _sample(rng: random.Random, gpus: int) -> HostSample:
    return HostSample(gpus=tuple(
        GpuSample(at, utilization_percent=rng.randrange(82, 100), memory_used_mib=rng.randrange(22_000, 31_000),
                  memory_mib=32_768, temperature_c=rng.randrange(55, 75), power_w=rng.uniform(180, 290))
        for at in range(gpus)
    ))  # fmt: skip


def picture_web(folder: Path, job: str) -> None:
    """The page of the cluster, and that of a job."""
    with subprocess.Popen(
        [sys.executable, "-m", "gpurun", "web"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as profile:
            for name, page in (("web.png", url), ("web-job.png", url.replace("/?", f"/job/{job}?"))):
                subprocess.run(
                    ["chromium-headless-shell", "--headless=new", "--no-sandbox", "--disable-3d-apis",
                     "--hide-scrollbars", f"--user-data-dir={profile}", "--window-size=1200,860",
                     f"--screenshot={folder / name}", page],
                    check=True, capture_output=True, timeout=120,
                )  # fmt: skip
        server.terminate()


def main() -> None:
    """Make all pictures."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TOP / "docs"
    with tempfile.TemporaryDirectory() as name:
        held = make_cluster(Path(name))
        home = Path(name) / "state"
        job = write_log(home)
        steps: list[Callable[[], None]] = [
            lambda: picture_status(folder), lambda: picture_top(folder, home), lambda: picture_web(folder, job)
        ]  # fmt: skip
        for step in steps:
            step()
        del held
    for picture in ("status.svg", "top.svg", "web.png", "web-job.png"):
        print(folder / picture)


if __name__ == "__main__":
    main()

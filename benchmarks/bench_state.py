"""Measure gpurun with ten thousand queued jobs: a pass, one submission, many submissions, and read-only commands.

    python benchmarks/bench_state.py [--jobs 10000] [--hosts 256] [--submits 1000] [--seed 1] [--keep DIR] [--json FILE]

The jobs come from sweeps of generated recipes: sizes, pools, priorities, constraints and limits differ from sweep to
sweep, commands and environments from job to job. Some jobs run, so that the cluster is full. Timings are CPU seconds of
the process (reading included, children not), medians of several runs; ``submit`` also says how long it took.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import resource
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock

import gpurun
from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.look import WaiterLocks, look

GENERATIONS = ("hopper", "volta", "pascal")
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128), (40, 15, 15, 15, 8, 4, 2, 1)
WORKDIR = str(Path(__file__).parents[1] / "recipes/fashion-mnist")
SWEEP = 25
RUNS = 7
TARGETS = {"pass": 0.3, "submit": 0.5, "submits": 5.0}
"""Goals in seconds, from the project's issues: CPU, CPU, and wall time."""


def inventory_text(hosts: int) -> str:
    """Racks of 32 hosts with 8 GPUs each, of three generations; two pools have a share."""
    racks = [
        f'  r{rack}: {{hosts: {{"gpu-r{rack}-[01-32]": {{generation: {GENERATIONS[rack % 3]}}}}}}}'
        for rack in range(-(-hosts // 32))
    ]
    total = 32 * 8 * len(racks)
    return "\n".join([
        "version: 1",
        "defaults: {user: train, generation: hopper, gpus: 8, fabric: tcp}",
        "fabrics: {tcp: {kind: tcp, interface: eth0}}",
        "racks:", *racks,
        f"pools: {{vision: {{reservation: {total // 4}, limit: {total // 2}}}, nlp: {{reservation: {total // 8}}}}}\n",
    ])  # fmt: skip


def specs(count: int, seed: int) -> Iterator[JobSpec]:
    """Sweeps of `SWEEP` jobs each."""
    rng = random.Random(seed)
    for number in range(count):
        if number % SWEEP == 0:
            gpus = rng.choices(SIZES, WEIGHTS)[0]
            elastic = gpus > 4 and rng.random() < 0.1
            sweep = {
                "name": f"sweep-{number // SWEEP}", "image": "registry.example/team/train:tf2.15", "gpus": gpus,
                "min_gpus": gpus // 2 if elastic else None,
                "constraints": Constraints(
                    generations=rng.choice([(), (), ("hopper",), ("volta", "hopper"), ("pascal",)]),
                    locality=rng.choice(["any", "any", "rack"]),
                ),
                "pool": rng.choice([None, "vision", "nlp"]), "priority": rng.choice([0, 0, 0, 5, -5]),
                "preemptible": rng.random() < 0.3, "time_limit_s": rng.choice([None, 3600.0, 36000.0]),
            }  # fmt: skip
        yield JobSpec(
            command=("python3", "train.py", "--lr", f"{rng.random():.6f}", "--seed", str(number)),
            workdir=WORKDIR, outputs="/checkpoints", env={"SEED": str(number)}, max_restarts=2, **sweep,
        )  # fmt: skip


class FakeDocker(socketserver.ThreadingUnixStreamServer):
    """A Docker engine that claims to have every image, and supports no other request."""

    daemon_threads = True

    class RequestHandlerClass(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = json.dumps({"Id": "sha256:" + "0" * 64}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), self.RequestHandlerClass)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class State:
    """A state directory with a full cluster and a long queue. Only the measured commands run on it.

    This process holds the locks of supervisors and of the waiter, so no command starts any.
    """

    def __init__(self, folder: Path, hosts: int) -> None:
        self.home, self.path = folder / "state", folder / "inventory.yaml"
        self.path.write_text(inventory_text(hosts))
        self.inventory = load_inventory(self.path)
        self.docker = FakeDocker(folder / "docker.sock")
        os.environ.update(
            GPURUN_HOME=str(self.home), GPURUN_INVENTORY=str(self.path), XDG_CACHE_HOME=str(folder / "cache"),
            DOCKER_HOST=f"unix://{folder / 'docker.sock'}",
        )  # fmt: skip
        self.locks: list[object] = [WaiterLocks(self.home).take()]

    def fill(self, jobs: int, seed: int) -> float:
        """Store the jobs. Returns wall seconds."""
        wanted = list(specs(jobs, seed))
        began = time.monotonic()
        JobStore(self.home).create_many(wanted, inventory=self.path, now_s=time.time())
        return time.monotonic() - began

    def run_pass(self) -> allocate.Pass:
        done = allocate.Allocator(self.home).run_pass(now_s=time.time())
        self.locks += [lock for _, lock in done.granted]
        return done

    def submit(self, count: int, seed: int) -> float:
        """Submit this many jobs in this process. Returns wall seconds."""
        wanted = list(specs(count, seed))
        began = time.monotonic()
        submit_jobs(wanted, self.inventory, self.home, os.environ)
        return time.monotonic() - began


def command(*words: str) -> float:
    """Return CPU seconds of a whole ``gpurun`` process, including imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "gpurun", *words], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 4):
        raise SystemExit(f"gpurun {' '.join(words)}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median_cpu(work: Callable[[], object], runs: int = RUNS) -> float:
    took = []
    for _ in range(runs):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return statistics.median(took)


def split(state: State) -> Mapping[str, float]:
    """Measure the parts of a pass: read, decide, commit."""
    scheduled: list[float] = []
    real = allocate.schedule

    def schedule(*arguments: object) -> object:
        began = time.process_time()
        try:
            return real(*arguments)  # type: ignore[arg-type]
        finally:
            scheduled.append(time.process_time() - began)

    with mock.patch.object(allocate, "schedule", schedule):
        whole = median_cpu(state.run_pass)
    decided = statistics.median(scheduled)
    read = median_cpu(lambda: look(state.home, now_s=time.time()))
    return {"pass": whole, "read": read, "schedule": decided, "commit": max(0.0, whole - read - decided)}


def measure(state: State, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield the name and figure of each measurement as soon as it is done."""
    yield "fill", state.fill(options.jobs, options.seed)
    begun = time.process_time()
    granted = len(state.run_pass().granted)
    yield "first pass", time.process_time() - begun
    yield "granted", float(granted)
    time.sleep(0.2)  # the index leaves out files that have just changed
    state.run_pass()
    yield from split(state).items()
    job = JobStore(state.home).live_ids()[options.jobs // 2]
    for name, words in {
        "version": ("--version",), "submit": ("submit", "-n", "8", "--image", "i", "--", "true"),
        "status": ("status",), "status --json": ("status", "--json"), "queue": ("queue",), "why": ("why", job),
        "wait": ("wait", job, "--timeout", "0"),
    }.items():  # fmt: skip
        yield name, statistics.median(command(*words) for _ in range(3))
    yield "submits", state.submit(options.submits, options.seed + 1)


def shown(figures: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    for name, value in figures:
        target = TARGETS.get(name)
        verdict = "" if target is None else f"  target {target:.1f} s{'' if value <= target else ': MISSED'}"
        print(f"{name:16} {value:9.3f}{verdict}", flush=True)
        yield name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=256)
    parser.add_argument("--submits", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it behind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)  # what pip does at installation
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        figures = dict(shown(measure(State(place, options.hosts), options)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return int(any(figures[name] > target for name, target in TARGETS.items()))


if __name__ == "__main__":
    sys.exit(main())

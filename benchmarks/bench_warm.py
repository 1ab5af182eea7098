"""Measure the start of a trial on a host that has its image, step by step: one lab host, one GPU.

The steps are: from the grant to the trial's first line, according to the job's events and log; to the end of its
ranks; to the next trial's grant. The first trial does not count, because it ships the image.

    python benchmarks/bench_warm.py [--trials 9] [--lab warm]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

GPURUN = [sys.executable, "-m", "gpurun"]
IMAGE = "gpurun/tiny:1"
PHASES = (
    ("granted → supervisor up", "granted", "placement"),
    ("→ host has all (connect, claim, image)", "placement", "STARTING"),
    ("→ container runs", "STARTING", "RUNNING"),
    ("→ first line", "RUNNING", "line"),
    ("grant → first line", "granted", "line"),
    ("ranks ended → fenced, over", "STOPPING", "over"),
    ("over → next grant", "over", "next"),
)  # fmt: skip


def run(*argv: str) -> str:
    return subprocess.run([*GPURUN, *argv], check=True, capture_output=True, text=True).stdout


def moments(folder: Path) -> dict[str, float]:
    """Return the time of each step of a job, in seconds since the epoch."""
    found = {"granted": json.loads((folder / "state.json").read_text())["granted_s"]}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        found.setdefault(event.get("state", event["kind"]), event["t"])
        found["over"] = event["t"]
    stamp = next(line for line in (folder / "log").read_text().splitlines() if "<stdout>" in line).split()[0]
    found["line"] = datetime.fromisoformat(f"{stamp[:26]}+00:00").timestamp()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--lab", default="warm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["GPURUN_HOME"] = home
        folder = run("lab", "up", "--name", arguments.lab, "--racks", "1", "--hosts", "1", "--gpus", "1").strip()
        try:
            flags = ["-n", "1", "--image", IMAGE, "--launcher", "tasks", "-i", f"{folder}/inventory.yaml"]
            grid = "n=" + ",".join(map(str, range(arguments.trials)))
            sweep = run("sweep", *flags, "--name", "warm", "--grid", grid, "--", "echo", "here").strip()
            while not json.loads(run("sweep", "status", sweep, "--json"))["done"]:
                time.sleep(2.0)
            seen = sorted((moments(path) for path in Path(home, "jobs").glob("j-*")), key=lambda one: one["granted"])
        finally:
            run("lab", "down", "--name", arguments.lab, "--purge")
    for one, after in pairwise(seen):
        one["next"] = after["granted"]
    for name, first, last in PHASES:
        spans = [one[last] - one[first] for one in seen[1:] if last in one]
        print(f"{name:42} median {statistics.median(spans):.2f} s, {min(spans):.2f} to {max(spans):.2f}")


if __name__ == "__main__":
    main()

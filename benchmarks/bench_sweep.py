"""Measure how busy a sweep keeps 16 lab GPUs with a grid of short trials, while its processes are killed.

After a third of the trials the conductor is killed, then a supervisor; after two thirds a host is powered
off and comes back. Measured between the first and the last start: the share of the time in which a trial held a GPU,
from its grant until the fence, and the share in which its ranks ran. All hosts share this machine's cores, so most of
a start is their work.

    python benchmarks/bench_sweep.py [--trials 200] [--seconds 2] [--quiet] [--lab sweep]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpurun.lab import Lab

GPURUN = [sys.executable, "-m", "gpurun"]
IMAGE = "gpurun/tiny:1"
GPUS = 16
WAIT_S = 3600.0


def run(*argv: str) -> str:
    return subprocess.run([*GPURUN, *argv], check=True, capture_output=True, text=True).stdout


def process_of(*words: str) -> int | None:
    """Return a process with these words in its command line."""
    wanted = "\0".join(words).encode() + b"\0"
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    return None


def kill(*words: str) -> str:
    found = process_of(*words)
    if found is not None:
        os.kill(found, signal.SIGKILL)
    return f"{words[0]} {'killed' if found else 'was not there'}"


def running_job(home: Path) -> tuple[str, str]:
    """Return a running job, and its host."""
    while True:
        for folder in (home / "jobs").glob("j-*"):
            record = json.loads((folder / "state.json").read_text())
            if record["state"] == "RUNNING":
                return record["id"], record["granted"][0]["host"]
        time.sleep(0.05)


def spans(home: Path) -> list[tuple[float, float, float, float]]:
    """Return for each attempt the times of its grant, its ranks' start and end, and its GPUs' release."""
    found = []
    for folder in (home / "jobs").glob("j-*"):
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        at: dict[str, float] = {}
        for event in (event for event in events if event["kind"] == "state"):
            if event["state"] in ("PREPARING", "QUEUED") and "PREPARING" in at:
                found.append(_span(at, event["t"]))
                at = {}
            at.setdefault(event["state"], event["t"])
        at["PREPARING"] = json.loads((folder / "state.json").read_text())["granted_s"]
        found.append(_span(at, events[-1]["t"]))
    return found


def _span(at: dict[str, float], end: float) -> tuple[float, float, float, float]:
    begin = at["PREPARING"]
    return begin, at.get("RUNNING", end), at.get("STOPPING", end), end


def busy(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the share of all GPUs' time that these intervals of one GPU each use."""
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in intervals) / (GPUS * (end - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quiet", action="store_true", help="nobody is killed")
    parser.add_argument("--lab", default="sweep")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["GPURUN_HOME"] = folder
        inventory = run("lab", "up", "--name", arguments.lab, "--racks", "2", "--hosts", "2", "--gpus", "4").strip()
        try:
            measure(arguments, home, f"{inventory}/inventory.yaml")
        finally:
            run("lab", "down", "--name", arguments.lab, "--purge")


def measure(arguments: argparse.Namespace, home: Path, inventory: str) -> None:
    grid = "n=" + ",".join(map(str, range(arguments.trials)))
    flags = ["-n", "1", "--image", IMAGE, "--launcher", "tasks", "-i", inventory, "--name", "bench", "--grid", grid]
    began = time.monotonic()
    sweep = run("sweep", *flags, "--", "sh", "-c", f"sleep {arguments.seconds}").strip()
    deeds = [] if arguments.quiet else [1 / 3, 2 / 3]
    while True:
        assert time.monotonic() - began < WAIT_S
        found = json.loads(run("sweep", "status", sweep, "--json"))
        done = found["counts"]["complete"]
        if deeds and done >= deeds[0] * arguments.trials:
            if len(deeds) == 2:
                print(kill("gpurun.studies.sweep_plan", sweep))
                print(kill("gpurun.supervisor", running_job(home)[0]))
            else:
                lab, host = Lab(arguments.lab), running_job(home)[1]
                lab.crash(host)
                print(f"{host} powered off")
                time.sleep(20)
                lab.boot(host)
            deeds = deeds[1:]
        if found["done"]:
            break
        time.sleep(2.0)
    ran = Counter(json.dumps(trial["parameters"]) for trial in found["trials"])
    jobs = len(list((home / "jobs").glob("j-*")))
    print(f"{done} of {arguments.trials} complete, {found['counts']['failed']} failed; {jobs} jobs", end="; ")
    print(f"points that ran twice: {sum(count > 1 for count in ran.values())}")
    held = spans(home)
    begin, end = min(span[0] for span in held), max(span[0] for span in held)
    own = busy([(span[0], span[3]) for span in held], begin, end)
    ran_s = busy([(span[1], span[2]) for span in held], begin, end)
    print(
        f"first to last start {end - begin:.0f} s: a GPU was a trial's own for {own:.2f} of it, ranks ran {ran_s:.2f}"
    )


if __name__ == "__main__":
    main()

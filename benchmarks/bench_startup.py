"""Measure gpurun's overhead over a bare launcher: `gpurun submit --follow` of a job that does nothing, on 4 lab hosts.

Bare means: containers, sshd and image are ready. `horovodrun … true` or `mpirun … true` is started inside the first
container; `torchrun … true` inside all of them at once, as a person would by hand. Both run in turn in the same
lab, so that other load affects both. The difference of the medians is gpurun's overhead.

    python benchmarks/bench_startup.py [--launcher horovod|mpirun|torchrun] [--rounds 5] [--lab bench]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpurun

GPURUN = [sys.executable, "-m", "gpurun"]
IMAGES = {"horovod": "gpurun/train:tf2.15", "mpirun": "gpurun/train:tf2.15", "torchrun": "gpurun/train:torch"}
TORCHRUN = (
    "torchrun --nnodes=4 --nproc-per-node=1 --rdzv-backend=static --master-port=29500 --max-restarts=0 --no-python"
)


def run(argv: list[str], **options) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def seconds(argv: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def wait_for_launch(job: str) -> dict:
    while True:
        (found,) = json.loads(run([*GPURUN, "status", job, "--json"]))["jobs"]
        if found["state"] == "RUNNING":
            return found
        assert found["state"] in ("QUEUED", "GRANTED", "PREPARING", "STARTING"), found
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=sorted(IMAGES), default="horovod")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lab", default="bench")
    arguments = parser.parse_args()
    compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)  # what pip does at installation
    run([*GPURUN, "lab", "up", "--name", arguments.lab, "--gpus", "1"])
    inventory = json.loads(run([*GPURUN, "lab", "status", "--name", arguments.lab, "--json"]))["inventory"]
    with tempfile.TemporaryDirectory() as home:
        os.environ["GPURUN_HOME"] = home
        submit = [*GPURUN, "submit", "-n", "4", "--image", IMAGES[arguments.launcher], "-i", inventory]
        try:
            measure([*submit, "--launcher", arguments.launcher], arguments)
        finally:
            run([*GPURUN, "lab", "down", "--name", arguments.lab])


def bare_commands(job: str, hosts: list[str]) -> dict[str, list[str]]:
    """Return, by host, the command that starts the ranks in its container without gpurun."""
    plan = json.loads((Path(os.environ["GPURUN_HOME"]) / "jobs" / job / "plan.json").read_text())
    if plan["has_launcher"]:
        launch = [word for word in plan["launch"] if word not in ("sleep", "600")]
        return {hosts[0]: ["/gpurun/bin/launch", *launch, "true"]}
    address = plan["hosts"][0]["ranks"][0]["MASTER_ADDR"]
    return {
        host: [*TORCHRUN.split(), f"--master-addr={address}", f"--node-rank={node}", "true"]
        for node, host in enumerate(hosts)
    }


def bare_seconds(lab: str, job: str, hosts: list[str]) -> float:
    began = time.monotonic()
    started = [
        subprocess.Popen(
            [*GPURUN, "lab", "run", "--name", lab, host, "--", "docker", "exec", f"gpurun-{job}-1", *inside],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for host, inside in bare_commands(job, hosts).items()
    ]  # fmt: skip
    assert [each.wait() for each in started] == [0] * len(started)
    return time.monotonic() - began


def measure(submit: list[str], arguments: argparse.Namespace) -> None:
    seconds([*submit, "--follow", "--", "true"])  # ships the image
    whole, bare = [], []
    for _ in range(arguments.rounds):
        whole.append(seconds([*submit, "--follow", "--", "true"]))
        job = run([*submit, "--", "sleep", "600"], stderr=subprocess.DEVNULL).strip()
        hosts = wait_for_launch(job)["hosts"]
        time.sleep(12)  # until its own ranks sleep too, because the launcher's start-up is a load
        bare.append(bare_seconds(arguments.lab, job, hosts))
        subprocess.run([*GPURUN, "cancel", job], check=True, stderr=subprocess.DEVNULL)
        print(f"  gpurun {whole[-1]:6.2f} s   bare {arguments.launcher} {bare[-1]:6.2f} s", flush=True)
    added = statistics.median(w - b for w, b in zip(whole, bare, strict=True))
    print(f"gpurun submit --follow, 4 hosts, image in place: median {statistics.median(whole):.2f} s")
    print(f"bare {arguments.launcher} in the same containers: median {statistics.median(bare):.2f} s")
    print(f"added by gpurun, median of the pairs:            {added:.2f} s (at most 3 s is the goal, 1.5 s the aim)")


if __name__ == "__main__":
    main()

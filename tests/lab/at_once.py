"""Several jobs of one test at the same time: start all, then wait for all. The lab has 4 hosts with 2 GPUs each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from cluster import LOOK_S, TINY, TRAIN, Cluster
from faulting import events
from waiting import until

LAUNCHERS = {
    "tasks": ("--launcher", "tasks"), "gloo": ("--launcher", "horovod"), "mpi": ("--controller", "mpi"),
    "elastic": ("--launcher", "horovod", "--min-gpus", "1"), "mpirun": ("--launcher", "mpirun"),
    "torchrun": ("--launcher", "torchrun"),
}  # fmt: skip
ORDER = ("QUEUED", "GRANTED", "PREPARING", "STARTING", "RUNNING", "STOPPING")


def start(
    cluster: Cluster, launcher: str, *command: str, flags: tuple[str, ...] = (), gpus: int = 2, per_host: int = 1,
    image: str = "", **recipe: object,
) -> str:  # fmt: skip
    """Submit a command. Returns the job's id.

    Args:
        launcher: a key of `LAUNCHERS`.
        image: the launcher's test image, if none is named.
        recipe: other keys of the recipe; `grace` is 3 s if it is not among them.
    """
    folder = cluster.folder / f"recipe-{len(list(cluster.folder.glob('recipe-*')))}"
    folder.mkdir()
    image = image or (TINY if launcher in ("tasks", "torchrun") else TRAIN)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"image": image, "gpus": gpus, "grace": "3s", **recipe}))
    each = ("--gpus-per-host", str(per_host))
    args = (str(folder), "-i", str(cluster.inventory), *each, *LAUNCHERS[launcher], *flags, "--", *command)
    done = cluster.gpurun("submit", *args)
    assert done.code == 0, done.err
    return done.out.strip()


def reach(cluster: Cluster, job: str, state: str) -> None:
    """Wait until the job has come as far as this state, or further. A short state may pass between two looks."""
    until(
        lambda: cluster.record(job)["state"] not in ORDER[: ORDER.index(state)],
        lambda: f"not {state}: {cluster.record(job)}",
    )


def finish(cluster: Cluster, job: str, state: str, code: int | None = None) -> dict:
    """Wait until the job has ended. It must have ended in this state, with this exit code. Returns its record."""
    until(lambda: cluster.record(job)["ended_s"] is not None, lambda: cluster.record(job), every_s=LOOK_S)
    found = cluster.record(job)
    assert found["state"] == state, (found["reason"], cluster.log(job)[-3000:])
    ended_with = found["first_failure"]["exit_code"] if found["first_failure"] else 0
    assert code is None or ended_with == code, (found["reason"], cluster.log(job)[-3000:])
    return found


def hosts_of(record: dict) -> list[str]:
    return [grant["host"] for grant in record["granted"]]


def at(cluster: Cluster, job: str, state: str) -> float:
    """When the job entered the state, seconds since the epoch. The event follows the record's change."""
    return until(lambda: next((e["t"] for e in events(cluster, job) if e.get("state") == state), None), every_s=LOOK_S)


def printed(cluster: Cluster, job: str, rank: int, stream: str = "stdout") -> list[bytes]:
    """What a rank printed, line by line."""
    mark = b"[%d]<%s>:" % (rank, stream.encode())
    lines = (cluster.home / "jobs" / job / "log").read_bytes().split(b"\n")
    return [line.partition(mark)[2] for line in lines if mark in line]


def tell(cluster: Cluster, job: str, host: str, word: str) -> None:
    """Make the file /run/gpurun/WORD, for which ranks on the host wait."""
    cluster.lab.run(host, ["touch", f"/home/train/.gpurun/jobs/{job}/run/{word}"])


def record(**what: object) -> None:
    """Keep a figure in the file of `GPURUN_STORIES`, if that is set."""
    if path := os.environ.get("GPURUN_STORIES"):
        kept = {key: round(value, 2) if isinstance(value, float) else value for key, value in what.items()}
        with Path(path).open("a") as stream:
            stream.write(json.dumps(kept) + "\n")

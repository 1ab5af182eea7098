"""Faults of hosts, network and head while a gang trains; what happened, in seconds and steps.

`ring` trains, started by the launcher `tasks`: its ranks depend on each other, and start in a tenth of a second.
`GPURUN_LAUNCHER=mpirun pytest tests/lab/test_faults.py` has another launcher start ranks of a shell program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from cluster import LOOK_S, TINY, TRAIN, Cluster
from waiting import until

from gpurun.leases.store import LeaseStore
from gpurun.node.agent.processes import Process, is_same, list_processes

LAUNCHER = os.environ.get("GPURUN_LAUNCHER", "tasks")
IMAGE = TINY if LAUNCHER == "tasks" else TRAIN
RANK = "${GPURUN_RANK:-${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}}"
ENDLESS = 100_000
STEP_S = 0.25
SHELL = f"""
i=$(cat "$GPURUN_OUTPUTS/step" 2>/dev/null || echo 0)
while [ "$i" -lt "$0" ]; do
  i=$((i+1)); echo "step $i with"
  test "{RANK}" != 0 || echo "$i" >"$GPURUN_OUTPUTS/step"
  sleep {STEP_S}
done
"""


@dataclass
class Story:
    """The events of a job after a fault; times in seconds after it.

    Attributes:
        noticed_s: until the job left RUNNING; None if it never did.
        again_s: until it was RUNNING again.
        resumed_from: the step the restarted gang began after; None if no step is in the log twice.
    """

    fault: str
    state: str
    restarts: int
    noticed_s: float | None = None
    again_s: float | None = None
    resumed_from: int | None = None

    def row(self) -> dict:
        return {key: value for key, value in asdict(self).items() if value is not None}


def record(story: Story) -> Story:
    """Append the story to the file $GPURUN_STORIES, if that is set."""
    if path := os.environ.get("GPURUN_STORIES"):
        with Path(path).open("a") as stream:
            stream.write(json.dumps(story.row()) + "\n")
    return story


def train(cluster: Cluster, folder: Path, *flags: str, gpus: int = 2, steps: int = ENDLESS) -> str:
    """Start a gang that trains, one rank on each host, and wait until it does; its id."""
    folder.mkdir(exist_ok=True)
    command = ["ring", "--steps", str(steps), "--step-s", str(STEP_S)]
    if LAUNCHER != "tasks":
        command = ["sh", "-c", SHELL, str(steps)]
    (folder / "recipe.yaml").write_text(
        f"launcher: {LAUNCHER}\nimage: {IMAGE}\ngpus: {gpus}\noutputs: /out\noutputs_every: 1s\nmax_restarts: 3\n"
        f"grace: 3s\nconstraints: {{gpus_per_host: 1}}\ncommand: {json.dumps(command)}\n"
    )
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory), *flags)
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, "step 3 with")
    return job


def events(cluster: Cluster, job: str) -> list[dict]:
    text = (cluster.home / "jobs" / job / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def hosts_of(cluster: Cluster, job: str) -> list[str]:
    """Return the hosts of the job's last placement, in the order of its ranks."""
    placed = [event["hosts"] for event in events(cluster, job) if event["kind"] == "placement"]
    return [each["host"] for each in placed[-1]]


def steps_of(cluster: Cluster, job: str, rank: int = 0) -> list[int]:
    """Return the steps that a rank has printed, in order."""
    return [int(n) for n in re.findall(rf"\[{rank}\]<stdout>:step (\d+) with", cluster.log(job))]


def wait_for_steps(cluster: Cluster, job: str, more: int = 3) -> None:
    """Wait until rank 0 has made so many further steps."""
    wanted = len(steps_of(cluster, job)) + more
    cluster.wait_until(job, lambda: len(steps_of(cluster, job)) >= wanted, "it makes no step")


def tell(cluster: Cluster, job: str, fault: str, since_s: float) -> Story:
    """Wait until the job has ended, or trains again after a restart; read its story from its own events and log."""

    def times() -> tuple[float | None, float | None]:
        states = [(e["t"], e["state"]) for e in events(cluster, job) if e["kind"] == "state" and e["t"] >= since_s]
        stopped = next((t for t, state in states if state == "STOPPING"), None)
        return stopped, next((t for t, state in states if state == "RUNNING" and stopped and t > stopped), None)

    def is_over() -> bool:
        return cluster.record(job)["ended_s"] is not None or times()[1] is not None

    until(is_over, lambda: f"{cluster.record(job)}\n{events(cluster, job)}", every_s=LOOK_S)
    found = cluster.record(job)
    if found["ended_s"] is None:
        wait_for_steps(cluster, job)
    stopped, again = times()
    breaks = [after - 1 for before, after in pairwise(steps_of(cluster, job)) if after != before + 1]
    ended = found["state"] != "SUCCEEDED" or again is not None
    return record(Story(
        fault, found["state"], found["restarts"],
        noticed_s=round(stopped - since_s, 1) if stopped and ended else None,
        again_s=round(again - since_s, 1) if again else None,
        resumed_from=breaks[0] if breaks else None,
    ))  # fmt: skip


def assert_no_step_lost(cluster: Cluster, job: str, *, ranks: int = 2) -> None:
    """Check that every rank has printed every step once, in order, and in one attempt."""
    for rank in range(ranks):
        printed = steps_of(cluster, job, rank)
        assert printed == list(range(1, len(printed) + 1)), printed
    found = cluster.record(job)
    assert (found["restarts"], found["attempt"]) == (0, 1), found


def stopping_reason(cluster: Cluster, job: str) -> str:
    """Return why the job's first attempt was stopped."""
    return next(event["reason"] for event in events(cluster, job) if event.get("state") == "STOPPING")


def adopt(cluster: Cluster, job: str) -> None:
    """Run a command, which starts a new supervisor, and wait for it."""
    assert cluster.gpurun("status", job).code == 0
    wait_until(lambda: is_adopted(cluster, job))


def supervisor_of(job: str) -> Process:
    """Return the job's supervisor. Skips a just forked child, which still has the supervisor's command line."""
    found = {process.pid: process for process in list_processes() if f"gpurun.supervisor {job} " in process.command}
    (process,) = [process for process in found.values() if process.parent not in found]
    return process


def kill_supervisor(cluster: Cluster, job: str) -> None:
    """Kill only the job's supervisor, with SIGKILL."""
    process = supervisor_of(job)
    os.kill(process.pid, signal.SIGKILL)
    while is_same(process):
        time.sleep(0.01)


_KILLS = """
import glob, os, signal, sys
for path in glob.glob('/proc/[0-9]*/environ'):
    environ = open(path, 'rb').read().split(b'\\0')
    is_program = any(each.startswith(b'GPURUN_RANK_ID') for each in environ)
    if is_program and b'GPURUN_RANK=' + sys.argv[1].encode() in environ:
        os.kill(int(path.split('/')[2]), signal.SIGKILL)
"""


def kill_rank(cluster: Cluster, job: str, rank: int) -> None:
    """SIGKILL to the program of one rank, from within its container. The image has Python."""
    inside = cluster.gpurun("exec", job, "--rank", str(rank), "--", "python3", "-c", _KILLS, str(rank))
    assert inside.code == 0, inside.err


def is_adopted(cluster: Cluster, job: str) -> bool:
    """Whether a supervisor holds the job's lease."""
    return LeaseStore(cluster.home).is_alive(job)


def wait_until(condition: Callable[[], object]) -> None:
    until(condition, every_s=LOOK_S)

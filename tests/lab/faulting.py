"""Faults of hosts, network and head while a gang trains; what happened, in seconds and steps.

Under real horovodrun; `GPURUN_LAUNCHER=mpirun pytest tests/lab/test_faults.py` has another launcher start the ranks.
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

from cluster import LOOK_S, TRAIN, Cluster
from waiting import until

from gpurun.leases.store import LeaseStore
from gpurun.node.agent.processes import Process, is_same, list_processes

LAUNCHER = os.environ.get("GPURUN_LAUNCHER", "horovod")
RANK = "${GPURUN_RANK:-${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}}"
STEPS = 40
STEP_S = 0.5
TRAINING = f"""
i=$(cat "$GPURUN_OUTPUTS/step" 2>/dev/null || echo 0)
while [ "$i" -lt "$0" ]; do
  i=$((i+1)); echo "step $i"
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


def train(cluster: Cluster, folder, *flags: str, gpus: int = 2, steps: int = STEPS) -> str:
    """Start a gang that trains, one rank on each host, and wait until it does; its id."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(
        f"launcher: {LAUNCHER}\nimage: {TRAIN}\ngpus: {gpus}\noutputs: /out\noutputs_every: 2s\nmax_restarts: 3\n"
        f"grace: 3s\nconstraints: {{gpus_per_host: 1}}\ncommand: {json.dumps(['sh', '-c', TRAINING, str(steps)])}\n"
    )
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory), *flags)
    job = done.out.strip()
    assert done.code == 0, done.err
    cluster.wait_for_log(job, "step 4")
    return job


def events(cluster: Cluster, job: str) -> list[dict]:
    text = (cluster.home / "jobs" / job / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def tell(cluster: Cluster, job: str, fault: str, since_s: float, timeout_s: float = 240) -> Story:
    """Wait for the job's end and read its story from its own events and log."""
    cluster.gpurun("wait", job, "--timeout", str(timeout_s), timeout_s=timeout_s + 30)
    found = cluster.job(job)
    states = [(e["t"], e["state"]) for e in events(cluster, job) if e["kind"] == "state" and e["t"] >= since_s]
    stopped = next((t for t, state in states if state == "STOPPING"), None)
    again = next((t for t, state in states if state == "RUNNING" and stopped and t > stopped), None)
    steps = [int(n) for n in re.findall(r"\[0\]<stdout>:step (\d+)", cluster.log(job))]
    breaks = [after - 1 for before, after in pairwise(steps) if after != before + 1]
    ended = found["state"] != "SUCCEEDED" or again is not None
    return Story(
        fault, found["state"], found["restarts"],
        noticed_s=round(stopped - since_s, 1) if stopped and ended else None,
        again_s=round(again - since_s, 1) if again else None,
        resumed_from=breaks[0] if breaks else None,
    )  # fmt: skip


def assert_no_step_lost(cluster: Cluster, job: str, steps: int = STEPS) -> None:
    """Every rank printed every step once, in order."""
    for rank in (0, 1):
        printed = [int(n) for n in re.findall(rf"\[{rank}\]<stdout>:step (\d+)", cluster.log(job))]
        assert printed == list(range(1, steps + 1)), printed


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

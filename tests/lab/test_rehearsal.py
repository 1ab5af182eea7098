"""One rank rehearses on one GPU before the gang gets its GPUs, on real hosts."""

from __future__ import annotations

import pytest
from cluster import TINY
from faulting import events, kill_supervisor

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("launchers")]

SAY = "echo rank $GPURUN_RANK of $GPURUN_SIZE; touch $GPURUN_OUTPUTS/by-$GPURUN_SIZE-$GPURUN_RANK; "


def submit(cluster, script, *flags, limit="2s"):
    args = cluster.submit_args(
        "--launcher", "tasks", "--rehearse", limit, "--outputs", "/out", *flags, gpus=4, image=TINY
    )
    return cluster.gpurun(*args, "--follow", "--", "sh", "-c", SAY + script)


def grants(cluster, job):
    """The GPUs of each attempt, as its events tell."""
    placed = [event for event in events(cluster, job) if event["kind"] == "placement"]
    return [sum(len(host["gpus"]) for host in event["hosts"]) for event in placed]


def test_a_program_that_fails_at_once_costs_one_gpu(cluster):
    done = submit(cluster, "echo no such option >&2; exit 3", limit="60s")
    (record,) = cluster.status()["jobs"]
    assert (done.code, record["state"], record["exit_code"]) == (1, "FAILED", 3)
    assert record["reason"].startswith("in the rehearsal on one GPU: rank 0 ")
    assert record["first_failure"]["excerpt"][-1] == "no such option"
    assert grants(cluster, record["id"]) == [1]


def test_after_the_rehearsal_the_gang_starts_and_finds_nothing_of_it(cluster):
    done = submit(cluster, "ls $GPURUN_OUTPUTS; test $GPURUN_SIZE = 4 || sleep 600", "--gpus-per-host", "2")
    (record,) = cluster.status()["jobs"]
    assert (done.code, record["state"], record["restarts"]) == (0, "SUCCEEDED", 0), done.err
    assert grants(cluster, record["id"]) == [1, 4]
    log = cluster.log(record["id"])
    assert "rank 0 of 1" in log and all(f"rank {rank} of 4" in log for rank in range(4))
    outputs = cluster.home / "jobs" / record["id"] / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == [f"by-4-{rank}" for rank in range(4)]
    assert log.count("by-1-0") == 1, "the gang does not see what the rehearsal wrote"
    assert "rehearsed: one rank ran for 2 s; waits for 4 GPUs" in done.err + done.out


def test_the_first_step_ends_the_rehearsal_also_under_another_supervisor(cluster):
    script = 'sleep 9; python3 -c "import gpurun_runtime as g; g.progress(1, of=9)"; test $GPURUN_SIZE = 4 || sleep 600'
    args = cluster.submit_args("--launcher", "tasks", "--rehearse", "10m", gpus=4)
    done = cluster.gpurun(*args, "--", "sh", "-c", script)
    assert done.code == 0, done.err
    job = done.out.strip()
    cluster.wait_for(job, "RUNNING")
    assert "rehearses on one GPU" in cluster.gpurun("status", "-i", str(cluster.inventory)).out
    kill_supervisor(cluster, job)
    assert cluster.gpurun("wait", job).code == 0
    assert grants(cluster, job) == [1, 4]
    said = [event.get("reason", "") for event in events(cluster, job) if event["kind"] == "state"]
    assert "rehearsed: one rank came to step 1; waits for 4 GPUs" in said

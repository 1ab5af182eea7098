"""One rank rehearses on one GPU before the gang gets its GPUs, on real hosts."""

from __future__ import annotations

import pytest
from at_once import finish, hosts_of, start, tell
from faulting import events, kill_supervisor

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("rehearsal")]

SAY = "echo rank $GPURUN_RANK of $GPURUN_SIZE; touch $GPURUN_OUTPUTS/by-$GPURUN_SIZE-$GPURUN_RANK; "


def submit(cluster, script, limit, **more):
    return start(
        cluster, "tasks", "sh", "-c", SAY + script, gpus=4, outputs="/out", flags=("--rehearse", limit), **more
    )


def grants(cluster, job):
    """The GPUs of each attempt, as its events tell."""
    placed = [event for event in events(cluster, job) if event["kind"] == "placement"]
    return [sum(len(host["gpus"]) for host in event["hosts"]) for event in placed]


def test_a_program_that_fails_at_once_costs_one_gpu_and_one_that_runs_gets_a_gang_without_its_outputs(cluster):
    fails = submit(cluster, "echo no such option >&2; exit 3", "600s")
    runs = submit(cluster, "ls $GPURUN_OUTPUTS; test $GPURUN_SIZE = 4 || sleep 600", "2s", per_host=2)
    found = finish(cluster, fails, "FAILED", 3)
    assert found["reason"].startswith("in the rehearsal on one GPU: rank 0 ")
    assert found["first_failure"]["excerpt"][-1] == "no such option"
    assert grants(cluster, fails) == [1]
    assert finish(cluster, runs, "SUCCEEDED", 0)["restarts"] == 0
    assert grants(cluster, runs) == [1, 4]
    log = cluster.log(runs)
    assert "rank 0 of 1" in log and all(f"rank {rank} of 4" in log for rank in range(4))
    outputs = cluster.home / "jobs" / runs / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == [f"by-4-{rank}" for rank in range(4)]
    assert log.count("by-1-0") == 1, "the gang does not see what the rehearsal wrote"
    said = [event.get("reason", "") for event in events(cluster, runs) if event["kind"] == "state"]
    assert "the rehearsal passed: one rank ran for 2s; the job waits for 4 GPUs" in said


def test_the_first_step_ends_the_rehearsal_also_under_another_supervisor(cluster):
    script = (
        "test $GPURUN_SIZE = 4 && exit; until [ -e /run/gpurun/go ]; do sleep 0.1; done\n"
        'python3 -c "import gpurun_runtime as g; g.progress(1, of=9)"; sleep 600'
    )
    job = submit(cluster, script, "10m")
    cluster.wait_for_log(job, "rank 0 of 1")
    kill_supervisor(cluster, job)
    assert "rehearses on one GPU" in cluster.gpurun("status", "-i", str(cluster.inventory)).out  # and adopts it
    tell(cluster, job, hosts_of(cluster.record(job))[0], "go")
    finish(cluster, job, "SUCCEEDED", 0)
    assert grants(cluster, job) == [1, 4]
    said = [event.get("reason", "") for event in events(cluster, job) if event["kind"] == "state"]
    assert "the rehearsal passed: one rank reached step 1; the job waits for 4 GPUs" in said

"""``gpurun requeue``: a running gang goes back to the queue, gets GPUs again, and continues from its checkpoint."""

from __future__ import annotations

import json

import pytest
from at_once import finish, printed, reach, start
from faulting import events

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("requeue")]

SAVES = """
save() { echo 7 >$GPURUN_OUTPUTS/step-$GPURUN_RANK; exit; }
trap save TERM
step=$(cat $GPURUN_OUTPUTS/step-$GPURUN_RANK 2>/dev/null || echo 0)
echo begins at $step
while test $step != 7; do sleep 0.1; done
"""


def test_a_gang_goes_back_to_the_queue_and_succeeds_from_its_checkpoint(cluster):
    job = start(cluster, "tasks", "sh", "-c", SAVES, outputs="/out", grace="30s")
    reach(cluster, job, "RUNNING")
    for rank in (0, 1):
        cluster.wait_for_log(job, f"[{rank}]<stdout>:begins at 0")
    done = cluster.gpurun("requeue", job, "--json")
    assert done.code == 0 and "back in the queue, now " in done.err, done.err
    assert json.loads(done.out)["jobs"][0]["id"] == job
    found = finish(cluster, job, "SUCCEEDED", 0)
    assert (found["attempt"], found["restarts"]) == (2, 0), found
    assert [printed(cluster, job, rank) for rank in (0, 1)] == [[b"begins at 0", b"begins at 7"]] * 2
    kinds = [event["kind"] for event in events(cluster, job)]
    assert kinds.count("placement") == 2
    again = cluster.gpurun("requeue", job)
    assert again.code == 2 and f"gpurun rerun {job}" in again.err, again.err

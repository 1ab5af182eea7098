"""An elastic gang under real horovodrun: it continues without dead hosts, and takes them in when they return."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from cluster import ONE_THREAD, TRAIN
from faulting import events, is_adopted, kill_supervisor, wait_until

from gpurun.leases.store import LeaseStore

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("elastic")]

RECIPE = Path(__file__).parents[2] / "recipes/elastic"


@pytest.fixture
def cluster(mended):
    return mended


def train(cluster, *flags, gpus=4, least=2, steps=100_000, recipe=RECIPE):
    """Start the recipe with one rank on each host and wait until it trains; the job's id."""
    command = ["python3", "train.py", "--steps", str(steps)]
    done = cluster.gpurun(
        "submit", str(recipe), "-i", str(cluster.inventory), "-n", str(gpus), "--gpus-per-host", "1",
        "--min-gpus", str(least), *ONE_THREAD, *flags, "--", *command,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def trained(cluster, job):
    """(step, ranks) of every step that was printed, in order."""
    return [(int(step), int(ranks)) for step, ranks in re.findall(r"step (\d+) with (\d+) ranks", cluster.log(job))]


def wait_for_ranks(cluster, job, ranks, *, least=None):
    """Wait until three steps in a row are made with so many ranks, or from `least` on; how many seconds it took."""
    began = time.monotonic()
    before = len(trained(cluster, job))
    wanted = [[n] * 3 for n in range(ranks if least is None else least, ranks + 1)]
    wait_until(lambda: [n for _, n in trained(cluster, job)[before:]][-3:] in wanted)
    return time.monotonic() - began


def assert_no_step_lost(steps):
    """Each step comes after the one before; one that was not committed may come twice."""
    assert steps[0] == 1
    assert all(after - before in (0, 1) for before, after in pairwise(steps))


def leases(cluster):
    return {lease.name: lease for lease in LeaseStore(cluster.home).read_all().leases}


def test_hosts_leave_and_come_back_and_no_step_is_lost(cluster):
    job = train(cluster)
    wait_for_ranks(cluster, job, 4)
    _, killed, crashed, _ = cluster.job(job)["hosts"]

    cluster.lab.run(killed, ["docker", "kill", f"gpurun-{job}-1"])
    # Horovod itself aborted a survivor once ("terminate called … gloo::IoException"): two train on then, and then four.
    assert wait_for_ranks(cluster, job, 3, least=2) <= 10
    assert wait_for_ranks(cluster, job, 4) <= 60

    cluster.lab.crash(crashed)
    assert wait_for_ranks(cluster, job, 3) <= 90  # 14 s as a rule; 61 s were seen once, on a busy machine
    wait_until(lambda: {row["host"]: row["state"] for row in cluster.status()["hosts"]}[crashed] == "lost")
    assert crashed not in cluster.job(job)["hosts"]
    assert crashed in [grant.host for grant in leases(cluster)[job].grants], "its GPU is free without a proof"

    kill_supervisor(cluster, job)
    cluster.lab.boot(crashed)
    cluster.gpurun("status")
    wait_until(lambda: is_adopted(cluster, job))
    assert wait_for_ranks(cluster, job, 4) <= 90
    assert sorted(cluster.job(job)["hosts"]) == sorted(host.name for host in cluster.lab.hosts)
    assert leases(cluster)[job].apart == ()

    found = cluster.job(job)
    assert (found["state"], found["restarts"], found["attempt"]) == ("RUNNING", 0, 1)
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


# Of a measurement: GPURUN_KILL_AFTER="0 1 2 …".
@pytest.mark.thorough
@pytest.mark.parametrize("after_s", [int(text) for text in os.environ.get("GPURUN_KILL_AFTER", "1 14").split()])
def test_a_supervisor_that_dies_beside_a_host_delays_nobody_for_long(cluster, after_s):
    """It dies before it notices the host's silence, and about when it would notify the other hosts."""
    job = train(cluster)
    wait_for_ranks(cluster, job, 4)
    cluster.lab.crash(cluster.job(job)["hosts"][2])
    time.sleep(after_s)
    kill_supervisor(cluster, job)
    killed_s = time.monotonic()
    cluster.gpurun("status")
    took_s = wait_for_ranks(cluster, job, 3)
    since_kill_s = time.monotonic() - killed_s
    if path := os.environ.get("GPURUN_STORIES"):
        with Path(path).open("a") as stream:
            row = {"supervisor_killed_after_s": after_s, "trains_after_s": round(took_s, 1)}
            stream.write(json.dumps({**row, "since_kill_s": round(since_kill_s, 1)}) + "\n")
    # 14 to 17 s at load 12: a supervisor begins in 1 to 7 s, is sure after 10 s, and the ranks go on 2 s later. The
    # promise is 20 s. The other 5 s are for a machine that is busier: commands and training stand in line there.
    assert took_s <= 25
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


@contextmanager
def hampered(cluster, host, how):
    """A live host that for some seconds is unreachable or refuses logins."""
    if how == "unplugged":
        cluster.lab.cut(host)
    else:
        assert cluster.lab.run(host, ["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"']).code == 0
    try:
        yield
    finally:
        if how == "unplugged":
            cluster.lab.heal(host)
        else:
            cluster.lab.run(host, ["sh", "-c", 'kill -CONT "$(cat /run/sshd.pid)"'])


@pytest.mark.parametrize(("how", "for_s"), [("unplugged", 5), ("slow", 10)])
def test_a_host_that_is_hampered_while_a_supervisor_is_followed_stays_in_the_gang(cluster, how, for_s):
    """The host does not answer for 5 s, or its agent needs 10 s to start."""
    job = train(cluster)
    wait_for_ranks(cluster, job, 4)
    host = cluster.job(job)["hosts"][2]
    with hampered(cluster, host, how):
        kill_supervisor(cluster, job)
        cluster.gpurun("status")
        time.sleep(for_s)
        assert is_adopted(cluster, job)
    wait_for_ranks(cluster, job, 4)
    time.sleep(10)
    told = [event["state"] for event in events(cluster, job) if event["kind"] == "host" and event["host"] == host]
    assert "left the gang" not in told
    found = cluster.job(job)
    assert (found["state"], found["restarts"], len(found["hosts"])) == ("RUNNING", 0, 4)
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


def test_a_drained_host_is_released_while_training_goes_on_and_used_again_afterwards(cluster, record_property):
    job = train(cluster)
    wait_for_ranks(cluster, job, 4)
    drained = cluster.job(job)["hosts"][2]
    words = (drained, "-i", str(cluster.inventory))
    cluster.lab.run(drained, ["sh", "-c", f"echo mine >~/.gpurun/outputs/{job}/profile"], user="train")
    began = time.monotonic()
    done = cluster.gpurun("inventory", "drain", *words, "--wait")
    record_property("empty_s", round(time.monotonic() - began, 1))
    assert done.code == 0 and f"{job} releases {drained} and continues" in done.err
    assert wait_for_ranks(cluster, job, 3) <= 15
    found = cluster.job(job)
    assert (found["state"], found["attempt"], found["restarts"]) == ("RUNNING", 1, 0)
    assert drained not in found["hosts"]
    assert (cluster.home / "jobs" / job / "outputs/profile").read_text() == "mine\n"
    assert json.loads((cluster.home / "jobs" / job / "state.json").read_text()).get("avoid", []) == []
    time.sleep(8)
    assert drained not in cluster.job(job)["hosts"], "it grew onto a host that is drained"
    assert cluster.gpurun("inventory", "uncordon", *words).code == 0
    assert wait_for_ranks(cluster, job, 4) <= 60
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


def test_it_starts_with_what_there_is_and_grows_when_others_end(cluster, tmp_path):
    hosts = [host.name for host in cluster.lab.hosts]
    (tmp_path / "other.yaml").write_text(
        f"image: {TRAIN}\ngpus: 4\ncommand: [sleep, '600']\nconstraints: {{hosts: {json.dumps(hosts[:2])}}}\n"
    )
    other = cluster.gpurun("submit", str(tmp_path / "other.yaml"), "-i", str(cluster.inventory)).out.strip()
    shutil.copytree(RECIPE, tmp_path / "recipe")
    job = train(cluster, recipe=tmp_path / "recipe")
    wait_for_ranks(cluster, job, 2)
    assert sorted(cluster.job(job)["hosts"]) == hosts[2:]
    (tmp_path / "recipe/train.py").write_text("raise SystemExit('not what was submitted')\n")
    cluster.gpurun("cancel", other)
    assert wait_for_ranks(cluster, job, 4) <= 60
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    joined = [event["host"] for event in events(cluster, job) if event.get("state") == "joined the gang"]
    assert sorted(joined) == hosts[:2]

    cluster.lab.run(joined[0], ["pkill", "-KILL", "-f", "^python3 train.py"])  # one rank dies, its container lives
    wait_for_ranks(cluster, job, 3)
    assert wait_for_ranks(cluster, job, 4) <= 90
    left = [event["reason"] for event in events(cluster, job) if event.get("state") == "left the gang"]
    assert left == ["its ranks have ended, those of others have not"]
    assert_no_step_lost([step for step, _ in trained(cluster, job)])


WAITS = 'test "$GPURUN_ATTEMPT" = 1 || exit 0; echo up; while :; do sleep 1; done'


def test_survivors_that_all_fail_beside_a_lost_host_start_again(cluster):
    """As when Horovod aborts each survivor (``terminate called … gloo::IoException``), which it does now and then."""
    job = cluster.gpurun(
        *cluster.submit_args("--min-gpus", "2", "--max-restarts", "1", gpus=3), "--", "sh", "-c", WAITS
    ).out.strip()
    wait_until(lambda: cluster.log(job).count("<stdout>:up") == 3)
    hosts = cluster.job(job)["hosts"]
    cluster.lab.run(hosts[2], ["docker", "kill", f"gpurun-{job}-1"])
    wait_until(lambda: any(event.get("state") == "left the gang" for event in events(cluster, job)))
    for host in hosts[:2]:
        cluster.lab.run(host, ["pkill", "-ABRT", "-f", "^sh -c test .*while"])
    assert cluster.gpurun("wait", job).code == 0
    found = cluster.job(job)
    assert (found["state"], found["restarts"]) == ("SUCCEEDED", 1)
    (again,) = [event["reason"] for event in events(cluster, job) if event.get("state") == "STOPPING"][:1]
    assert again.startswith(f"{hosts[2]}: the job's container ended (exit code 137); then a rank on ")


def test_with_too_few_left_it_starts_again_and_a_program_that_fails_everywhere_does_not(cluster):
    job = train(cluster, gpus=2, least=2, steps=400)
    cluster.wait_for_log(job, "step 45 with")
    cluster.lab.run(cluster.job(job)["hosts"][1], ["docker", "kill", f"gpurun-{job}-1"])
    assert cluster.gpurun("wait", job).code == 0
    found = cluster.job(job)
    assert (found["state"], found["restarts"]) == ("SUCCEEDED", 1)
    steps = [step for step, _ in trained(cluster, job)]
    (resumed,) = [after for before, after in pairwise(steps) if after - before not in (0, 1)]
    assert resumed > 40, "it began again from the beginning"
    assert steps[-1] == 400

    bad = cluster.submit("--min-gpus", "1", "--max-restarts", "3", command=("sh", "-c", "exit 7"))
    assert bad.code == 1, bad.err
    found = cluster.job(bad.out.split()[0])
    assert (found["state"], found["restarts"], found["exit_code"]) == ("FAILED", 0, 7)

"""An elastic gang under real horovodrun: it continues without dead hosts, and takes them in when they return."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
from cluster import ONE_THREAD, TINY
from faulting import adopt, events, hosts_of, kill_supervisor, stopping_reason, wait_until

from gpurun.leases.store import LeaseStore
from gpurun.state.hosts import Cordons

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow, pytest.mark.xdist_group("elastic")]

RECIPE = Path(__file__).parents[2] / "recipes/elastic"
CHECKPOINT_EVERY = 20  # steps, in its program


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
    cluster.wait_until(job, lambda: [n for _, n in trained(cluster, job)[before:]][-3:] in wanted)
    return time.monotonic() - began


def assert_no_step_lost(steps):
    """Each step comes after the one before; one that was not committed may come twice."""
    assert steps[0] == 1
    assert all(after - before in (0, 1) for before, after in pairwise(steps))


def states(cluster, job):
    return {event.get("state") for event in events(cluster, job)}


def leases(cluster):
    return {lease.name: lease for lease in LeaseStore(cluster.home).read_all().leases}


@pytest.mark.story
def test_a_job_that_loses_a_host_continues_and_grows_back(cluster):
    job = train(cluster, gpus=3)
    cluster.wait_for_log(job, f"step {CHECKPOINT_EVERY + 1} with 3 ranks")
    killed = hosts_of(cluster, job)[1]
    cluster.lab.run(killed, ["docker", "kill", f"gpurun-{job}-1"])
    # Before Horovod forms the gang anew, another host may have joined: then no step is made with two ranks.
    told = {"left the gang", "joined the gang"}
    cluster.wait_until(job, lambda: cluster.record(job)["restarts"] or told <= states(cluster, job))
    before = len(trained(cluster, job))

    def has_grown():
        return [ranks for _, ranks in trained(cluster, job)[before:]][-3:] == [3] * 3

    cluster.wait_until(job, has_grown)
    steps, found = [step for step, _ in trained(cluster, job)], cluster.record(job)
    if found["restarts"]:  # Horovod failed on all survivors, as it sometimes does: gpurun blames the loss
        assert f"{killed}: the job's container ended with exit code 137 (SIGKILL: " in stopping_reason(cluster, job)
        assert steps[before] > CHECKPOINT_EVERY, "it began again from the beginning"
    else:
        assert found["attempt"] == 1
        assert_no_step_lost(steps)
    assert (found["state"], found["restarts"]) in (("RUNNING", 0), ("RUNNING", 1))
    assert cluster.gpurun("cancel", job).code == 0


# Of a measurement: GPURUN_KILL_AFTER=N.
@pytest.mark.alone
def test_hosts_leave_and_come_back_beside_a_supervisor_that_dies(cluster):
    """The supervisor dies before it notices the host's silence."""
    job = train(cluster)
    wait_for_ranks(cluster, job, 4)
    crashed = hosts_of(cluster, job)[2]
    cluster.lab.crash(crashed)
    after_s = int(os.environ.get("GPURUN_KILL_AFTER", "1"))
    time.sleep(after_s)
    kill_supervisor(cluster, job)
    killed_s = time.monotonic()
    adopt(cluster, job)
    took_s = wait_for_ranks(cluster, job, 3)
    since_kill_s = time.monotonic() - killed_s
    if path := os.environ.get("GPURUN_STORIES"):
        with Path(path).open("a") as stream:
            row = {"supervisor_killed_after_s": after_s, "trains_after_s": round(took_s, 1)}
            stream.write(json.dumps({**row, "since_kill_s": round(since_kill_s, 1)}) + "\n")
    # 14 to 17 s at load 12: a supervisor begins in 1 to 7 s, is sure after 10 s, and the ranks go on 2 s later. The
    # promise is 20 s. The other 5 s are for a machine that is busier: commands and training stand in line there.
    assert took_s <= 25
    wait_until(lambda: crashed in Cordons(cluster.home).read())
    assert Cordons(cluster.home).read()[crashed].state == "lost"
    lease = leases(cluster)[job]
    assert crashed in [grant.host for grant in lease.grants], "its GPU is free without a proof"
    assert crashed not in [grant.host for grant in lease.members]

    cluster.lab.boot(crashed)
    assert wait_for_ranks(cluster, job, 4) <= 90
    assert leases(cluster)[job].apart == ()

    left = [event["host"] for event in events(cluster, job) if event.get("state") == "left the gang"]
    assert left == [crashed]
    assert sorted(grant.host for grant in leases(cluster)[job].members) == sorted(
        each.name for each in cluster.lab.hosts
    )
    found = cluster.record(job)
    assert (found["state"], found["restarts"], found["attempt"]) == ("RUNNING", 0, 1)
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


@pytest.mark.alone
def test_it_starts_with_what_there_is_grows_and_releases_a_drained_host(cluster, tmp_path, record_property):
    hosts = [host.name for host in cluster.lab.hosts]
    (tmp_path / "other.yaml").write_text(
        f"image: {TINY}\nlauncher: tasks\ngpus: 4\ncommand: [sleep, '600']\n"
        f"constraints: {{hosts: {json.dumps(hosts[:2])}}}\n"
    )
    other = cluster.gpurun("submit", str(tmp_path / "other.yaml"), "-i", str(cluster.inventory)).out.strip()
    shutil.copytree(RECIPE, tmp_path / "recipe")
    job = train(cluster, recipe=tmp_path / "recipe")
    wait_for_ranks(cluster, job, 2)
    assert sorted(hosts_of(cluster, job)) == hosts[2:]
    (tmp_path / "recipe/train.py").write_text("raise SystemExit('not what was submitted')\n")
    cluster.gpurun("cancel", other)
    assert wait_for_ranks(cluster, job, 4) <= 60
    joined = [event["host"] for event in events(cluster, job) if event.get("state") == "joined the gang"]
    assert sorted(joined) == hosts[:2]

    cluster.lab.run(joined[0], ["pkill", "-KILL", "-f", "^python3 train.py"])  # one rank dies, its container lives
    wait_for_ranks(cluster, job, 3)
    assert wait_for_ranks(cluster, job, 4) <= 90
    left = [event["reason"] for event in events(cluster, job) if event.get("state") == "left the gang"]
    assert left == ["the ranks on this host have ended, but ranks on other hosts still run"]

    drained = joined[1]
    words = (drained, "-i", str(cluster.inventory))
    cluster.lab.run(drained, ["sh", "-c", f"echo mine >~/.gpurun/outputs/{job}/profile"], user="train")
    began = time.monotonic()
    done = cluster.gpurun("inventory", "drain", *words, "--wait")
    record_property("empty_s", round(time.monotonic() - began, 1))
    assert done.code == 0 and f"{job} releases {drained} and continues" in done.err
    assert wait_for_ranks(cluster, job, 3) <= 15
    assert drained not in [grant.host for grant in leases(cluster)[job].members]
    assert (cluster.home / "jobs" / job / "outputs/profile").read_text() == "mine\n"
    assert drained not in cluster.record(job)["avoid"], "nobody is to blame for a drain"
    time.sleep(8)
    assert drained not in [grant.host for grant in leases(cluster)[job].grants], "it grew onto a host that is drained"
    assert cluster.gpurun("inventory", "uncordon", *words).code == 0
    assert wait_for_ranks(cluster, job, 4) <= 60
    found = cluster.record(job)
    assert (found["state"], found["attempt"], found["restarts"]) == ("RUNNING", 1, 0)
    assert_no_step_lost([step for step, _ in trained(cluster, job)])
    assert cluster.gpurun("cancel", job).code == 0


WAITS = 'test "$GPURUN_ATTEMPT" = 1 || exit 0; echo up; while :; do sleep 1; done'


def test_survivors_that_all_fail_beside_a_lost_host_start_again(cluster):
    """As when Horovod aborts each survivor (``terminate called … gloo::IoException``), which it does now and then."""
    job = cluster.gpurun(
        *cluster.submit_args("--launcher", "horovod", "--min-gpus", "2", "--max-restarts", "1", gpus=3),
        "--",
        "sh",
        "-c",
        WAITS,
    ).out.strip()
    cluster.wait_for_log(job, "<stdout>:up", times=3)
    hosts = hosts_of(cluster, job)
    cluster.lab.run(hosts[2], ["docker", "kill", f"gpurun-{job}-1"])
    cluster.wait_until(job, lambda: any(event.get("state") == "left the gang" for event in events(cluster, job)))
    for host in hosts[:2]:
        cluster.lab.run(host, ["pkill", "-ABRT", "-f", "^sh -c test .*while"])
    wait_until(lambda: cluster.record(job)["ended_s"])
    found = cluster.record(job)
    assert (found["state"], found["restarts"]) == ("SUCCEEDED", 1)
    why = stopping_reason(cluster, job)
    assert why.startswith(f"{hosts[2]}: the job's container ended with exit code 137 (SIGKILL: ")
    assert "; then a rank on " in why


def test_a_program_that_fails_everywhere_is_not_started_again(cluster):
    """Horovod's driver tries each host; gpurun reads from it that none is left."""
    flags = ("--launcher", "horovod", "--min-gpus", "1", "--max-restarts", "3")
    bad = cluster.submit(*flags, command=("sh", "-c", "exit 7"))
    assert bad.code == 1, bad.err
    found = cluster.record(bad.out.split()[0])
    assert (found["state"], found["restarts"], found["first_failure"]["exit_code"]) == ("FAILED", 0, 7)

"""A hostile program on a real host, whose SSH user is not root, can read, change and stop only its own job.

The tricks are in `hostile/tricks.py`. After each job every other file of the hosts and of the head is as it was, no
planted secret was copied anywhere, the neighbour job has all its lines, and the host is fenced.
"""

from __future__ import annotations

import time

import pytest
from scene import Scene, build_image

from gpurun.node.folder.below import remove_path

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("hostile_container"), pytest.mark.timeout(400)]

IN_OUTPUTS = (
    "swap_files", "swap_folders", "links", "hard_links", "special", "names", "depth", "modes", "grows", "sparse",
    "times", "held",
)  # fmt: skip
IN_RUN = ("progress", "autotune", "forges", "own_files", "stop_notes", "end_swap")
ELSEWHERE = ("writes", "root", "reads", "escapes", "long_line", "noise", "pretends", "swarm")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    build_image(tmp_path_factory.mktemp("image"))


@pytest.fixture
def scene(cluster, image):
    made = Scene(cluster, [host.name for host in cluster.lab.hosts[:2]])
    made.begin()
    yield made
    for outputs in cluster.home.glob("jobs/*/outputs"):
        remove_path(str(outputs))  # pytest cannot: it is too deep
    for host in made.hosts:
        cluster.lab.run(host, ["rm", "-rf", "/home/train/planted"])


def test_outputs_full_of_tricks_come_home_or_are_named_and_go_to_the_next_attempt(scene):
    """The first attempts' containers are killed: the second ones get the outputs on another host.

    One program fills its outputs with tricks, another one closes their folder to everybody.
    """
    job = scene.play("outputs", *IN_OUTPUTS, gpus=1, hosts=scene.hosts, STAY_S=300, more="max_restarts: 1\n")
    closed = scene.play(
        "closed", "modes", "closes_outputs", gpus=1, hosts=scene.hosts, STAY_S=300, more="max_restarts: 1\n"
    )
    for each in (job, closed):
        scene.cluster.wait_for_log(each, "all tricks are played")
    time.sleep(3)
    for each in (job, closed):
        scene.kill(each)
    record = scene.end_of(closed, "SUCCEEDED", "FAILED")
    assert (record["state"], record["restarts"], record["outputs_left"]) == ("SUCCEEDED", 1, None), record
    assert (scene.cluster.home / "jobs" / closed / "outputs" / "suid").read_text() == "closed"
    record = scene.end_of(job, "SUCCEEDED", "FAILED")
    assert (record["state"], record["restarts"]) == ("SUCCEEDED", 1), record["reason"]
    left = " ".join(record["outputs_left"]["first"])
    assert "FIFO" in left, left
    assert "socket" in left, left
    assert record["outputs_left"]["hosts"] == [], left
    outputs = scene.cluster.home / "jobs" / job / "outputs"
    assert (outputs / "steady").read_text() == "steady"
    assert (outputs / "sparse").stat().st_size == 1 << 40
    (outputs / "sparse").unlink()  # too large to search
    assert (outputs / "link0").is_symlink()
    assert (outputs / "suid").stat().st_mode & 0o7000 == 0
    scene.assert_unharmed()


@pytest.mark.story
def test_what_a_program_forges_pretends_and_prints_harms_its_own_job_alone(scene):
    """Its rank 0 plays tricks beside the neighbour, whose fence comes first; its rank 1 runs on another host."""
    job = scene.play("reports", *IN_RUN, *ELSEWHERE, hosts=scene.hosts, STAY_S=300)
    scene.cluster.wait_for_log(job, "all tricks are played")
    time.sleep(3)
    assert scene.cluster.record(job)["state"] == "RUNNING", "forged ends of other hosts' ranks end nothing"
    scene.assert_unharmed()
    shown = [
        scene.cluster.gpurun(*argv)
        for argv in (("logs", job), ("show", job), ("status",), ("status", job), ("top", "--once"))
    ]
    assert scene.cluster.gpurun("cancel", job).code == 0
    scene.end_of(job, "CANCELLED")
    assert not any(
        "\x1b" in text or "\x9b" in text or "\u202e" in text for done in shown for text in (done.out, done.err)
    )
    log = scene.cluster.log(job)
    assert "ROOT" not in log and "WROTE" not in log and "CHANGED" not in log, log[-3000:]
    assert "forged line" not in log
    assert "reports a rank" in scene.notes(job)
    for word in (scene.words["host"], scene.words["head"]):
        scene.assert_nowhere(word, scene.cluster.home)


def test_programs_that_take_their_own_reports_away_end_and_their_hosts_are_free(scene):
    first, second = scene.hosts
    places = {"own_folder": first, "closes_run": second, "kills_script": second}
    jobs = [
        scene.play(trick, trick, hosts=[host], STAY_S=2, more="time_limit: 20s\n") for trick, host in places.items()
    ]
    for job in jobs:
        scene.end_of(job)
    scene.assert_unharmed()

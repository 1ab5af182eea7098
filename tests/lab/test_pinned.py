"""A job runs the submitted image and code, also on hosts that join later."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from at_once import finish, printed, start
from cluster import SHELL

from gpurun.lab import engine

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("pinned")]

IMAGES = {name: f"gpurun/pinned-{os.getpid()}:{name}" for name in ("rebuilt", "removed")}
SAY = ("sh", "-c", "echo word=$WORD")


@pytest.fixture
def build(tmp_path):
    """Give a name to an image that prints this text; None removes the image."""
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    (tmp_path / "image").mkdir()

    def docker(*argv):
        return subprocess.run(["docker", *argv], env=environ, check=True, capture_output=True, text=True).stdout.strip()

    def make(name, word):
        if word is None:
            docker("rmi", "-f", docker("image", "inspect", "--format", "{{.Id}}", IMAGES[name]))
        else:
            (tmp_path / "image" / "Dockerfile").write_text(f"FROM {SHELL}\nENV WORD={word}\n")
            docker("build", "-q", "-t", IMAGES[name], str(tmp_path / "image"))

    yield make
    subprocess.run(["docker", "image", "rm", *IMAGES.values()], env=environ, check=False, capture_output=True)


def test_images_and_code_that_change_or_go_change_no_job_that_was_submitted_before(cluster, build, tmp_path):
    """Another job holds all GPUs until then."""
    holds = start(cluster, "tasks", "sleep", "600", gpus=8, per_host=2)
    work = tmp_path / "work"
    work.mkdir()

    def submit_code():
        return start(cluster, "tasks", "sh", "-c", "echo word=$(cat word)", workdir="../work")

    build("rebuilt", "submitted")
    build("removed", "gone")
    (work / "word").write_text("submitted")
    rebuilt, removed = (start(cluster, "tasks", *SAY, image=image) for image in IMAGES.values())
    code = submit_code()
    build("rebuilt", "later")
    build("removed", None)
    build("removed", "another")
    (work / "word").write_text("later")
    rebuilt_later, code_later = start(cluster, "tasks", *SAY, image=IMAGES["rebuilt"]), submit_code()
    shutil.rmtree(work)
    jobs = {rebuilt: b"submitted", code: b"submitted", rebuilt_later: b"later", code_later: b"later"}
    assert all(cluster.record(job)["state"] == "QUEUED" for job in (removed, *jobs))
    cluster.gpurun("cancel", "--no-wait", holds)
    for job, word in jobs.items():
        finish(cluster, job, "SUCCEEDED", 0)
        assert [printed(cluster, job, rank) for rank in (0, 1)] == [[b"word=" + word]] * 2
    assert "is no longer on the head" in finish(cluster, removed, "FAILED")["reason"]
    assert cluster.gpurun("wait", removed).code == 2

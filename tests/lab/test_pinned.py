"""A job runs the submitted image and code, also on hosts that join later."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from cluster import TRAIN

from gpurun.lab import engine

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("train")]

IMAGE = f"gpurun/pinned-{os.getpid()}:1"


@pytest.fixture
def build(tmp_path):
    """Give the name to an image that prints this text; None removes the name."""
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    (tmp_path / "image").mkdir()

    def docker(*argv):
        return subprocess.run(["docker", *argv], env=environ, check=True, capture_output=True, text=True).stdout.strip()

    def make(word):
        if word is None:
            docker("rmi", "-f", docker("image", "inspect", "--format", "{{.Id}}", IMAGE))
        else:
            (tmp_path / "image" / "Dockerfile").write_text(f"FROM {TRAIN}\nENV WORD={word}\n")
            docker("build", "-q", "-t", IMAGE, str(tmp_path / "image"))

    yield make
    subprocess.run(["docker", "image", "rm", IMAGE], env=environ, check=False, capture_output=True)


def waiting(cluster, *submission):
    """A job that waits for GPUs, and a function that lets it start."""
    gpus = sum(host["gpus"] for host in cluster.status()["hosts"])
    per_host = ["--gpus-per-host", str(gpus // len(cluster.lab.hosts))]
    first = cluster.gpurun(*cluster.submit_args(*per_host, gpus=gpus), "--", "sleep", "600").out.strip()
    done = cluster.gpurun(*submission)
    assert done.code == 0, done.err
    job = done.out.strip()
    assert cluster.job(job)["state"] == "QUEUED"
    return job, lambda: cluster.gpurun("cancel", first)


def test_a_tag_that_is_built_anew_changes_no_job_that_was_submitted_before(cluster, build):
    build("submitted")
    job, let_go = waiting(cluster, *cluster.submit_args(image=IMAGE), "--", "sh", "-c", "echo word=$WORD")
    build("later")
    let_go()
    assert cluster.gpurun("wait", job).code == 0
    assert (cluster.log(job).count("word=submitted"), cluster.log(job).count("word=later")) == (2, 0)
    assert cluster.submit(image=IMAGE, command=["sh", "-c", "echo word=$WORD"]).out.count("word=later") == 2


def test_an_image_that_is_removed_before_a_job_starts_is_named_and_nothing_else_runs(cluster, build):
    build("removed")
    job, let_go = waiting(cluster, *cluster.submit_args(image=IMAGE), "--", "true")
    build(None)
    build("another")
    let_go()
    assert cluster.gpurun("wait", job).code == 2
    assert "is not on the head any more" in cluster.job(job)["reason"]


def test_a_workdir_that_changes_and_goes_changes_no_job_that_was_submitted_before(cluster, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "word").write_text("submitted")
    (work / "recipe.yaml").write_text(
        f"image: {TRAIN}\ngpus: 2\nworkdir: .\nconstraints: {{gpus_per_host: 1}}\n"
        "command: [sh, -c, 'echo word=$(cat word)']\n"
    )
    job, let_go = waiting(cluster, "submit", str(work), "-i", str(cluster.inventory))
    (work / "word").write_text("later")
    again = cluster.gpurun("submit", str(work), "-i", str(cluster.inventory)).out.strip()
    shutil.rmtree(work)
    let_go()
    for submitted, word in ((job, "submitted"), (again, "later")):
        assert cluster.gpurun("wait", submitted).code == 0, cluster.job(submitted)["reason"]
        assert cluster.log(submitted).count(f"word={word}") == cluster.log(submitted).count("word=") == 2

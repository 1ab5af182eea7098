"""``gpurun show``, ``rerun`` and ``diff``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.content.tree import scan
from gpurun.content.workdir import write_code
from gpurun.head.submit import origin_of
from gpurun.jobs.record import Origin, State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.supervisor.log import JobLog

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {h1: {}}}}
"""
SPEC = JobSpec(name="n", image="i:1", gpus=2, command=("train",), image_id="sha256:" + "a" * 64, env={"LR": "1"})


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A job store, with nobody who would start what is queued."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: None)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("one\ntwo\n")
    return tmp_path


def store(world, spec=SPEC, origin=None):
    """A job whose workdir is what ``work`` holds now."""
    tree = scan(world / "work")
    spec = replace(spec, workdir=str(world / "work"), code=tree.digest)
    codes = {tree.digest: partial(write_code, tree=tree)}
    (folder,) = JobStore(world / "home").create_many(
        [spec], inventory=world / "i.yaml", now_s=1.0, codes=codes, origins=[origin or origin_of(world / "work")]
    )
    return folder


def report(folder, value, rank=0, attempt=1):
    log = JobLog(folder.log, attempt=attempt, now=lambda: 1.0)
    said = b'{"time": 1, "step": 1, "metrics": {"accuracy": %g}}\n' % value
    log.take_output(f"h/{rank}.1.1", rank, "m", len(said), said)
    log.close()


def git(world, *words):
    argv = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    subprocess.run(argv, cwd=world / "work", check=True, capture_output=True)


def test_show_has_all_that_made_a_job(gpurun, world):
    git(world, "init", "-q")
    git(world, "add", ".")
    git(world, "commit", "-qm", "first")
    (world / "work" / "train.py").write_text("one\nthree\n")
    (world / "work" / "new.py").write_text("new\n")
    folder = store(world)
    report(folder, 0.25)
    code, out, err = gpurun("show", folder.id, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["inputs"]["image_id"] == SPEC.image_id and told["inputs"]["env.LR"] == "1"
    assert told["inputs"]["code"] == folder.spec().code and "name" not in told["inputs"]
    assert len(told["origin"]["commit"]) == 40 and told["origin"]["untracked"] == 1
    assert "-two\n+three" in told["origin"]["diff"] and told["metrics"] == {"accuracy": 0.25}
    text = gpurun("show", folder.id)[1]
    for words in ("last accuracy  0.25", "train", told["origin"]["commit"], "lines of diff", "code holds  2 files"):
        assert words in text


def test_the_value_of_the_lowest_rank_of_the_newest_attempt_is_shown(gpurun, world):
    folder = store(world)
    for rank, attempt, value, shown in ((1, 1, 0.1, 0.1), (0, 1, 0.2, 0.2), (2, 1, 0.3, 0.2), (1, 2, 0.4, 0.4)):
        report(folder, value, rank, attempt)
        assert json.loads(gpurun("show", folder.id, "--json")[1])["metrics"] == {"accuracy": shown}


def test_a_workdir_without_a_repository_and_a_job_without_an_origin(gpurun, world):
    folder = store(world)
    assert folder.origin().commit == "" and folder.origin().gpurun
    Path(str(folder.path), "origin.json").unlink()
    assert folder.origin() == Origin() and gpurun("show", folder.id)[0] == 0
    Path(str(folder.path), "origin.json").write_text("[]")
    assert gpurun("show", folder.id)[0] == 5


def test_a_repository_starts_no_program_of_its_own(world):
    """Its settings can name one for almost everything that Git does."""
    git(world, "init", "-q")
    git(world, "add", ".")
    git(world, "commit", "-qm", "first")
    evil = world / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {world}/ran\n")
    evil.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "core.pager", "diff.x.textconv", "diff.x.command"):
        git(world, "config", key, str(evil))
    (world / "work" / ".gitattributes").write_text("* diff=x\n")
    (world / "work" / "train.py").write_text("changed\n")
    assert "+changed" in origin_of(world / "work").diff
    assert not (world / "ran").exists()


def test_a_command_is_printed_as_it_is_typed(gpurun, world):
    words = ("sh", "-c", "while sleep 1; do echo 'a b'; done", "", "$x")
    shown = gpurun("show", store(world, replace(SPEC, command=words)).id)[1]
    (line,) = (line.strip() for line in shown.splitlines() if line.strip().startswith("command "))
    assert shlex.split(line) == ["command", *words]


def test_logs_of_a_job_that_has_printed_nothing_say_why(gpurun, world):
    folder = store(world)
    code, out, err = gpurun("logs", folder.id)
    assert (code, out) == (0, "")
    assert (
        err == f"{folder.id} has printed nothing: the job waits in the queue; `gpurun why {folder.id}` explains why\n"
    )
    assert gpurun("-q", "logs", folder.id)[2] == "" and gpurun("logs", folder.id, "--json")[1] == ""
    folder.write(folder.record().but(state=State.PREPARING))
    assert gpurun("logs", folder.id)[2] == f"{folder.id} has printed nothing yet: the job is PREPARING\n"
    log = JobLog(folder.log, attempt=1, now=lambda: 1.0)
    log.take_output("h/0.1.1", 0, "o", 7, b"loss 1\n")
    log.close()
    assert gpurun("logs", folder.id, "--grep", "nope")[2] == f"no line of {folder.id}'s log matches the options\n"
    assert "loss 1" in gpurun("logs", folder.id)[1] and gpurun("logs", folder.id)[2] == ""


def test_diff_names_settings_lines_and_what_came_of_them(gpurun, world):
    one = store(world)
    report(one, 0.5)
    (world / "work" / "train.py").write_text("one\nthree\n")
    (world / "work" / "data").write_bytes(b"\xff\x00")
    other = store(world, replace(SPEC, env={"LR": "2"}, constraints=Constraints(locality="host")))
    report(other, 0.75)
    out = gpurun("diff", one.id, other.id)[1]
    for line in ("env.LR: 1 → 2", "constraints.locality: - → host", "accuracy: 0.5 → 0.75", "-two", "+three"):
        assert line in out.splitlines()
    assert "data: differs" in out
    told = json.loads(gpurun("diff", one.id, other.id, "--json")[1])
    assert told["files"] == ["data", "train.py"] and told["differs"]["env.LR"] == ["1", "2"]
    same = gpurun("diff", one.id, one.id)
    assert (same[1], same[2].strip()) == ("", "the jobs are the same")


def test_what_a_file_holds_does_not_steer_the_terminal(gpurun, world):
    one = store(world)
    (world / "work" / "train.py").write_text("one\n\x1b[2Jtwo\n")
    assert "\x1b" not in gpurun("diff", one.id, store(world).id)[1]


@pytest.fixture
def rerun(gpurun, world, monkeypatch):
    """Run a job again as another user; its exit code, what it says, and the inventories of what was queued."""

    def rerun(folder, uid=4711, *words):
        queued = []

        def queue(_, inventory, *__, **___):
            queued.append(inventory)
            return SimpleNamespace(problem=None, folders=[folder])

        monkeypatch.setattr("gpurun.content.images.Engine.image", lambda *_: None)
        monkeypatch.setattr("gpurun.head.submit.queue_jobs", queue)
        monkeypatch.setattr("gpurun.cli.one_job.os", type("Os", (), {**vars(os), "getuid": staticmethod(lambda: uid)}))
        code, out, err = gpurun("rerun", folder.id, *words)
        return (code, err, queued, out)[: 4 if words else 3]

    for name in ("i.yaml", "own.yaml"):
        (world / name).write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_INVENTORY", str(world / "own.yaml"))
    return rerun


def test_another_user_s_job_runs_again_with_ones_own_inventory(rerun, world):
    """An inventory names an ssh_config, which can run commands."""
    folder = store(world)
    code, err, queued = rerun(folder)
    assert (code, queued) == (0, [world / "own.yaml"])
    assert err.startswith(f"{folder.id} waits: "), "as submit says it"
    assert rerun(folder, os.getuid())[::2] == (0, [world / "i.yaml"])
    (world / "i.yaml").unlink()
    assert rerun(folder)[0] == 0


def test_a_job_that_runs_again_is_one_json_document_as_submit_prints_it(rerun, world, monkeypatch):
    folder = store(world)
    code, err, _, out = rerun(folder, os.getuid(), "--json")
    assert (code, json.loads(out)["job"]["id"]) == (0, folder.id) and err == ""
    seen = {}
    monkeypatch.setattr("gpurun.cli.follow.follow_job", lambda _, **given: seen.update(given) or 7)
    code, err, _, out = rerun(folder, os.getuid(), "--json", "--follow")
    assert (code, json.loads(out)["job"]["id"]) == (7, folder.id)
    assert seen == {"print_id": False, "lines_to_stderr": True, "cancel_on_interrupt": True}


def test_another_user_s_job_gets_none_of_ones_own_files_as_secrets(rerun, world):
    (world / "key").write_text("mine")
    folder = store(world, replace(SPEC, secret_files={"token": str(world / "key")}))
    code, err, queued = rerun(folder)
    assert (code, queued) == (2, []) and "secrets" in err
    assert rerun(folder, os.getuid())[0] == 0


def test_a_job_that_kept_too_little_cannot_be_run_again(gpurun, world):
    code, _, err = gpurun("rerun", store(world, replace(SPEC, image_id="")).id)
    assert code == 2 and "did not keep the job's image and code" in err


def test_a_damaged_copy_of_the_code_is_named(gpurun, world):
    folder = store(world)
    path = Path(str(folder.code))
    path.chmod(0o600)
    path.write_bytes(b"[[7]]\n")
    assert gpurun("show", folder.id)[0] == 5
    path.unlink()
    code, _, err = gpurun("diff", folder.id, folder.id)
    assert code == 5 and "the job's copy of its code does not exist" in err

"""`gpurun du` and `gpurun prune`, as people and scripts meet them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpurun.cli import cancel
from gpurun.content.tree import scan
from gpurun.content.workdir import CodeStore
from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.node.folder import below

MIB = 1 << 20


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    yield JobStore(tmp_path / "home")
    below.remove_path(str(tmp_path / "home"))


def ended(store, ended_s=100.0, name="n", size=MIB, **changes):
    spec = JobSpec(name, "i", 1, ("true",), outputs="/out")
    folder = store.create(spec, inventory=store.home / "inventory.yaml", now_s=1.0)
    folder.write(folder.record().but(state=State.SUCCEEDED, ended_s=ended_s, **changes))
    store.retire(folder.id)
    folder.outputs.mkdir()
    (folder.outputs / "model").write_bytes(b"x" * size)
    return folder


def test_du_shows_the_largest_first_and_the_sum(gpurun, store):
    small, large = ended(store, name="small"), ended(store, name="a'; \x1b[2J", size=3 * MIB)
    (store.folder / ".doomed-j-0000000a-1").mkdir()
    code, out, err = gpurun("du", "--json")
    found = json.loads(out)
    assert code == 0
    assert [row["id"] for row in found["jobs"]] == [large.id, small.id, ".doomed-j-0000000a-1"]
    first = found["jobs"][0]
    assert (first["state"], first["files"], first["unread"]) == ("SUCCEEDED", 4, [])
    assert 3 * MIB <= first["bytes"]["outputs"] <= first["bytes"]["total"] < 3.1 * MIB
    assert found["total"]["total"] == sum(row["bytes"]["total"] for row in found["jobs"])
    assert found["disk_free_bytes"] > 0
    code, out, err = gpurun("du")
    assert "\x1b[2J" not in out + err
    assert "4.0 MiB" in out
    assert "left over" in out
    assert "free on this disk" in err


def test_equal_code_counts_once_and_goes_with_the_last_job(gpurun, store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/large").write_bytes(os.urandom(4 * MIB))
    jobs = [ended(store, float(at), size=0) for at in (1, 2, 3)]
    for folder in jobs:
        CodeStore(store.home).add(folder.code, scan(tmp_path / "work"))
    told = json.loads(gpurun("du", "--json")[1])
    assert len(told["jobs"]) == 3 and 4 * MIB <= told["total"]["total"] < 5 * MIB
    assert json.loads(gpurun("prune", jobs[0].id, "--yes", "--json")[1])["bytes"] < MIB
    assert len(store.codes()) == 1
    assert 4 * MIB <= json.loads(gpurun("prune", "--older-than", "1s", "--yes", "--json")[1])["bytes"] < 5 * MIB
    assert store.folder.names() == []


def test_code_that_lost_its_jobs_is_left_over_until_the_next_prune(gpurun, store, tmp_path, monkeypatch):
    """As after `rm -r` of a job's folder, or a copy of the state directory that makes copies of links."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/large").write_bytes(os.urandom(4 * MIB))
    folder = ended(store, size=0)
    CodeStore(store.home).add(folder.code, scan(tmp_path / "work"))
    folder.path.rmtree()
    told = json.loads(gpurun("du", "--json")[1])
    assert [(row["state"], row["files"]) for row in told["jobs"]] == [("left over", 1)]
    assert 4 * MIB <= told["total"]["total"] < 5 * MIB
    assert gpurun("prune", "--older-than", "1s", "--yes")[0] == 0
    assert store.folder.names() == []


def test_du_of_one_job(gpurun, store):
    one, _ = ended(store), ended(store)
    found = json.loads(gpurun("du", one.id, one.id, "--json")[1])
    assert [row["id"] for row in found["jobs"]] == [one.id]
    assert gpurun("du", "j-none")[0] == 2


def test_du_without_any_job(gpurun, store):
    assert json.loads(gpurun("du", "--json")[1])["jobs"] == []


def test_a_state_may_be_in_lower_case_as_for_history(gpurun, store):
    folder = ended(store)
    assert folder.id in gpurun("prune", "--state", folder.record().state.value.lower(), "--dry-run")[1]


def test_du_of_a_damaged_job_says_so(gpurun, store):
    folder = ended(store)
    (folder.path.plain / "state.json").write_text("{")
    (row,) = json.loads(gpurun("du", "--json")[1])["jobs"]
    assert row["state"] == "damaged"
    assert row["bytes"]["total"] > MIB


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "the command names no jobs to remove"),
        (("--older-than", "never"), "'never' is not a time; write a number with its unit"),
        (("--older-than", "30"), "'30' has no unit; write 30s, 30m, 30h or 30d"),
        (("--keep-below", "5 apples"), "'5 apples' has the unknown unit 'apples'"),
        (("--state", "RUNNING"), "'RUNNING' is not a state of a job that has ended"),
        (("j-none",), "there is no job"),
    ],
)
def test_what_prune_refuses(gpurun, store, argv, said):
    folder = ended(store)
    code, _, err = gpurun("prune", "--yes", *argv)
    assert code == 2
    assert said in err
    assert folder.path.exists()


def test_without_a_terminal_nothing_goes_unless_it_is_told(gpurun, store, monkeypatch):
    folder = ended(store)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    code, out, err = gpurun("prune", folder.id)
    assert code == 2
    assert folder.id in out, "it says what it would remove"
    assert "--yes" in err
    assert folder.path.exists()


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_a_person_is_asked_and_sees_how_much(gpurun, store, monkeypatch, answer, code):
    folder = ended(store)
    monkeypatch.setattr(cancel.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(cancel.typer, "confirm", lambda *_, **__: answer)
    found, out, _ = gpurun("prune", folder.id)
    assert found == code
    assert "1 job, 1.0 MiB" in out
    assert folder.path.exists() is not answer


def test_a_dry_run_removes_nothing(gpurun, store):
    folder = ended(store)
    code, out, _ = gpurun("prune", "--older-than", "30d", "--dry-run", "--json")
    found = json.loads(out)
    assert (code, found["dry_run"], [each["id"] for each in found["jobs"]]) == (0, True, [folder.id])
    assert folder.path.exists()
    found = json.loads(gpurun("prune", "--older-than", "30d", "--yes", "--json")[1])
    assert (found["dry_run"], found["bytes"] >= MIB, store.ids()) == (False, True, ())


def test_what_stays_is_named_and_why(gpurun, store):
    folder = ended(store, outputs_left=OutputsLeft(1, ("h1: did not answer",), ("h1",)))
    code, _, err = gpurun("prune", "--older-than", "30d", "--yes")
    assert code == 0
    assert f"kept: {folder.id}: the job's outputs on h1 have not been copied to the head" in err
    code, _, err = gpurun("prune", folder.id, "--yes")
    assert code == 2
    assert f"copy the outputs with `gpurun outputs {folder.id}`," in err
    code, out, _ = gpurun("prune", folder.id, "--yes", "--also-unbrought")
    assert code == 0
    assert f"outputs of the job stay on h1, in outputs/{folder.id} below the host's gpurun folder" in out
    assert store.ids() == ()


def test_a_limit_that_cannot_be_met_is_told(gpurun, store):
    folder = ended(store)
    folder.write(folder.record().but(state=State.QUEUED))
    code, out, err = gpurun("prune", "--keep-below", "0MiB", "--yes")
    assert code == 0
    assert "nothing to remove" in out
    assert "more than 0 B: gpurun may remove no other job" in err


def test_nothing_speaks_of_a_job_that_was_pruned(gpurun, store):
    folder, other = ended(store, name="gone"), ended(store, name="stays")
    assert gpurun("prune", folder.id, "--yes")[0] == 0
    assert gpurun("outputs", folder.id)[0] == 2
    found = json.loads(gpurun("status", other.id, "--json")[1])
    assert [job["id"] for job in found["jobs"]] == [other.id]
    assert "prune" in gpurun("audit", "--job", folder.id)[1]
    assert not (store.live / folder.id).exists()


@pytest.mark.parametrize("options", [(), ("--outputs-only",)], ids=["jobs", "outputs"])
def test_a_prune_that_is_killed_at_any_point_leaves_jobs_whole_or_gone(gpurun, store, options):
    """A real process, really killed; the commands after it run here."""
    for point in range(1, 30):
        folders = [ended(store, size=10), ended(store, size=10)]
        argv = ["prune", "--older-than", "30d", "--yes"]
        killed = subprocess.run(
            [sys.executable, "-m", "gpurun", *argv, *options],
            env={**os.environ, "GPURUN_FAULT": f"command:{point}"}, capture_output=True, check=False,
        )  # fmt: skip
        for job in store.ids():
            assert store.get(job).record().state is State.SUCCEEDED
            assert store.get(job).spec().outputs == "/out"
        assert gpurun(*argv, *options)[0] == 0
        names = [name for folder in folders if folder.path.exists() for name in folder.path.names()]
        assert not [name for name in (*store.folder.names(), *names) if "doomed" in name or "outputs" in name]
        assert gpurun(*argv)[0] == 0
        assert store.ids() == ()
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert point > 5

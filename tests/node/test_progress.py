"""What ranks leave of their progress is the user's: anything may have such a name, and none of it stops the agent."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from gpurun.node.job import gang, parts, rank_processes

JOB = "j-00000001"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "job_folder", lambda job: str(tmp_path))
    monkeypatch.setattr(rank_processes, "_reports", {})
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_what_ranks_told(run):
    (run / "progress.0").write_text('{"step": 7}')
    (run / "checkpoint.0").write_text('{"step": 5}')
    (run / "progress.1").write_text('{"step": 6}')
    told = gang.progress(None, JOB)
    assert told["ranks"] == {"0": {"progress": {"step": 7}, "checkpoint": {"step": 5}}, "1": {"progress": {"step": 6}}}
    assert 0 <= told["age_s"] < 60 and 0 <= told["checkpoint_age_s"] < 60


@pytest.fixture
def clocks(own_copy):
    """The monotonic clock, and the one that people set."""
    made = SimpleNamespace(run_s=1000.0, wall_s=1e9)
    own_copy(rank_processes, "time", monotonic=lambda: made.run_s, time=lambda: made.wall_s)
    return made


def write(path, text, at_s):
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def age(key="age_s"):
    return gang.progress(None, JOB)[key]


@pytest.mark.parametrize("step_s", [0, 3600, -86400])
def test_a_clock_that_is_set_neither_ages_a_report_nor_renews_it(run, clocks, step_s):
    write(run / "progress.0", '{"step": 7}', clocks.wall_s)
    write(run / "checkpoint.0", '{"step": 7}', clocks.wall_s)
    assert age() == 0
    for after_s in (20, 300, 7200):
        clocks.wall_s += step_s
        clocks.run_s = 1000.0 + after_s
        assert age() == age("checkpoint_age_s") == after_s
    write(run / "progress.0", '{"step": 8}', clocks.wall_s - 86400)
    clocks.run_s += 20
    assert 0 <= age() <= 20, "it changed since the last look, whatever its time says"
    write(run / "progress.0", '{"step": 8}', clocks.wall_s)
    assert age() == 0, "the same step, written anew"


def test_a_new_agent_does_not_know_whether_an_old_report_is_old(run, clocks):
    write(run / "progress.0", '{"step": 7}', clocks.wall_s - 3600)
    write(run / "checkpoint.0", '{"step": 7}', clocks.wall_s - 3600)
    told = gang.progress(None, JOB)
    assert (told["age_s"], told["checkpoint_age_s"]) == (0, 3600), "a gang ends for the one, but not for the other"
    clocks.run_s += 600
    told = gang.progress(None, JOB)
    assert (told["age_s"], told["checkpoint_age_s"]) == (600, 4200)


@pytest.mark.timeout(60)
def test_what_is_no_file_of_the_runtimes_says_nothing(run, tmp_path):
    os.mkfifo(run / "progress.0")
    (run / "progress.1").mkdir()
    (tmp_path / "secret").write_text('{"step": 1}')
    (run / "progress.2").symlink_to(tmp_path / "secret")
    (run / "progress.²").write_text('{"step": 1}')
    (run / "progress.-1").write_text('{"step": 1}')
    (run / "progress.3").symlink_to(run / "progress.3")
    assert gang.progress(None, JOB) == {"age_s": None, "checkpoint_age_s": None, "ranks": {}}


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[" * 60_000, b"[1, 2", json.dumps("x" * 70_000).encode()])
def test_what_cannot_be_read_is_a_sign_of_life_all_the_same(run, content):
    (run / "progress.0").write_bytes(content)
    told = gang.progress(None, JOB)
    assert told["ranks"].get("0", {}) == {}
    assert told["age_s"] is not None


@pytest.mark.parametrize(
    "content",
    [b"9" * 5000, b'{"step": ' + b"9" * 4000 + b"}", b'{"step": NaN}', b'{"step": [[[]]]}', b'{"step": 1e999}'],
)
def test_what_the_head_could_not_read_never_leaves_the_host(run, content):
    """A newer Python reads no number of so many digits: the head would take the host's channel for broken."""
    (run / "progress.0").write_bytes(content)
    told = gang.progress(None, JOB)["ranks"].get("0", {}).get("progress")
    assert told in (None, {})
    (run / "progress.0").write_bytes(b'{"step": 3, "more": ' + content + b"}")
    assert "more" not in (gang.progress(None, JOB)["ranks"].get("0", {}).get("progress") or {})


def test_a_program_that_tells_without_end_fills_no_memory(run):
    """A reply has room for 16 MiB; whoever lies in it would hide its own hang."""
    for number in range(400):
        (run / f"progress.{number}").write_text(json.dumps({f"k{field}": "v" * 990 for field in range(60)}))
    told = gang.progress(None, JOB)
    assert 0 < len(json.dumps(told)) < 5 << 20


def test_a_run_folder_that_cannot_be_read_says_nothing(run):
    run.rmdir()
    run.write_text("a file")
    assert gang.progress(None, JOB) == {"age_s": None, "checkpoint_age_s": None, "ranks": {}}

"""The tables of ``gpurun status``."""

from __future__ import annotations

import pytest

from gpurun.cli.printing import job_json
from gpurun.cli.tables import print_status
from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State

HOST = {"host": "h1", "rack": "r1", "generation": "pascal", "gpus": 4, "free": 4, "state": "ok"}


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def record(ident, owner, uid):
    return JobRecord(
        id=ident, name="n", owner=owner, owner_uid=uid, inventory="/i", gpus=1, state=State.QUEUED, submitted_s=1.0,
        queued_s=1.0,
    )  # fmt: skip


def test_jobs_of_several_owners_say_whose_they_are(capsys):
    print_status([HOST], [record("j-0000000a", "alice", 1), record("j-0000000b", "bo\x1b[2Jb", 2)], most_queued=9)
    shown = capsys.readouterr().out.splitlines()
    (header,) = (line.split() for line in shown if line.startswith("job"))
    assert header[:3] == ["job", "owner", "name"]
    assert [line.split()[:2] for line in shown if line.startswith("j-")] == [
        ["j-0000000a", "alice"], ["j-0000000b", "bo\\x1b[2Jb"]
    ]  # fmt: skip


def test_jobs_of_one_owner_do_not(capsys):
    print_status([HOST], [record("j-0000000a", "alice", 1), record("j-0000000b", "alice", 1)], most_queued=9)
    assert "owner" not in capsys.readouterr().out


def test_a_long_queue_is_cut_short_and_says_so(capsys):
    waiting = [record(f"j-{number:08x}", "alice", 1) for number in range(30)]
    running = record("j-000000ff", "alice", 1).but(state=State.RUNNING)
    print_status([HOST], [*waiting, running], most_queued=20)
    shown = capsys.readouterr().out
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("j-")]
    assert rows == [job.id for job in (*waiting[:20], running)]
    assert "10 more wait; `gpurun queue` lists all that wait" in shown


def test_scripts_always_see_the_owner():
    assert job_json(record("j-0000000a", "alice", 1))["owner"] == "alice"

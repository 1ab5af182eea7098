from __future__ import annotations

import json
import os
import stat
import sys

import pytest
from forked import PopenOfCode
from waiting import LIMIT_S

from gpurun.errors import StateError
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, end_queued_job, finish
from gpurun.state import audit
from gpurun.state.paths import StatePath


@pytest.fixture(autouse=True)
def short_command(monkeypatch):
    """A line holds the command of its process, and pytest's own can be long."""
    monkeypatch.setattr(sys, "argv", ["gpurun", "submit"])


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["submit", "-n", "8", "recipe"], "gpurun submit -n 8 recipe"),
        (["submit", "-e", "WANDB_API_KEY=s3cret"], "gpurun submit -e WANDB_API_KEY=***"),
        (["submit", "--env", "A=s3cret=x"], "gpurun submit --env A=***"),
        (["submit", "--env=A=s3cret"], "gpurun submit --env=A=***"),
        (["submit", "-eA=s3cret"], "gpurun submit -eA=***"),
        (["x", "--token", "s3cret", "y"], "gpurun x --token *** y"),
        (["x", "--hf-token=s3cret"], "gpurun x --hf-token=***"),
        (["inventory", "set", "h1", "password=s3cret"], "gpurun inventory set h1 password=***"),
        (["ship", "https://me:s3cret@host/image"], "gpurun ship https://me:***@host/image"),
        (["submit", "--", "python", "--token", "s3cret"], "gpurun submit -- python …"),
        (["submit", "--", "true"], "gpurun submit -- true"),
        ([], "gpurun"),
    ],
)
def test_a_command_line_without_its_secrets(argv, shown):
    assert audit.without_secrets(["/usr/bin/gpurun", *argv]) == shown
    assert "s3cret" not in shown


def test_a_line_says_who_what_and_how(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpurun", "cancel", "j-1\n\x1b[2J"])
    monkeypatch.setenv("SUDO_USER", "ann")
    monkeypatch.setenv("USER", "somebody else")
    audit.AuditLog(tmp_path).note("cancel", job="j-1", owner="bob")
    (entry,) = audit.AuditLog(tmp_path).read()
    assert entry["user"] != "somebody else"
    assert (entry["what"], entry["sudo_user"], entry["job"], entry["owner"]) == ("cancel", "ann", "j-1", "bob")
    assert (tmp_path / "audit.jsonl").read_text().count("\n") == 1


def test_damaged_lines_are_shown_not_hidden(tmp_path):
    (tmp_path / "audit.jsonl").write_bytes(b'{"what": "submit"}\n\xff\xfe\n[1]\n{"what"\n' + b"[" * 5000 + b"\n")
    assert [entry["what"] for entry in audit.AuditLog(tmp_path).read()] == ["submit", *["damaged"] * 4]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    audit.AuditLog(tmp_path).note("submit")


def test_nothing_noted_yet(tmp_path):
    assert list(audit.AuditLog(tmp_path).read()) == []


def test_entries_are_json_that_the_command_prints(tmp_path, monkeypatch, capsys):
    from gpurun.cli.main import main

    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    for job in ("j-0000000a", "j-0000000b"):
        audit.AuditLog(tmp_path).note("submit", job=job, name="x\x1b[2J")
    with pytest.raises(SystemExit):
        main(["audit", "--json", "--job", "j-0000000a"])
    assert [entry["job"] for entry in json.loads(capsys.readouterr().out)["entries"]] == ["j-0000000a"]
    with pytest.raises(SystemExit):
        main(["audit"])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2
    assert "\x1b" not in shown


def test_lists_are_for_people_not_for_python(tmp_path, monkeypatch, capsys):
    from gpurun.cli.main import main

    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    for hosts in (["h1", "h2", "h3"], [1, 2, 4], ["h[1-", "\x1b[2J", "@x"], []):
        audit.AuditLog(tmp_path).note("grant", hosts=hosts)
    with pytest.raises(SystemExit):
        main(["audit"])
    shown = [line.rpartition("hosts=")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["h[1-3]", "1,2,4", r"h[1-,\x1b[2J,@x", ""]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(audit, "MAX_BYTES", 4096)


def names(home):
    return sorted(path.name for path in home.iterdir())


def test_it_is_bounded_and_read_from_the_oldest_on(tmp_path, small):
    for number in range(200):
        audit.AuditLog(tmp_path).note("submit", number=number)
    assert names(tmp_path) == ["audit.1.jsonl", "audit.jsonl"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4096 + 1024
    numbers = [entry["number"] for entry in audit.AuditLog(tmp_path).read()]
    assert numbers == list(range(200 - len(numbers), 200))
    assert len(numbers) > 10


NOTES = """
import sys
from pathlib import Path
from gpurun.state import audit
audit.MAX_BYTES = int(sys.argv[3])
for number in range(int(sys.argv[4])):
    audit.AuditLog(Path(sys.argv[1])).note("submit", who=int(sys.argv[2]), number=number)
"""


def test_no_line_of_several_processes_is_lost_or_torn_when_a_new_file_begins(tmp_path):
    def write(who, limit, count):
        return PopenOfCode([sys.executable, "-c", NOTES, *map(str, (tmp_path, who, limit, count))])

    assert write(0, 1000000, 1).wait(LIMIT_S) == 0
    each = (tmp_path / "audit.jsonl").stat().st_size
    limit = 4 * 300 * each * 2 // 3  # it is full once, and no line is old enough to be dropped
    writers = [write(who, limit, 300) for who in range(1, 5)]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0] * 4
    assert names(tmp_path) == ["audit.1.jsonl", "audit.jsonl"]
    found = sorted((entry["who"], entry["number"]) for entry in audit.AuditLog(tmp_path).read())
    assert found == [(0, 0), *((who, number) for who in range(1, 5) for number in range(300))]


def test_one_who_had_it_open_writes_to_the_old_one(tmp_path, small):
    audit.AuditLog(tmp_path).note("submit", number=1)
    with (tmp_path / "audit.jsonl").open("a") as stream:
        while not (tmp_path / "audit.1.jsonl").exists():
            audit.AuditLog(tmp_path).note("submit", number=2)
        stream.write('{"what": "late"}\n')
    audit.AuditLog(tmp_path).note("submit", number=3)
    assert [entry["what"] for entry in audit.AuditLog(tmp_path).read()][-2:] == ["late", "submit"]


@pytest.mark.parametrize("step", ["link", "rename"])
def test_a_crash_while_a_new_file_begins_loses_nothing(tmp_path, small, monkeypatch, step):
    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    def note_until_killed():
        for number in range(100):
            audit.AuditLog(tmp_path).note("submit", number=number)

    with monkeypatch.context() as patched:
        patched.setattr(StatePath, step, die)
        with pytest.raises(Killed):
            note_until_killed()
    written = [entry["number"] for entry in audit.AuditLog(tmp_path).read()]
    assert written == list(range(len(written)))
    audit.AuditLog(tmp_path).note("submit", number=len(written))
    assert [entry["number"] for entry in audit.AuditLog(tmp_path).read()] == [*written, len(written)]
    audit.AuditLog(tmp_path).note("submit", number=-1)
    assert (tmp_path / "audit.jsonl").stat().st_size < 1024


def test_a_new_file_is_like_the_old_one(tmp_path, small):
    (tmp_path / "audit.jsonl").touch(0o640)
    while not (tmp_path / "audit.1.jsonl").exists():
        audit.AuditLog(tmp_path).note("submit")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names(tmp_path)] == [0o640, 0o640]


@pytest.mark.timeout(60)
def test_a_pipe_in_its_place_is_waited_for_by_nobody(tmp_path):
    os.mkfifo(tmp_path / "audit.jsonl")
    audit.AuditLog(tmp_path).note("submit")
    audit.AuditLog(tmp_path).bound()
    with pytest.raises(StateError, match="regular file"):
        list(audit.AuditLog(tmp_path).read())


def test_every_way_in_which_a_job_ends_is_noted(tmp_path):
    store = JobStore(tmp_path)
    ids = [store.create(JobSpec("n", "i", 1, ("true",)), inventory=tmp_path / "i", now_s=1.0).id for _ in range(3)]
    end_queued_job(store, store.get(ids[0]).record(), CancelRequest("cancel", "ann", 2.0), now_s=2.0)
    for job, outcome in zip(ids[1:], (State.FAILED, State.QUEUED), strict=True):
        for state in (State.GRANTED, State.PREPARING):
            store.get(job).move(state)
        finish(store, store.get(job).move(State.STOPPING, outcome=outcome, reason="because"), now_s=3.0)
    ends = {
        entry["job"]: (entry["state"], entry["reason"])
        for entry in audit.AuditLog(tmp_path).read()
        if entry["what"] == "end"
    }
    assert ends == dict(
        zip(ids, [("CANCELLED", "cancelled by ann"), ("FAILED", "because"), ("QUEUED", "because")], strict=True)
    )

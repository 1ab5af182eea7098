"""Whoever enters a job of a shared state directory, or reads its log."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from shared_code import INVENTORY, PRELUDE, SUBMIT, needs_root
from users import ALICE, Accounts

from gpurun.state.audit import AuditLog

pytestmark = needs_root


EXEC = (
    PRELUDE
    + """
from dataclasses import replace
from gpurun.jobs.record import State
((lease, lock),) = Allocator(home).run_pass(now_s=2.0).granted
folder = JobStore(home).get(lease.job)
for step in (State.PREPARING, State.STARTING, State.RUNNING):
    folder.move(step, started_s=3.0)
"""
)


@pytest.fixture
def entering(tmp_path):
    """Give a user an account, and an ssh that says how it was called when `gpurun exec` becomes it."""
    folder = tmp_path / "bin"
    folder.mkdir(mode=0o755)
    asked = 'for word; do test "$word" != -G || PATH=${PATH#*:} exec ssh "$@"; done'
    (folder / "ssh").write_text(f'#!/bin/sh\n{asked}\necho "ssh: $*"\n')
    (folder / "ssh").chmod(0o755)
    accounts = Accounts(tmp_path)

    def entering(user, **environ):
        accounts.add(user)
        path = f"{folder}:{os.environ['PATH']}"
        return replace(user, environ={**user.environ, "PATH": path, **environ}, accounts=accounts)

    yield entering
    accounts.close()


def test_who_enters_a_job_leaves_a_line_without_secrets(state, alice, entering):
    job = alice.python(SUBMIT)
    assert alice.python(EXEC) == ""
    done = entering(alice).gpurun("exec", job, "--rank", "1", "--", "sh", "-c", "echo $TOKEN=hunter2")
    assert done.returncode == 0, done.stderr
    assert "hunter2" in done.stdout
    (entry,) = (entry for entry in AuditLog(state).read() if entry["what"] == "exec")
    assert (entry["job"], entry["uid"], entry["owner"], entry["rank"]) == (job, ALICE, f"uid {ALICE}", 1)
    assert entry["program"] == "sh"
    assert "hunter2" not in (state / "audit.jsonl").read_text()


@pytest.mark.parametrize("whose", ["root's", "alice's"])
def test_root_enters_another_s_job_only_with_an_inventory_that_only_root_can_change(
    state, alice, tmp_path, entering, whose
):
    """The record of the job names the inventory, and an inventory can run commands."""
    job = alice.python(SUBMIT)
    assert alice.python(EXEC) == ""
    if whose == "alice's":
        os.chown(tmp_path / "inventory.yaml", ALICE, ALICE)
    root = replace(entering(alice, HOME=str(tmp_path)), uid=0, groups=())
    done = root.gpurun("exec", job, "--", "true")
    lines = [entry["uid"] for entry in AuditLog(state).read() if entry["what"] == "exec"]
    if whose == "alice's":
        assert done.returncode == 2, done.stderr
        assert "users other than root can change" in done.stderr
        assert (done.stdout, lines) == ("", [])
    else:
        assert done.returncode == 0, done.stderr
        assert lines == [0]


def test_a_job_whose_host_was_deleted_from_the_inventory_can_be_entered(alice, tmp_path, entering):
    job = alice.python(SUBMIT)
    assert alice.python(EXEC) == ""
    (tmp_path / "inventory.yaml").write_text(INVENTORY.replace("h[1-2]", "h[8-9]"))
    done = entering(alice).gpurun("exec", job, "--", "true")
    assert done.returncode == 0, done.stderr
    assert "-- h1 docker exec" in done.stdout


def test_a_job_can_be_entered_while_its_inventory_has_a_merge_conflict(alice, tmp_path, entering):
    job = alice.python(SUBMIT)
    stores = """
from pathlib import Path
from gpurun.inventory.read import load_inventory as load
from gpurun.supervisor.links import freeze
freeze(folder, load(Path(lease.inventory)), lease)
"""
    assert alice.python(EXEC + stores) == ""
    (tmp_path / "inventory.yaml").write_text(f"<<<<<<< HEAD\n{INVENTORY}=======\n>>>>>>> theirs\n")
    done = entering(alice).gpurun("exec", job, "--", "true")
    assert done.returncode == 0, done.stderr
    assert "-- h1 docker exec" in done.stdout


HOSTILE_LINE = "x\ra\x1b]0;title\x07b\x1b[2Jcd\u202ee\x9bf\u2028g\ttab 💥"


@pytest.mark.parametrize("stdout", ["terminal", "pipe"])
def test_another_s_log_steers_no_terminal(alice, bob, stdout):
    """In a pipe, too: what reads it, such as `less -R`, may pass it on to a terminal."""
    job = alice.python(SUBMIT.replace("gpus=2", "gpus=100"))
    written = f"2026-01-01T00:00:00.000000000Z o [0]<stdout>:{HOSTILE_LINE}\n"
    assert alice.python(PRELUDE + f"JobStore(home).get('{job}').log.plain.write_bytes({written.encode()!r})") == ""
    if stdout == "pipe":
        shown = bob.gpurun("logs", job).stdout
    else:
        code = "import os, pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'gpurun', 'logs', sys.argv[1]]))"
        shown = bob.run("-c", code, job).stdout
    shown = shown.replace("\r\n", "\n")
    assert "tab 💥" in shown, shown
    assert shown.count("\n") == 1
    assert all(c.isprintable() or c in "\t\n" for c in shown), repr(shown)
    assert "a\\x1b]0;title\\x07b\\x1b[2Jcd\\u202ee\\x9bf\\u2028g" in shown

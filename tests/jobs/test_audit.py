from __future__ import annotations

import json
import sys

import pytest

from gpurun.jobs import audit


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
    audit.note(tmp_path, "cancel", job="j-1", owner="bob")
    (entry,) = audit.read(tmp_path)
    assert entry["user"] != "somebody else"
    assert (entry["what"], entry["sudo_user"], entry["job"], entry["owner"]) == ("cancel", "ann", "j-1", "bob")
    assert (tmp_path / "audit.jsonl").read_text().count("\n") == 1


def test_damaged_lines_are_shown_not_hidden(tmp_path):
    (tmp_path / "audit.jsonl").write_bytes(b'{"what": "submit"}\n\xff\xfe\n[1]\n{"what"\n' + b"[" * 5000 + b"\n")
    assert [entry["what"] for entry in audit.read(tmp_path)] == ["submit", *["damaged"] * 4]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    audit.note(tmp_path, "submit")


def test_nothing_noted_yet(tmp_path):
    assert list(audit.read(tmp_path)) == []


def test_entries_are_json_that_the_command_prints(tmp_path, monkeypatch, capsys):
    from gpurun.cli.main import main

    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    for job in ("j-0000000a", "j-0000000b"):
        audit.note(tmp_path, "submit", job=job, name="x\x1b[2J")
    with pytest.raises(SystemExit):
        main(["audit", "--json", "--job", "j-0000000a"])
    assert [entry["job"] for entry in json.loads(capsys.readouterr().out)["entries"]] == ["j-0000000a"]
    with pytest.raises(SystemExit):
        main(["audit"])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2
    assert "\x1b" not in shown

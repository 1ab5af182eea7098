"""Users who share a state directory: gangs give way, root recovers, the audit log is carried on."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from shared_code import INVENTORY, PRELUDE, SUBMIT, needs_root
from users import ALICE, BOB, GROUP, open_python

from gpurun.state import audit
from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory, append_only

pytestmark = needs_root


def test_a_gang_gives_way_to_another_user_s_by_its_owner_s_own_pass(state, alice, bob, tmp_path):
    """Alice's pass asks; a pass of bob's writes the request to give way, once her waiter lives."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY + "pools:\n  a: {reservation: 4}\n  b: {reservation: 4}\n")
    submit = SUBMIT.replace("gpus=2", "gpus={}, pool='{}', preemptible={}")
    bobs = bob.python(submit.format(8, "b", True))
    assert bob.python(PRELUDE + "print(len(Allocator(home).run_pass(now_s=2.0).granted))") == "1"
    alices = alice.python(submit.format(4, "a", False))
    alice.python(PRELUDE + "Allocator(home).run_pass(now_s=5000.0)")
    assert os.listdir(state / "requests") == [f"{bobs}.{ALICE}"]
    look = PRELUDE + f"Allocator(home).run_pass(now_s=5001.0); print(JobStore(home).get('{bobs}').cancel_request())"
    assert bob.python(look) == "None", "nobody would start alice's job"
    waiter = alice.start(
        "-c", PRELUDE + "from gpurun.leases.look import WaiterLocks\n"
        "held = WaiterLocks(home).take()\nprint('lives', flush=True); time.sleep(60)",
    )  # fmt: skip
    assert waiter.stdout.readline() == "lives\n"
    assert "kind='preempt'" in bob.python(look)
    waiter.kill()
    waiter.communicate()
    alice.python(
        PRELUDE + f"Allocator(home).run_pass(now_s=5002.0); print(JobStore(home).get('{alices}').record().kept)"
    )
    assert os.listdir(state / "requests") == []


def test_root_recovers_for_everybody_as_themselves(state, alice, bob, monkeypatch):
    from gpurun.head import waiter

    job = alice.python(SUBMIT)
    alice.python(PRELUDE + "Allocator(home).run_pass(now_s=2.0)")  # its supervisor was never started
    gone = bob.python(SUBMIT.replace("gpus=2", "gpus=100"))
    account = SimpleNamespace(pw_name="alice", pw_dir=str(alice.home), pw_gid=GROUP)
    monkeypatch.setattr(waiter.pwd, "getpwuid", {ALICE: account}.__getitem__)
    monkeypatch.setattr(waiter.sys, "executable", open_python())
    assert waiter.owners(state) == (ALICE, BOB), gone
    assert waiter.recover_as(ALICE, state, alice.environ).problem == ""
    assert "no account" in waiter.recover_as(BOB, state, bob.environ).problem
    adopted = [(entry["job"], entry["uid"]) for entry in audit.AuditLog(state).read() if entry["what"] == "adopt"]
    assert adopted == [(job, ALICE)]


def test_the_audit_log_begins_anew_by_its_owner_alone(state, alice, bob):
    note = (
        PRELUDE
        + "from gpurun.state import audit\naudit.MAX_BYTES = 1000\n"
        + "for n in range(9): audit.AuditLog(home).note('x', n=n)"
    )
    alice.python(note)
    assert not (state / "audit.1.jsonl").exists()
    audit.AuditLog(state).bound()
    assert not (state / "audit.1.jsonl").exists(), "it is not full"
    before = (state / "audit.jsonl").stat()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(audit, "MAX_BYTES", 1000)
        audit.AuditLog(state).bound()
    assert (state / "audit.1.jsonl").stat().st_ino == before.st_ino
    bob.python(note)
    found = [(entry["uid"], entry["n"]) for entry in audit.AuditLog(state).read()]
    assert found == [(uid, n) for uid in (ALICE, BOB) for n in range(9)]
    if append_only(StatePath(state) / "audit.jsonl", on=True):  # what it was, both are
        for name in ("audit.jsonl", "audit.1.jsonl"):
            with pytest.raises(PermissionError):
                (state / name).open("w")
    append_only(StatePath(state) / "audit.1.jsonl", on=False)


def test_the_command_that_makes_it(tmp_path, monkeypatch, capsys):
    from gpurun.cli.main import main

    for group, code in (("no such group", 2), (str(GROUP), 0)):
        with pytest.raises(SystemExit) as ended:
            main(["share", str(tmp_path / "made"), "--group", group])
        assert ended.value.code == code
    append_only(StatePath(tmp_path / "made") / "audit.jsonl", on=False)
    assert StateDirectory(tmp_path / "made").is_shared()
    assert "getent group" in capsys.readouterr().err


BEGIN = PRELUDE + (
    "from gpurun.studies.campaign_plan import CampaignPlan\n"
    "from gpurun.studies.campaigns import CampaignStore\n"
    "from gpurun.jobs.spec import JobSpec\n"
    "plan = CampaignPlan('{0}', (JobSpec('n', 'i:1', 1, ('train',)),), '/i.yaml', 1, 1.0)\n"
    "print(CampaignStore(home).create(plan, None).id)"
)


def test_each_user_begins_campaigns_and_nobody_removes_anothers_draft(state, alice, bob):
    assert alice.python(BEGIN.format("one")) == "one"
    alice.python(PRELUDE + "(home / 'scaling' / '.new-0a1b2c3d').mkdir()")
    assert bob.python(BEGIN.format("two")) == "two"
    assert sorted(os.listdir(state / "scaling")) == [".new-0a1b2c3d", "one", "two"]
    alice.python(BEGIN.format("three"))
    assert sorted(os.listdir(state / "scaling")) == ["one", "three", "two"]

"""`status` of some jobs, `events` and `requeue`."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from gpurun.jobs.events import EventLog
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.state.audit import AuditLog

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


@pytest.fixture
def store(tmp_path, monkeypatch, nothing_resumes):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    return JobStore(tmp_path / "home")


def made(store, name="train", *, owner=None, state=None, at_s=None):
    spec = JobSpec(name=name, image="i", gpus=2, command=("true",))
    folder = store.create(spec, inventory=store.home.parent / "inventory.yaml", now_s=at_s or time.time())
    changes = {"owner": owner} if owner else {}
    if state is not None:
        changes |= {"state": state, "ended_s": time.time() if state.ended else None}
    folder.write(folder.record().but(**changes))
    if state is not None and state.ended:
        store.retire(folder.id)
    return folder


def test_status_shows_the_jobs_that_are_asked_for(store, gpurun):
    waits, failed = made(store), made(store, state=State.FAILED)
    eves = made(store, "a'; \x1b[2J", owner="eve", state=State.SUCCEEDED)
    many = [made(store, "old", state=State.CANCELLED) for _ in range(12)]

    def shown(*argv):
        document = json.loads(gpurun("status", *argv, "--json")[1])
        assert document["hosts"] == [], "a filter asks for jobs"
        return {job["id"] for job in document["jobs"]}

    assert shown("--user", "eve") == {eves.id}, "though twelve others ended after it"
    assert shown("--state", "failed", "--state", "QUEUED") == {waits.id, failed.id}
    assert shown("--mine", "--user", "eve", "--state", "FAILED") == set()
    assert len(shown("--mine", "--state", "CANCELLED")) == 10
    assert shown("--state", "CANCELLED", "--all") == {job.id for job in many}
    assert shown(waits.id, "@last", waits.id) == {waits.id, many[-1].id}
    out = gpurun("status", "--user", "eve")[1]
    assert eves.id in out and waits.id not in out and "\x1b" not in out and "free" not in out
    assert gpurun("status", "--user", "nobody'; --")[::2] == (
        0, "no job matches; --all also looks at jobs that ended earlier\n"
    )  # fmt: skip
    both = gpurun("status", waits.id, eves.id)[1]
    assert both.index(waits.id) < both.index("\n\n") < both.index(eves.id)
    for wrong in (
        ("--state", "DONE"),
        ("--state", ""),
        (waits.id, "--mine"),
        (waits.id, "--watch"),
        ("--watch", "--mine"),
    ):
        code, out, err = gpurun("status", *wrong)
        assert (code, out) == (2, "") and err, wrong
    assert "the states are QUEUED, " in gpurun("status", "--state", "DONE")[2]


def test_events_tell_each_with_its_time(store, gpurun, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job = made(store, state=State.FAILED)
    log = EventLog(job.events, clock=lambda: 1e9)
    hosts = [{"host": f"h{n}", "gpus": [0, 1]} for n in (1, 2)]
    log.emit("placement", generation="pascal", racks=["r1"], hosts=hosts)
    log.emit("state", state="RUNNING", attempt=2, reason="")
    log.emit("ship", host="h1", state="done", total=3 << 20)
    log.emit("ship", host="h2", state="failed", message="no space\x1b[2J")
    log.emit("host", host="h1", state="cordoned", reason="Xid 79")
    log.emit("notify", to="webhook", event="failed", sent=False, reason="refused")
    log.emit("note", text="its words\nin two lines")
    with job.events.plain.open("ab") as file:
        file.write(b'not json\n{"t": "x", "kind": "placement", "hosts": 3}\n[]\n{"t": 1e400}\n')
    lines = gpurun("events", job.id)[1].splitlines()
    assert {line[:24] for line in lines[:7]} == {"2001-09-09 01:46:40 UTC "}
    assert [line[25:] for line in lines[:7]] == [
        "4 pascal GPUs on h[1-2] (2 each): one rack, r1; "
        "gpurun chose the fewest racks, then the fewest hosts, then the tightest fit",
        "RUNNING (attempt 2)", "h1: image done, 3.0 MiB", "h2: image failed: no space\\x1b[2J",
        "h1: cordoned: Xid 79", "could not send the message 'failed' to webhook: refused", "its words\\nin two lines",
    ]  # fmt: skip
    assert lines[7:] == ["?  placement", "?  None"]
    told = [json.loads(line) for line in gpurun("events", job.id, "--json", "--follow")[1].splitlines()]
    assert told[1] == {
        "time_s": 1e9, "kind": "state", "text": "RUNNING (attempt 2)",
        "details": {"state": "RUNNING", "attempt": 2, "reason": ""},
    }  # fmt: skip
    assert [each["time_s"] for each in told[-2:]] == [None, None]
    assert gpurun("events", made(store, "new").id) == (0, "", "")


def test_events_follow_a_job_to_its_end(store, gpurun, monkeypatch):
    job = made(store)
    log = EventLog(job.events, clock=lambda: 1e9)
    log.emit("note", text="first")

    def later(_):
        log.emit("note", text="last")
        job.write(job.record().but(state=State.FAILED, ended_s=1.0))

    monkeypatch.setattr("gpurun.cli.follow.time.sleep", later)
    assert re.findall(r"first|last", gpurun("events", job.id, "-f")[1]) == ["first", "last"]


def test_requeue_asks_for_what_a_preemption_asks_for(store, gpurun):
    job = made(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=time.time()).granted
    with lock:
        assert gpurun("requeue", "--no-wait", "train")[::2] == (0, f"{job.id} (train): goes back to the queue\n")
        request = job.cancel_request()
        assert (request.kind, request.drain, "put the job back" in request.outcome) == ("preempt", (), True)
        assert [entry["job"] for entry in AuditLog(store.home).read() if entry["what"] == "requeue"] == [job.id]
        job.ask_to_cancel(CancelRequest("cancel", by="me", asked_s=1.0))
        code, _, err = gpurun("requeue", job.id)
        assert code == 2 and "the job is ending: cancelled by me" in err, "a cancel is not weakened"


def test_requeue_waits_until_the_attempt_is_over(store, gpurun, monkeypatch):
    job = made(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=time.time()).granted

    def ends(_):
        job.write(job.record().but(state=State.QUEUED))

    monkeypatch.setattr("gpurun.cli.cancel.time.sleep", ends)
    with lock:
        code, out, err = gpurun("requeue", job.id, job.id, "--json")
    assert (code, err) == (0, f"{job.id} (train): back in the queue, now QUEUED\n")
    assert [each["id"] for each in json.loads(out)["jobs"]] == [job.id]


def test_requeue_refuses_what_has_ended_and_leaves_all_alone_then(store, gpurun, monkeypatch):
    waits, ended = made(store), made(store, "done", state=State.FAILED)
    code, _, err = gpurun("requeue", waits.id, ended.id)
    assert code == 2 and f"gpurun rerun {ended.id}" in err and "in the queue" not in err
    assert gpurun("requeue", waits.id)[::2] == (0, f"{waits.id} is in the queue already\n")
    assert waits.cancel_request() is None
    stops = made(store, "stops", state=State.STOPPING)
    assert "the job is ending: STOPPING" in gpurun("requeue", stops.id)[2]
    monkeypatch.setattr("gpurun.head.spawn.os", type("Os", (), {**vars(os), "getuid": staticmethod(lambda: 4711)}))
    code, _, err = gpurun("requeue", waits.id)
    assert code == 2 and "only the owner and root may put the job back into the queue" in err
    assert f"ask the owner to run: gpurun requeue {waits.id}" in err

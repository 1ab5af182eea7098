"""The supervisor tells a job's targets what happens, and no target delays or fails the job."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gpurun.jobs.record import Restart, State
from gpurun.jobs.spec import NotifyWish, notify_wish
from gpurun.supervisor import telling


def told(job):
    return [json.loads(line) for line in job.folder.events.read_text().splitlines() if '"notify"' in line]


def test_what_was_told_is_in_the_events(carry, tmp_path):
    out = tmp_path / "told"
    job = carry(notify=(notify_wish(f"command:cp /dev/stdin {out}"), notify_wish("end=command:false")))
    (thread,) = telling.tell(job, "start")
    thread.join(20)
    assert json.loads(out.read_text())["event"] == "start"
    (event,) = told(job)
    assert (event["to"], event["event"], event["sent"], event["reason"]) == ("command", "start", True, "")


def test_a_target_that_fails_is_reported_without_its_secret(carry, monkeypatch):
    monkeypatch.setattr(telling, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("https://SECRET")))
    job = carry(notify=(NotifyWish("webhook", "/url"),))
    job.move(State.STOPPING, outcome=State.FAILED)
    job.record = job.record.but(state=State.FAILED)
    telling.tell_end(job)
    (event,) = told(job)
    assert event["sent"] is False
    assert "SECRET" not in json.dumps(event)


@pytest.mark.parametrize(
    ("changes", "events"),
    [
        ({"state": State.SUCCEEDED}, ("end",)),
        ({"state": State.TIMED_OUT}, ("end", "failure")),
        ({"state": State.QUEUED, "restart": Restart(1.0, 2, 3)}, ("failure",)),
        ({"state": State.QUEUED, "restart": Restart(1.0, 2, 5), "placements": 1}, ()),
        ({"state": State.QUEUED, "reason": "preempted: j-1 needs them"}, ("preemption",)),
        ({"state": State.QUEUED, "reason": "its hosts refused"}, ()),
    ],
)
def test_ends_are_the_events_that_people_know(carry, changes, events):
    job = carry()
    assert tuple(telling.events_of(SimpleNamespace(record=job.record.but(**changes)))) == events

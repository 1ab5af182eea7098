"""When a container ended, from Docker's own text."""

from __future__ import annotations

import json
import time

import pytest

from gpurun.node.job import gang


@pytest.mark.parametrize(
    ("stamp", "since_epoch_s"),
    [
        ("1970-01-01T00:00:10.75Z", 10.75),
        ("1970-01-01T00:00:10.123456789Z", 10.123456789),
        ("1970-01-01T00:00:10Z", 10.0),
    ],
)
def test_the_end_of_a_container_is_known_to_the_fraction_of_a_second(monkeypatch, stamp, since_epoch_s):
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert gang._ago_s(stamp) == pytest.approx(100.0 - since_epoch_s)


@pytest.mark.parametrize("stamp", ["", "never", "1970-01-01T00:00:10.5+01:00", "1970-01-01T00:00:10.x", "0001"])
def test_another_text_is_no_time(stamp):
    assert gang._ago_s(stamp) is None


@pytest.mark.parametrize(
    ("status", "code", "said"), [("exited", 70, "read-only"), ("exited", 0, ""), ("running", 0, "")]
)
def test_of_a_container_that_failed_the_host_says_whether_it_could_write(monkeypatch, status, code, said):
    state = {"Status": status, "ExitCode": code, "OOMKilled": False, "Error": "", "StartedAt": "", "FinishedAt": ""}
    found = {"Id": "c", "Name": "/n", "Config": {"Labels": {}}, "HostConfig": {}, "State": state}
    monkeypatch.setattr(gang.docker, "exchange", lambda *_: (200, json.dumps(found).encode()))
    monkeypatch.setattr(gang.folder_facts, "why_unwritable", lambda folder: f"{folder} is read-only")
    unwritable = gang._inspected(None, "j-0a1b2c3d", "c")["unwritable"]
    assert said in unwritable and bool(unwritable) == bool(said)
    assert not unwritable or "/jobs/j-0a1b2c3d/run " in unwritable

"""How far image and data are: it does not grow with time, whatever becomes of the disk, and damage is no traceback."""

from __future__ import annotations

import pytest

from gpurun.content.ship import ShipEvent
from gpurun.errors import StateDiskError
from gpurun.jobs.events import FILE, EventLog, EventTail, Sent, read_sent
from gpurun.jobs.folder import JobFolder
from gpurun.state.paths import StatePath
from gpurun.supervisor import job
from gpurun.supervisor.job import SendingTold


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jobs/j-00000001").mkdir(parents=True)
    return JobFolder(StatePath(tmp_path) / "jobs" / "j-00000001")


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    return now


def a_ship(told, clock, seconds):
    """Three hosts, each of which says four times in a second how far it is, as in the report that led here."""
    for step in range(4 * seconds):
        clock[0] += 0.25
        for host in ("h1", "h2", "h3"):
            state = ("receiving", "loading")[step % 7 == 6]
            told.told("ship", ShipEvent(host, state, step, 4 * seconds, 4.0, seconds - step / 4, step % 7, 7))
    for host in ("h1", "h2", "h3"):
        told.told("ship", ShipEvent(host, "done", 4 * seconds, 4 * seconds))


@pytest.mark.parametrize("seconds", [15, 900])
def test_events_do_not_grow_with_time(folder, clock, seconds):
    a_ship(SendingTold(folder, 1, EventLog(folder.events, clock=lambda: 1.0)), clock, seconds)
    events = list(EventTail(folder.events).new())
    assert [(event["host"], event["state"]) for event in events] == [
        (host, state) for state in ("receiving", "loading", "done") for host in ("h1", "h2", "h3")
    ]


def test_the_newest_word_of_each_host_is_there_a_second_later(folder, clock):
    told = SendingTold(folder, 2, EventLog(folder.events, clock=lambda: 1.0))
    told.told("ship", ShipEvent("h1", "receiving", 1, 10))
    told.told("stage", ShipEvent("h1", "receiving", 2, 20, 1.5, 3.5), "imagenet'; touch x")
    assert read_sent(folder, 2) == (Sent("ship", "h1", state="receiving", bytes=1, total=10),)
    clock[0] += 1.0
    told.told("ship", ShipEvent("h1", "receiving", 9, 10, None, None, 1, 2))
    image, data = read_sent(folder, 2)
    assert (image.bytes, image.layers) == (9, 2)
    assert (data.kind, data.data, data.bytes, data.eta_s) == ("stage", "imagenet'; touch x", 2, 3.5)
    assert read_sent(folder, 1) == read_sent(folder, 3) == (), "another attempt's"


def test_a_full_disk_stops_no_transfer(folder, clock, monkeypatch):
    def fails(*_):
        raise StateDiskError("no space left on device")

    monkeypatch.setattr(job, "write_sent", fails)
    a_ship(SendingTold(folder, 1, EventLog(folder.events, clock=lambda: 1.0)), clock, 3)
    assert read_sent(folder, 1) == ()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"attempt": 1}', b'{"attempt": 1, "sent": [{"host": 7}]}', b"\xff"]
)
def test_a_damaged_file_says_nothing(folder, damage):
    (folder.path / FILE).plain.write_bytes(damage)
    assert read_sent(folder, 1) == ()

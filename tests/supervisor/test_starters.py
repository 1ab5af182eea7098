"""A launcher that every rank starts is named while the gang runs."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.jobs.events import MOST_WARNINGS, EventLog, warnings_of
from gpurun.jobs.spec import JobSpec
from gpurun.state.paths import StatePath
from gpurun.supervisor import health
from gpurun.supervisor.health import NAMES, StarterWatch, is_watched, warning_of_starters

SPEC = JobSpec("n", "i", 4, ("python3", "train.py"), launcher="tasks")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"gpus": 1}, False), ({"one_per_host": True}, False), ({"command": ("torchrun", "train.py")}, False),
     ({"command": ("sh", "-c", "cd x; torchrun train.py")}, False), ({"command": ("srun", "--nosuch", "x")}, False),
     ({"command": ("./run",)}, True)],
)  # fmt: skip
def test_a_gang_whose_ranks_may_start_a_launcher_is_not_watched(changes, expected):
    assert is_watched(replace(SPEC, **changes)) is expected


def job_of(answers, notes):
    links = SimpleNamespace(is_open=lambda _: True, each=lambda _, hosts: SimpleNamespace(ok=answers.pop(0)))
    return SimpleNamespace(
        spec=SPEC, hosts=["a", "b"], links=links, lease=SimpleNamespace(job="j-1"), record=SimpleNamespace(attempt=2),
        note=lambda text, **fields: notes.append((text, fields)),
    )  # fmt: skip


def test_it_is_said_once_with_the_ranks_of_all_hosts(monkeypatch):
    monkeypatch.setattr(health, "FIRST_LOOK_S", 0.0)
    which, notes = next(at for at, (_, words) in enumerate(NAMES) if words == ["torchrun"]), []
    found = {"a": [{"rank": 0, "which": which}], "b": [{"rank": 1, "which": which}]}
    answers = [{}, {"a": [], "b": []}, found, found]
    StarterWatch(job_of(answers, notes), threading.Event())._follow()
    assert answers == [found] and len(notes) == 1
    assert notes[0][0].startswith("2 ranks each started torchrun itself") and notes[0][1] == {"warning": 2}
    assert "--one-per-host" in warning_of_starters(1, "torchrun") and warning_of_starters(1, "torchrun").startswith(
        "a rank started"
    )


def test_a_host_that_lies_names_a_launcher_that_there_is():
    notes = []
    assert StarterWatch(job_of([{"a": [{"rank": 5, "which": 9999}]}], notes), threading.Event()).look()
    assert notes and NAMES[-1][0] in notes[0][0]


def test_it_looks_only_a_few_times(monkeypatch):
    monkeypatch.setattr(health, "FIRST_LOOK_S", 0.0)
    answers, notes = [{} for _ in range(health.LOOKS)], []
    StarterWatch(job_of(answers, notes), threading.Event())._follow()
    assert answers == notes == []
    assert StarterWatch(SimpleNamespace(spec=replace(SPEC, gpus=1)), threading.Event()).threads() == []


def test_status_has_the_warnings_of_the_last_attempt(tmp_path):
    path = StatePath(tmp_path) / "events.jsonl"
    (tmp_path / "events.jsonl").touch()
    log = EventLog(path, clock=lambda: 1.0)
    log.emit("note", text="of before", warning=1)
    for text in ("now", "now", *(f"more {n}" for n in range(MOST_WARNINGS))):
        log.emit("note", text=text, warning=2)
    log.emit("note", text="no warning")
    log.emit("note", text="more", warning=3, lines=["a", 7])
    log.emit("note", text="odd", warning=3, lines="a")
    log.emit("state", text="x", warning=2)
    found = warnings_of(path, 2)
    assert list(found)[:2] == ["now", "more 0"] and len(found) == MOST_WARNINGS
    assert warnings_of(path, 1) == {"of before": []} and warnings_of(path, 4) == {}
    assert warnings_of(path, 3) == {"more": ["a", "7"], "odd": []}

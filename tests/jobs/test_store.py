from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput, StateDiskError, StateError
from gpurun.jobs.events import EventLog, EventTail
from gpurun.jobs.record import ENDED, WAYS, CancelRequest, JobRecord, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, LiveJob, finish
from gpurun.state import durable
from gpurun.state.paths import StatePath, home

SPEC = JobSpec(name="a'; touch /tmp/x #", image="i", gpus=2, command=("echo", "a b\n'\"", "ü"), env={"K": "v\n"})


@pytest.fixture
def store(tmp_path):
    return JobStore(tmp_path / "state dir")


def create(store, **changes):
    return store.create(replace(SPEC, **changes), inventory=store.home / "inventory.yaml", now_s=1.0)


def test_what_is_stored_comes_back(store):
    folder = create(store)
    assert folder.spec() == SPEC
    assert folder.record().state is State.QUEUED
    assert store.ids() == store.live_ids() == (folder.id,)
    assert not [name for name in store.folder.names() if name.startswith(".")]


def test_only_known_ways(store):
    folder = create(store)
    with pytest.raises(StateError, match="cannot change from QUEUED to RUNNING"):
        folder.move(State.RUNNING)
    for state in (State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING, State.FAILED):
        assert folder.move(state).state is state
    with pytest.raises(StateError):
        folder.move(State.QUEUED)


def test_every_state_leads_to_an_end():
    for start in State:
        reached, todo = set(), [start]
        while todo:
            state = todo.pop()
            if state not in reached:
                reached.add(state)
                todo.extend(WAYS[state])
        assert reached & ENDED


def test_a_job_is_found_by_id_beginning_or_name(store):
    older, newer = create(store), store.create(SPEC, inventory=store.home, now_s=2.0)
    assert store.find(older.id).id == older.id
    assert store.find(older.id[:9]).id == older.id
    for folder in (older, newer):
        folder.write(folder.record().but(state=State.FAILED))
    assert store.find(SPEC.name).id == newer.id
    for text in ("", "nope", "../..", "j-", "*"):
        with pytest.raises(BadInput):
            store.find(text)


def test_a_cancel_is_never_weakened(store):
    folder = create(store)
    folder.ask_to_cancel(CancelRequest("preempt", "scheduler", 1.0))
    folder.ask_to_cancel(CancelRequest("cancel", "me", 2.0))
    folder.ask_to_cancel(CancelRequest("preempt", "scheduler", 3.0))
    assert folder.cancel_request().kind == "cancel"


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"id": 1}', b"9" * 5000, b"[" * 100000])
def test_a_damaged_record_is_reported_not_hidden(store, damage):
    folder = create(store)
    (folder.path / "state.json").plain.write_bytes(damage)
    with pytest.raises(StateError) as caught:
        folder.record()
    assert "state.json" in str(caught.value)
    damaged = []
    assert list(store.records(damaged.append)) == []
    assert len(damaged) == 1


def test_a_flipped_bit_in_a_text_is_reported(store):
    """JSON all right, UTF-8 no more."""
    path = create(store).path / "state.json"
    path.plain.write_bytes(
        path.read_bytes().replace(b'"pool"', b'"p\xefol"').replace(b'"reason": ""', b'"reason": "\xe3"')
    )
    with pytest.raises(StateError, match="is not a valid JobRecord"):
        durable.read_record(path, JobRecord)


@pytest.mark.parametrize("name", ["j-00000000", "../../x", "\0", ""])
def test_a_record_that_names_another_job_is_reported(store, name):
    folder = create(store)
    durable.write_record(folder.path / "state.json", folder.record().but(id=name))
    with pytest.raises(StateError, match=r"must contain the state of .*, but contains the state of"):
        folder.record()


def test_a_disk_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(StatePath, "reader", lambda _, **__: open("/proc/self/mem", "rb", buffering=0))  # noqa: PTH123, SIM115 (closed by the reader)
    with pytest.raises(StateDiskError, match="cannot be read: the disk of the state directory failed"):
        durable.read_record(StatePath(Path("/home")) / "state.json", JobRecord)


@given(data=st.binary(max_size=300))
@examples("files of any bytes")
def test_no_bytes_are_a_traceback(tmp_path_factory, data):
    path = StatePath(tmp_path_factory.mktemp("fuzz")) / "state.json"
    path.plain.write_bytes(data)
    with pytest.raises(StateError):
        durable.read_record(path, JobRecord)


def test_a_write_that_fails_leaves_the_old_file(store, monkeypatch):
    folder = create(store)
    before = (folder.path / "state.json").read_bytes()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateDiskError, match="disk of the state directory is full"):
        folder.move(State.GRANTED)
    assert (folder.path / "state.json").read_bytes() == before
    assert not [name for name in folder.path.names() if name.endswith(".tmp")]


def test_a_job_is_there_after_a_power_loss(store, monkeypatch):
    """Every folder that `create` makes or puts a name in is synced after that, up to one that was there before."""
    names, synced, fsync = {}, [], os.fsync

    def remembered(descriptor):
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if Path(path).is_dir():
            synced.append(path)
            names[path] = set(os.listdir(path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remembered)
    folder = create(store)
    assert store.home.name in names[str(store.home.parent)]
    assert {"jobs", "live"} <= names[str(store.home)]
    assert folder.id in names[str(store.live)]
    assert folder.id in names[str(store.folder)]
    assert {"spec.json", "state.json"} <= next(found for path, found in names.items() if ".new-" in path)
    assert synced[-1] == str(store.folder)


def test_events_are_read_once_and_whole(store):
    folder = create(store)
    log, tail = EventLog(folder.events, clock=lambda: 5.0), EventTail(folder.events)
    assert list(tail.new()) == []
    log.emit("note", text="a\nb ü")
    assert [event["text"] for event in tail.new()] == ["a\nb ü"]
    with folder.events.plain.open("ab") as stream:
        stream.write(b'not json\n[1]\n{"t": 1, "kind": "half')
    assert list(tail.new()) == []
    with folder.events.plain.open("ab") as stream:
        stream.write(b'"}\n')
    assert [event["kind"] for event in tail.new()] == ["half"]


def test_home(tmp_path):
    assert home({"GPURUN_HOME": "/x"}) == home({"GPURUN_HOME": "/x", "HOME": "/y"})
    assert str(home({"HOME": "/y"}, system_home=tmp_path / "none")) == "/y/.local/state/gpurun"
    assert str(home({"HOME": "/y", "XDG_STATE_HOME": "/z"}, system_home=tmp_path / "none")) == "/z/gpurun"
    assert home({"HOME": "/y"}, system_home=tmp_path) == tmp_path


def test_records_are_plain_json(store):
    folder = create(store)
    assert json.loads((folder.path / "state.json").read_text())["state"] == "QUEUED"


def test_a_cancelled_job_is_not_queued_again(store):
    folder = create(store)
    for state in (State.GRANTED, State.PREPARING):
        folder.move(state)
    record = folder.move(State.STOPPING, outcome=State.QUEUED)
    folder.ask_to_cancel(CancelRequest("cancel", "me", 1.0))
    assert finish(store, record, now_s=2.0).state is State.CANCELLED
    assert store.live_ids() == ()


def test_a_preemption_at_the_same_moment_takes_no_cancel_with_it(store, monkeypatch):
    """A pass asks the gang to give way, or its end is noted, just when somebody cancels it."""
    folder = create(store)
    for name in ("write_record", "remove_file"):
        real = getattr(durable, name)

        def cancelled_first(*args, name=name, real=real):
            monkeypatch.setattr(durable, name, real)
            folder.ask_to_cancel(CancelRequest("cancel", "me", 2.0))
            return real(*args)

        folder.path.plain.joinpath("cancel.json").unlink(missing_ok=True)
        monkeypatch.setattr(durable, name, cancelled_first)
        folder.ask_to_cancel(CancelRequest("preempt", "scheduler", 1.0))
        folder.clear_preemption()
        assert folder.cancel_request() == CancelRequest("cancel", "me", 2.0)


def test_a_request_under_the_wrong_name_is_none(store):
    folder = create(store)
    durable.write_record(folder.path / "preempt.json", CancelRequest("cancel", "me", 2.0))
    assert folder.cancel_request() is None
    assert "a request of the wrong kind" in folder.mend_request()


def damage_request(folder, thing, name="cancel.json"):
    path = folder.path.plain / name
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "folder":
        (path / "in it").mkdir(parents=True)
    elif thing == "link to itself":
        path.symlink_to(path)
    else:
        path.write_bytes(thing)


DAMAGED_REQUESTS = [b"", b'{"kind": "can', b"\0" * 99, b'{"kind": "odd", "by": "", "asked_s": 1}', "pipe", "folder",
                    "link to itself"]  # fmt: skip


@pytest.mark.parametrize("name", ["cancel.json", "preempt.json"])
@pytest.mark.parametrize("thing", DAMAGED_REQUESTS)
def test_a_damaged_request_is_none_and_is_named_and_kept(store, thing, name):
    folder = create(store)
    damage_request(folder, thing, name)
    assert folder.cancel_request() is None
    assert name in folder.damaged_request().where
    said = folder.mend_request()
    (aside,) = [path.name for path in folder.path.plain.iterdir() if ".damaged-" in path.name]
    assert aside in said
    assert (folder.damaged_request(), folder.mend_request()) == (None, None)


def test_a_sound_request_that_comes_while_a_damaged_one_is_set_aside_is_kept(store, monkeypatch):
    folder = create(store)
    damage_request(folder, b"torn")
    set_aside = durable.set_aside

    def replaced_just_before(path):
        path.unlink()
        durable.write_record(path, CancelRequest("cancel", "me", 2.0))
        return set_aside(path)

    monkeypatch.setattr(durable, "set_aside", replaced_just_before)
    assert folder.mend_request() is None
    assert folder.cancel_request().by == "me"
    assert not [path for path in folder.path.plain.iterdir() if ".damaged-" in path.name]


@pytest.mark.parametrize("thing", DAMAGED_REQUESTS)
def test_a_job_whose_request_is_damaged_can_be_cancelled(store, thing):
    folder = create(store)
    damage_request(folder, thing)
    folder.ask_to_cancel(CancelRequest("cancel", "me", 2.0))
    assert folder.cancel_request().by == "me"


@pytest.mark.parametrize("name", ["cancel.json", "preempt.json"])
@pytest.mark.parametrize("thing", DAMAGED_REQUESTS)
def test_a_job_whose_request_is_damaged_ends_as_it_was_decided(store, thing, name):
    folder = create(store)
    for state in (State.GRANTED, State.PREPARING, State.STOPPING):
        record = folder.move(state, outcome=State.QUEUED)
    damage_request(folder, thing, name)
    assert finish(store, record, now_s=9.0).state is State.QUEUED


def test_a_job_leaves_the_live_ones_only_when_its_end_is_safe_from_a_power_cut(store, monkeypatch):
    """Who wrote that it has ended may have been killed between the rename and the sync."""
    folder = create(store)
    synced = []
    monkeypatch.setattr(durable, "sync_folder", lambda path: synced.append((path, folder.id in store.live_ids())))
    store.retire(folder.id)
    assert synced == [(folder.path, True)]
    assert store.live_ids() == ()
    store.retire("j-00000000")


def test_live_jobs_come_with_spec_and_request(store):
    first, second, ended = create(store), create(store, gpus=4), create(store)
    second.ask_to_cancel(CancelRequest("cancel", "me", 2.0))
    store.retire(ended.id)
    (store.live / "j-00000000").touch()
    problems = []
    assert store.live_jobs(problems.append) == {
        first.id: LiveJob(first.record(), SPEC.wants, None),
        second.id: LiveJob(second.record(), replace(SPEC, gpus=4).wants, CancelRequest("cancel", "me", 2.0)),
    }
    assert problems == []


@pytest.mark.parametrize("damage", [None, b"", b"{", b"null", b'{"name": "n"}', b"\xff\xfe", b"[" * 100000])
@pytest.mark.parametrize("file", ["spec.json", "state.json"])
def test_a_live_job_with_a_damaged_file_is_reported(store, file, damage):
    """Without its spec a job has no constraints, so it must not look like a job that may run anywhere."""
    folder, other = create(store), create(store)
    (folder.path / file).unlink()
    if damage is not None:
        (folder.path / file).plain.write_bytes(damage)
    problems = []
    jobs = store.live_jobs(problems.append)
    assert jobs[other.id].wants == SPEC.wants
    assert jobs.get(folder.id) == (LiveJob(folder.record(), None, None) if file == "spec.json" else None)
    assert [problem.where for problem in problems] == [str(folder.path / file)]


@pytest.mark.parametrize("thing", DAMAGED_REQUESTS)
def test_a_damaged_request_of_a_live_job_is_reported_and_is_none(store, thing):
    folder = create(store)
    damage_request(folder, thing)
    problems = []
    assert store.live_jobs(problems.append)[folder.id].request is None
    assert [problem.where for problem in problems] == [str(folder.path / "cancel.json")]

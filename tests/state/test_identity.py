"""A state directory's id: one for everybody, made once, never guessed from what is damaged."""

from __future__ import annotations

import os
import threading

import pytest

from gpurun.errors import StateError, StateUnavailable
from gpurun.state import durable
from gpurun.state.sharing import FILE, StateDirectory


def test_it_is_made_once_and_stays(tmp_path):
    home = tmp_path / "a" / "b"
    assert StateDirectory(home).known_id() is None
    made = StateDirectory(home).id()
    assert len(made) == 16
    assert StateDirectory(home).id() == StateDirectory(home).known_id() == made
    assert StateDirectory(tmp_path / "other").id() != made
    assert os.listdir(home) == [FILE]


def test_a_machine_that_is_short_is_told_what_to_raise_and_not_to_ask_the_owner(tmp_path, monkeypatch):
    def short(*_):
        raise StateUnavailable("too many open files", hint="raise the limit: ulimit -n")

    monkeypatch.setattr(durable, "write_record", short)
    with pytest.raises(StateUnavailable) as told:
        StateDirectory(tmp_path).id()
    assert told.value.hint == "raise the limit: ulimit -n"


def test_all_that_ask_at_once_get_the_same(tmp_path):
    found, start = [], threading.Barrier(8)

    def ask():
        start.wait()
        found.append(StateDirectory(tmp_path).id())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3}', '{"id": ""}', '{"id": "../../x\\n"}', "\0" * 99])
def test_a_damaged_one_is_an_error_that_says_what_to_do(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StateError) as caught:
        StateDirectory(tmp_path).id()
    assert FILE in str(caught.value)
    assert caught.value.hint.startswith("remove")
    assert (tmp_path / FILE).read_text() == text


def test_what_is_no_file_is_an_error(tmp_path):
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(StateError):
        StateDirectory(tmp_path).id()
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(StateError):
        StateDirectory(tmp_path).id()

"""New folders appear whole, and what a killed process left of one goes when the next one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpurun.errors import StateError
from gpurun.state import caches, locks
from gpurun.state.caches import new_folder
from gpurun.state.paths import StatePath

MAKES = """\
import sys, time
from pathlib import Path
from gpurun.state.caches import new_folder
from gpurun.state.paths import StatePath
with new_folder(StatePath(Path(sys.argv[1])) / "all") as draft:
    (draft / "file").touch()
    (draft / "folder").mkdir()
    print("made", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "all").mkdir()
    return StatePath(tmp_path) / "all"


def another_makes_one(home: Path) -> subprocess.Popen[str]:
    """A process that is about to fill its draft."""
    process = subprocess.Popen([sys.executable, "-c", MAKES, str(home)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def test_a_folder_appears_whole_and_nothing_else_is_left(parent):
    with new_folder(parent) as draft:
        (draft / "file").touch()
        draft.rename(parent / "one")
    assert parent.names() == ["one"] and (parent / "one").names() == ["file"]


def test_one_that_fails_leaves_nothing(parent):
    with pytest.raises(KeyError), new_folder(parent) as draft:
        (draft / "file").touch()
        raise KeyError
    assert parent.names() == []


def test_the_draft_of_a_killed_process_goes_and_that_of_a_live_one_stays(parent):
    killed, lives = another_makes_one(parent.home), another_makes_one(parent.home)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(parent.names()) == 4
        with new_folder(parent) as draft:
            draft.rename(parent / "one")
        left = sorted(parent.names())
        assert len(left) == 3 and left[2] == "one" and (parent / left[0]).names()
    finally:
        lives.kill()
        lives.wait()


def test_a_draft_without_a_lock_and_a_lock_without_a_draft_go(parent):
    """What a crash left between two steps, or an earlier gpurun."""
    (parent / ".new-1").mkdir()
    (parent / ".new-2.lock").touch()
    with new_folder(parent):
        assert len(parent.names()) == 2


def test_what_is_not_this_users_or_cannot_be_removed_hinders_nobody(parent, monkeypatch):
    (parent / ".new-link").plain.symlink_to("/")
    (parent / ".new-1").mkdir()
    (parent / ".new-2").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with new_folder(parent):
            pass
    assert {".new-1", ".new-2"} <= set(parent.names())
    real = StatePath.rmtree

    def refused(path: StatePath) -> None:
        if path.name == ".new-1":
            raise StateError("cannot be removed", where=str(path))
        real(path)

    monkeypatch.setattr(StatePath, "rmtree", refused)
    with new_folder(parent):
        pass
    assert ".new-1" in parent.names() and ".new-2" not in parent.names()


def test_a_lock_that_another_removes_before_it_is_held_is_made_again(parent, monkeypatch):
    real, stolen = locks.try_take, []

    def late(descriptor: int) -> bool:
        if not stolen:
            stolen.append(descriptor)
            (path,) = parent.names()
            (parent / path).unlink()
        return real(descriptor)

    monkeypatch.setattr(caches.locks, "try_take", late)
    with new_folder(parent) as draft:
        assert sorted(parent.names()) == [draft.name, f"{draft.name}.lock"]


def test_many_at_once_do_not_take_each_others_drafts(parent):
    problems = []

    def make(number: int) -> None:
        try:
            for turn in range(20):
                with new_folder(parent) as draft:
                    (draft / "file").touch()
                    draft.rename(parent / f"{number}-{turn}")
        except (OSError, StateError) as error:
            problems.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and len(parent.names()) == 160

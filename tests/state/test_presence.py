"""Which state directory a process began with, and whether it comes back."""

from __future__ import annotations

import os
import shutil

import pytest

from gpurun.errors import StateUnavailable
from gpurun.state import clock
from gpurun.state.clock import Presence


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def held(home):
    descriptor = os.open(home / "lock", os.O_CREAT | os.O_RDWR)
    yield lambda: descriptor
    os.close(descriptor)


def test_one_that_comes_back_is_the_same(home, held):
    here = Presence(home, held)
    here.check()
    home.rename(home.with_name("away"))
    for _ in range(2):
        with pytest.raises(StateUnavailable, match="does not exist"):
            here.check()
    home.with_name("away").rename(home)
    here.check()
    assert not here.is_away() and not here.is_gone()


@pytest.mark.parametrize("make", [lambda at: at.mkdir(), lambda at: at.touch(), lambda at: at.symlink_to(at.parent)])
def test_another_in_its_place_is_not_the_one(home, held, make):
    here = Presence(home, held)
    home.rename(home.with_name("away"))
    make(home)
    assert here.is_away()


def test_a_link_to_it_is_the_one(home, held):
    here = Presence(home, held)
    home.rename(home.with_name("away"))
    home.symlink_to("away")
    here.check()


def test_a_removed_one_is_gone_at_once(home, held):
    here = Presence(home, held)
    shutil.rmtree(home)
    assert here.is_gone()
    with pytest.raises(FileNotFoundError, match="is gone"):
        here.check()


@pytest.mark.parametrize("descriptor", [None, -1])
def test_without_a_held_file_one_is_gone_after_a_while(home, monkeypatch, own_copy, descriptor):
    now = [1.0]
    own_copy(clock, "time", monotonic=lambda: now[0])
    here = Presence(home, None if descriptor is None else lambda: descriptor)
    shutil.rmtree(home)
    assert here.is_away()
    now[0] += clock.AWAY_MOST_S - 1
    assert here.is_away()
    now[0] += 1
    assert here.is_gone() and not here.is_away()


def test_one_that_does_not_answer_is_there(home, monkeypatch):
    """Whoever uses it meets the error, and waits for it as long as it takes."""
    here = Presence(home)

    def stale(*_, **__):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(type(home), "stat", stale)
    here.check()

"""What `gpurun recover` says that it has restarted, and for whom."""

from __future__ import annotations

import json
import os

import pytest

from gpurun.head import spawn, waiter
from gpurun.head.waiter import Recovered
from gpurun.state.paths import user_name

ME = user_name(os.getuid())
HOSTILE = "bo\x1b[31mb"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(spawn.Head, "adopt_orphans", lambda *_: ("j-00000001", "j-00000002"))
    monkeypatch.setattr("gpurun.head.waiter.Waiter.is_needed", lambda *_: True)
    monkeypatch.setattr(spawn.Head, "ensure_waiter", lambda *_: True)
    return tmp_path / "home"


@pytest.fixture
def others(monkeypatch):
    """What root's recovery of two other users did: for the one something, for the other nothing."""
    done = [Recovered(HOSTILE, ("j-0000000b",)), Recovered("carol"), Recovered("dave", problem="dave: no shell")]
    monkeypatch.setattr("gpurun.cli.recover._recover_others", lambda *_: done)


def test_what_was_restarted_is_named_with_its_owner(gpurun, home, others):
    code, out, err = gpurun("recover")
    said = out + err
    assert code == 0
    assert f"restarted for {ME}: the supervisor of j-00000001, the supervisor of j-00000002, the waiter" in said
    assert "the supervisor of j-0000000b" in said and "\x1b" not in said
    assert "carol" not in said and "not recovered: dave: no shell" in said


def test_scripts_read_the_same(gpurun, home, others):
    said = json.loads(gpurun("recover", "--json")[1])
    assert (said["adopted"], said["waiter"]) == (["j-00000001", "j-00000002"], True)
    assert said["others"] == [{"user": HOSTILE, "adopted": ["j-0000000b"], "waiter": False}]


def test_nothing_is_said_of_a_waiter_that_lived(gpurun, home, monkeypatch):
    monkeypatch.setattr(spawn.Head, "adopt_orphans", lambda *_: ())
    monkeypatch.setattr(spawn.Head, "ensure_waiter", lambda *_: False)
    code, out, err = gpurun("recover")
    assert code == 0 and "gpurun had nothing to restart" in out + err


def test_only_root_of_a_shared_directory_recovers_others(home, monkeypatch):
    monkeypatch.setattr(waiter, "recover_as", lambda *_: pytest.fail("somebody else's"))
    from gpurun.cli.recover import _recover_others

    assert _recover_others(home, ()) == []


@pytest.mark.parametrize("words", [(), ("--by-timer",)])
def test_a_state_directory_that_is_away_is_not_made_anew_by_the_timer(gpurun, tmp_path, monkeypatch, words):
    """It could not be moved back, and what lives on would take it for another one's."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "away" / "home"))
    code, out, err = gpurun("recover", *words)
    assert (code, out, "gpurun had nothing to restart" in err) == (0, "", True)
    assert list(tmp_path.glob("away*")) == []

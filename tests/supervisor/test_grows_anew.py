"""An elastic gang that cannot take in hosts: when it is ended to be formed again, and as what."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from gpurun.errors import BadInput, StateDiskError, words_of
from gpurun.head import children
from gpurun.jobs.record import FirstFailure, State
from gpurun.jobs.spec import Constraints
from gpurun.state.hosts import Cordon, Cordons, Machine, Machines, Out
from gpurun.supervisor import watch as grows_anew
from gpurun.supervisor.elastic import Members
from gpurun.supervisor.life import _another, _stopping
from gpurun.supervisor.verdict.ends import MOST_FRUITLESS, End
from gpurun.supervisor.watch import GrowsAnew, patience_s

FOUR_OF_SIX = {"launcher": "tasks", "gpus": 6, "min_gpus": 4, "reforms": True}


@pytest.fixture
def gang(carry, tmp_path):
    """A gang that wants three hosts and has two, because two were out of use; it failed there, has run and saved."""
    with Cordons(tmp_path).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "alice", 0.0, "fan") for host in ("h3", "h4")})
    job = carry(**FOUR_OF_SIX, constraints=Constraints(gpus_per_host=2))
    with Cordons(tmp_path).changing() as cordons:
        cordons.clear()
    job.amend(avoid=("h3", "h4"), checkpoint_s=3.0)
    return job


def watch(job, *, ran_s=1e6):
    growth = GrowsAnew(job, threading.Event())
    growth._begun_s -= ran_s
    return growth


def test_each_attempt_has_the_size_that_was_granted(carry):
    job = carry(**FOUR_OF_SIX)
    assert (job.spec.gpus, job.spec.min_gpus, job.record.gpus) == (6, None, 6)
    assert watch(job).threads() == [], "it has all it asked for"
    assert not job.seating.most


def test_it_is_ended_once_it_could_be_larger_and_the_hosts_it_failed_on_count_again(gang):
    growth = watch(gang)
    assert len(growth.threads()) == 1
    assert growth._is_time() and growth._ask()
    request = gang.folder.cancel_request()
    assert (request.kind, request.by) == ("preempt", "its growth")
    assert "starts the job again with 6 GPUs" in request.reason
    assert len(set(gang.folder.record().avoid)) == 1, "the host that it does not need stays avoided"


@pytest.mark.parametrize(
    ("ran_s", "checkpoint_s", "is_time"),
    [(59.0, 3.0, False), (61.0, 3.0, True), (61.0, None, False), (61.0, 1.0, False)],
)
def test_it_has_run_for_a_minute_and_saved_since_it_started(gang, ran_s, checkpoint_s, is_time):
    gang.amend(checkpoint_s=checkpoint_s)
    assert watch(gang, ran_s=ran_s)._is_time() is is_time


def test_an_end_that_was_asked_for_stays_as_it_is(gang):
    growth = watch(gang)
    assert growth._ask()
    first = gang.folder.cancel_request()
    assert not growth._ask() and gang.folder.cancel_request() == first


def test_it_stays_as_it_is_while_nothing_is_to_be_had(gang, tmp_path):
    with Cordons(tmp_path).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "alice", 0.0, "fan") for host in ("h3", "h4")})
    assert not watch(gang)._ask()
    assert gang.folder.cancel_request() is None
    assert gang.folder.record().avoid == ("h3", "h4")


def test_a_hosts_fault_does_not_count_as_a_restart_that_a_recipe_allows(gang):
    lost = End(State.FAILED, "h1 is lost", 4, failure=FirstFailure("h1 is lost", kind="host-lost"), suspects=("h1",))
    assert gang.spec.max_restarts == 0
    assert _stopping(gang, lost) is State.STOPPING
    assert gang.folder.record().restart.attempt == 2


def test_a_program_that_fails_is_not_started_again(gang):
    wrong = End(State.FAILED, "rank 0 exited with 3", 4, failure=FirstFailure("rank 0 exited with 3", exit_code=3))
    assert _stopping(gang, wrong) is State.STOPPING
    assert gang.folder.record().restart is None


def test_hosts_that_fail_again_and_again_cost_less_each_time():
    assert [patience_s(n) for n in (0, 1, 2, 3, 7, 99)] == [60.0, 60.0, 120.0, 240.0, 3600.0, 3600.0]


def test_hosts_that_fail_before_anything_is_achieved_end_it_at_last_and_a_checkpoint_forgives(gang):
    """A gang that brings its hosts down must not go through the whole cluster."""
    lost = End(State.FAILED, "h1 is lost", 4, failure=FirstFailure("h1 is lost", kind="host-lost"), suspects=("h1",))
    gang.amend(checkpoint_s=None)
    for number in range(1, MOST_FRUITLESS):
        _, restart, setback = _another(gang, lost)
        assert restart is not None and setback.fruitless == number
        gang.amend(setback=setback)
    end, restart, _ = _another(gang, lost)
    assert restart is None
    assert end.reason == "h1 is lost; hosts failed 5 times in a row, and the job made no progress in between"
    gang.amend(checkpoint_s=3.0)
    _, restart, setback = _another(gang, lost)
    assert restart is not None and setback.fruitless == 0
    assert restart.words(0.0).endswith("(attempt 2)")


AWAY = [
    FileNotFoundError(errno.ENOENT, "is away"), OSError(errno.EMFILE, "too many"), StateDiskError("full"),
    RuntimeError("can't start new thread"), MemoryError(),
]  # fmt: skip


@pytest.mark.parametrize("error", AWAY)
def test_a_look_that_fails_is_told_once_and_not_the_last(gang, monkeypatch, error):
    growth = watch(gang)
    answers, notes = [error, error], []

    def ask():
        if answers:
            raise answers.pop()
        return True

    monkeypatch.setattr(grows_anew, "LOOK_S", 0.0)
    monkeypatch.setattr(growth, "_ask", ask)
    monkeypatch.setattr(gang, "note", notes.append)
    growth._look()
    assert answers == []
    assert notes == [f"the job cannot get more GPUs yet: {words_of(error)}"]


def edit(folder, old, new):
    path = folder / "inventory.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_it_is_formed_again_with_the_hosts_that_the_inventory_has_now(gang, tmp_path):
    """Weeks after its start: h3 and h4 were given to others, and h5 was bought."""
    edit(tmp_path, '"h[1-4]"', '"h[1-2]": {}, "h5"')
    assert watch(gang)._ask()
    request = gang.folder.cancel_request()
    assert "h5" in request.reason and "h3" not in request.reason and "h4" not in request.reason


def test_it_does_not_grow_while_its_inventory_cannot_be_loaded(gang, tmp_path):
    assert gang.inventory is not None
    edit(tmp_path, '"h[1-4]"', '<<<<<<< "h[1-2]"')
    with pytest.raises(BadInput):
        watch(gang)._ask()
    assert gang.folder.cancel_request() is None
    assert {host.name for host in gang.inventory.hosts} >= {*gang.hosts}, "its own hosts are known all the same"


@pytest.mark.parametrize("changed", ['"h[1-2]": {}, "h5"', '<<<<<<< "h[1-2]"'])
def test_an_elastic_gang_takes_hosts_that_the_inventory_has_now(carry, tmp_path, monkeypatch, changed):
    with Cordons(tmp_path).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "alice", 0.0, "fan") for host in ("h3", "h4")})
    job = carry(gpus=6, min_gpus=2, constraints=Constraints(gpus_per_host=2))
    assert job.hosts == ("h1", "h2") and job.inventory is not None
    with Cordons(tmp_path).changing() as cordons:
        cordons.clear()
    edit(tmp_path, '"h[1-4]"', changed)
    members, joined = Members(job, threading.Event(), on_join=lambda _: None), []
    monkeypatch.setattr(members, "_bring_in", joined.append)
    if "<" not in changed:
        assert members._take_and_bring_in()
        assert joined == [("h5",)] and job.hosts == ("h1", "h2", "h5")
    else:
        with pytest.raises(BadInput):
            members._take_and_bring_in()
        assert not joined and job.hosts == ("h1", "h2")


def go_out(home, inventory, *hosts):
    """A check found these hosts broken a while ago; since then nobody has looked: no waiter lives, and no timer."""
    out = Out("ssh", "no route to host", 1.0)
    Machines(home).note({inventory.by_name[host].machine: Machine(host, 1.0, out=out) for host in hosts})


def test_while_hosts_are_out_a_gang_that_wants_to_grow_has_them_looked_at(gang, carry, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(children, "start_detached", lambda *words, **_: started.append(words))
    go_out(tmp_path, gang.inventory, "h3", "h4")
    assert not watch(gang)._ask()
    assert started == [("gpurun.head.looking", gang.inventory.source)]
    Machines(tmp_path).note({gang.inventory.by_name[host].machine: Machine(host, time.time()) for host in ("h3", "h4")})
    assert watch(gang)._ask(), "they have returned"


def test_while_hosts_are_out_an_elastic_gang_has_them_looked_at(carry, tmp_path, monkeypatch):
    with Cordons(tmp_path).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "alice", 0.0, "fan") for host in ("h3", "h4")})
    job = carry(gpus=6, min_gpus=2, constraints=Constraints(gpus_per_host=2))
    with Cordons(tmp_path).changing() as cordons:
        cordons.clear()
    started = []
    monkeypatch.setattr(children, "start_detached", lambda *words, **_: started.append(words))
    go_out(tmp_path, job.inventory, "h3", "h4")
    assert not Members(job, threading.Event(), on_join=lambda _: None)._take_and_bring_in()
    assert started == [("gpurun.head.looking", job.inventory.source)]

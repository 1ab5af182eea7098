"""Rules that meet: in random worlds no queue is stuck, no GPU idles for nothing, and nobody starves (see `never`)."""

import pytest
from cluster_life import History
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from never import Broken
from random_worlds import random_history, run_random_passes

from gpurun.leases.occupancy import View
from gpurun.scheduler import passes as patience
from gpurun.scheduler import passes as starting
from gpurun.scheduler import state
from gpurun.scheduler.pools import Book
from gpurun.scheduler.state import PassState

SEEDS = st.integers(0, 10**9)


@examples("random passes")
@given(SEEDS)
def test_a_pass_breaks_no_promise(seed):
    run_random_passes(seed)


@examples("random lives of a cluster")
@given(SEEDS)
def test_a_cluster_lives_and_no_promise_is_broken(seed):
    random_history(seed).run()


@examples("long lives of a cluster")
@given(SEEDS)
def test_a_cluster_lives_long_and_no_promise_is_broken(seed):
    random_history(seed, most_jobs=300).run()


@pytest.mark.parametrize(("seed", "most_jobs"), [(1775, 60), (1890, 60), (91000518, 60)])
def test_lives_in_which_a_gang_starved_once(seed, most_jobs):
    random_history(seed, most_jobs).run()


@pytest.mark.parametrize("seed", [310007801, 310057349])
def test_passes_in_which_gpus_kept_for_the_time_after_a_taker_idled_once_because_it_started_elsewhere(seed):
    run_random_passes(seed)


def test_the_worlds_have_what_rules_are_about():
    kills, moves, passes = 0, 0, 0
    for seed in range(8):
        done: History = random_history(seed).run()
        kills, passes = kills + done.kills, passes + done.passes
        moves += sum(event.what in ("drain", "clock", "take", "fault") for event in done.events)
    assert kills > 0 and moves > 8 and passes > 200


# each rule that was wrong, put back


def leave_what_gangs_were_stopped_for_to_older_gangs(monkeypatch):
    keep = Book.keep
    monkeypatch.setattr(Book, "keep", lambda self, gang, *, is_owed: keep(self, gang, is_owed=False))
    helps = patience._still_helps
    monkeypatch.setattr(patience, "_still_helps", lambda *about: about[2].why == "preemption" or helps(*about))


def keep_gpus_for_jobs_that_no_pass_may_start(monkeypatch):
    def keep(self, jobs, inventory):
        for job in jobs:
            if job.record.kept is not None:
                self.occupancy.promise(job.record.id, job.record.kept.placement.grants, inventory)

    monkeypatch.setattr(View, "keep", keep)


def decline_what_is_kept_once_the_clock_is_set_back(monkeypatch):
    monkeypatch.setattr(PassState, "is_choosy", lambda self, gang: gang.near_until_s > self.now_s)


def stop_gangs_for_gpus_that_the_taker_declines(monkeypatch):
    start = starting.try_start

    def try_start(state, gang, hold=None):
        placement = state.room.anywhere(gang) if state.is_choosy(gang) else None
        spread = placement and len(placement.racks if gang.wants.constraints.prefer == "rack" else placement.grants)
        return False if spread and spread > 1 else start(state, gang, hold)

    monkeypatch.setattr(starting, "try_start", try_start)
    monkeypatch.setattr(PassState, "place", lambda self, index, gang: self.capacity.place(index, gang))
    decline_what_is_kept_once_the_clock_is_set_back(monkeypatch)


def keep_gpus_for_a_gang_without_its_servers_host(monkeypatch):
    monkeypatch.setattr(state, "refuse", lambda *_: None)


def keep_on_beside_endless_gangs_of_other_pools(monkeypatch):
    monkeypatch.setattr(PassState, "staying", lambda *_: {})
    monkeypatch.setattr(PassState, "gives_up_taken", lambda *_: False)


BROKEN = {
    leave_what_gangs_were_stopped_for_to_older_gangs: (124,),
    keep_gpus_for_jobs_that_no_pass_may_start: (149,),
    decline_what_is_kept_once_the_clock_is_set_back: (142972518,),
    stop_gangs_for_gpus_that_the_taker_declines: (10,),
    keep_gpus_for_a_gang_without_its_servers_host: (20,),
    keep_on_beside_endless_gangs_of_other_pools: (41,),
}
"""A rule → seeds of histories in which it breaks a promise."""


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_caught(monkeypatch, break_it):
    for seed in BROKEN[break_it]:
        random_history(seed).run()
    break_it(monkeypatch)
    for seed in BROKEN[break_it]:
        with pytest.raises(Broken):
            random_history(seed).run()

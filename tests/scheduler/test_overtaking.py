"""Overtaking is bounded: whatever comes, a gang that could run gets GPUs soon after its patience is over.

A world has one or two patient gangs and a stream of others that come without end, most of them more important. Each
runs for at most `LASTS_S`. After its patience a gang may wait for the older patient one and for those who run then.
"""

import random
from dataclasses import replace

import pytest
from clusters import cluster
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from worlds import World

from gpurun.inventory.model import Pool
from gpurun.jobs.spec import Constraints, Wants
from gpurun.scheduler import passes
from gpurun.scheduler.model import DEFAULT, Gang
from gpurun.scheduler.placement import Capacity
from gpurun.scheduler.pools import Book

PATIENCE_S, LASTS_S, GAP_S = 30.0, 10.0, 0.8
POLICY = replace(DEFAULT, patience_s=PATIENCE_S)
HOSTS = ("r0h0", "r0h1", "r1h0", "r1h1")

PATIENT = {
    "half of the cluster": Gang("patient", 8, 0.0),
    "all of the cluster": Gang("patient", 16, 0.0),
    "whole hosts of one rack": Gang(
        "patient", 8, 0.0, wants=Wants(constraints=Constraints(locality="rack", gpus_per_host=4))
    ),
    "one host": Gang("patient", 4, 0.0, wants=Wants(constraints=Constraints(locality="host"))),
    "all of the cluster, after it failed on a host": Gang("patient", 16, 0.0, avoid=("r0h1", "r'; --")),
    "half of it, after it failed on most hosts": Gang("patient", 8, 0.0, avoid=HOSTS[:3]),
    "elastic, and larger than what is usable": Gang("patient", 16, 0.0, wants=Wants(min_gpus=8)),
    "elastic, and larger than the inventory": Gang("patient", 99, 0.0, wants=Wants(min_gpus=10)),
    "elastic, whole hosts, after it failed on all": Gang(
        "patient", 16, 0.0, avoid=HOSTS, wants=Wants(min_gpus=7, constraints=Constraints(gpus_per_host=4))
    ),
    "with a time limit": Gang("patient", 12, 0.0, wants=Wants(time_limit_s=LASTS_S)),
    "of a pool that is always full": Gang("patient", 6, 0.0, wants=Wants(pool="small", preemptible=True)),
    "elastic, of a pool that is always full": Gang(
        "patient", 99, 0.0, wants=Wants(min_gpus=5, pool="small", preemptible=True)
    ),
    "firm, of a pool whose reservation is always in use": Gang("patient", 4, 0.0, wants=Wants(pool="small")),
}
POOLS = (Pool("small", 4, 6), Pool("other", 12))


def world(seed, kind):
    rng = random.Random(seed)
    patient = PATIENT[kind]
    pools = (POOLS if patient.wants.pool else ()) and tuple(POOLS)
    lost = {"r1h1": "lost"} if "usable" in kind else {}
    taken = {"r1h0": (0,)} if patient.gpus < 12 and "whole hosts" not in kind and rng.random() < 0.3 else {}
    limits = rng.choice([(None,), (None, LASTS_S), (LASTS_S,)])
    stream = [gang_of_stream(rng, number, patient.wants.pool, limits) for number in range(110)]
    older = [stream[0].but(id="older", gpus=rng.choice([4, 8, 12]), submitted_s=-1.0)] if not pools else []
    lasts = {gang.id: rng.uniform(1, LASTS_S) for gang in (*older, patient, *stream)}
    lasts = {job: LASTS_S if rng.random() < 0.3 else seconds for job, seconds in lasts.items()}
    return World(cluster(2, 2, 4, pools), POLICY, lasts, [*older, *sorted([patient, *stream], key=age)], lost, taken)


def gang_of_stream(rng, number, pool, limits):
    pool = rng.choice([pool, pool, pool, "other"]) if pool else None
    gpus = rng.choice([1, 1, 2, 2, 3, 4, 4, 8]) if pool is None else rng.choice([1, 1, 2, 3])
    priority, limit_s, requeued = rng.choice([0, 1, 9]), rng.choice(limits), rng.random() < 0.2
    wants = Wants(
        priority=priority, time_limit_s=limit_s, pool=pool, preemptible=pool is not None and rng.random() < 0.3,
        constraints=rng.choice([Constraints(), Constraints(), Constraints(locality="host")]),
    )  # fmt: skip
    return Gang(f"s{number:04d}", gpus, number * GAP_S, wants, requeued=requeued)


def age(gang):
    return gang.age


def starts_in_time(seed, kind):
    """Older gangs first: one, or those of the stream that were there before; each may run and be waited for."""
    return world(seed, kind).run_until({"patient"}, PATIENCE_S + 5 * LASTS_S)


@examples("streams of gangs")
@given(st.integers(0, 10**6), st.sampled_from(sorted(PATIENT)))
def test_a_gang_that_could_run_starts_soon_after_its_patience(seed, kind):
    assert starts_in_time(seed, kind)


def overtaken_somewhere():
    return any(not starts_in_time(seed, kind) for seed in range(6) for kind in PATIENT)


def test_nobody_is_overtaken_in_the_worlds_that_broken_builds_fail_in():
    assert not overtaken_somewhere()


def forget_what_waits_for_nobody_to_stop(monkeypatch):
    """A caller that hands back only what preemptions keep."""
    monkeypatch.setattr(World, "hand_back", lambda self, kept: kept if kept and kept.why == "preemption" else None)


def forget_it_in_the_pass(monkeypatch):
    monkeypatch.setattr("gpurun.scheduler.passes.keep_again", lambda state, queue: None)


def keep_nothing(monkeypatch):
    monkeypatch.setattr(passes, "keep_soonest", lambda state, gang: False)


def avoid_hosts_at_any_price(monkeypatch):
    monkeypatch.setattr(Capacity, "avoiding", lambda self, gang: gang)


def want_all_gpus_of_elastic_gangs(monkeypatch):
    monkeypatch.setattr(Gang, "smallest", property(lambda self: self))


def leave_nothing_of_pools(monkeypatch):
    monkeypatch.setattr(Book, "set_aside", lambda self, overdue: None)


def serve_the_most_important_first(monkeypatch):
    monkeypatch.setattr(Gang, "age", property(lambda self: self.rank))


def never_go_before_a_reservation(monkeypatch):
    serve = passes.keep_for_the_oldest
    monkeypatch.setattr(
        "gpurun.scheduler.passes.keep_for_the_oldest",
        lambda state: serve(state) if state.keeping.reservation is None else None,
    )
    monkeypatch.setattr("gpurun.scheduler.passes.keep_if_oldest", lambda state, gang, behind: None)


@pytest.mark.parametrize(
    "break_it",
    [
        forget_what_waits_for_nobody_to_stop,
        forget_it_in_the_pass,
        keep_nothing,
        avoid_hosts_at_any_price,
        want_all_gpus_of_elastic_gangs,
        leave_nothing_of_pools,
        serve_the_most_important_first,
        never_go_before_a_reservation,
    ],
)
def test_a_broken_build_is_caught(monkeypatch, break_it):
    break_it(monkeypatch)
    assert overtaken_somewhere()

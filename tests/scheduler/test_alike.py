"""Gangs that are alike are looked at once. That saves time and changes no decision."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
from clusters import cluster

from gpurun.inventory.model import Pool
from gpurun.jobs.spec import Constraints
from gpurun.scheduler.model import Gang, Grant, Kept, Placement, Running, Snapshot
from gpurun.scheduler.policy import DEFAULT
from gpurun.scheduler.schedule import schedule
from gpurun.scheduler.state import PassState

SEEDS = 150
HOUR = 3600.0
POOLS = (
    Pool(name="research", reservation=24, limit=48),
    Pool(name="vision", parent="research", reservation=8, limit=32),
    Pool(name="nlp", parent="research", reservation=8, limit=24),
    Pool(name="batch", reservation=0, limit=40),
)


def random_gang(dice: random.Random, pools: bool) -> Gang:
    gpus = dice.choice([1, 2, 4, 8, 16, 32])
    return Gang(
        "", gpus, dice.uniform(0, 100) * HOUR, min_gpus=dice.choice([None, None, max(1, gpus // 2)]),
        constraints=Constraints(locality=dice.choice(["any", "any", "rack"])),
        pool=dice.choice(["vision", "nlp", "batch", None]) if pools else None, priority=dice.choice([0, 0, 5]),
        preemptible=dice.random() < 0.5, time_limit_s=dice.choice([None, HOUR, 10 * HOUR]),
    )  # fmt: skip


def random_snapshot(seed: int) -> Snapshot:
    """A full cluster, and sweeps of gangs that differ in age and in how long they run."""
    dice = random.Random(seed)
    pools = seed % 3 != 0
    inventory = cluster(racks=3, hosts=3, gpus=8, pools=POOLS if pools else ())
    now_s, running = 100 * HOUR, ()
    first = tuple(replace(random_gang(dice, pools), id=f"r{n:02}", min_gpus=None) for n in range(30))
    for gang, placement in schedule(
        Snapshot(inventory, queue=first), replace(DEFAULT, pools=dice.random() < 0.5)
    ).starts:
        granted_s = now_s - dice.uniform(0, 10) * HOUR
        running += (Running(gang, placement, granted_s, granted_s),)
    gone = dice.sample(running, k=len(running) // 5)
    queue = []
    for sweep in range(6):
        model = random_gang(dice, pools)
        for number in range(dice.randint(2, 8)):
            queue.append(
                replace(
                    model, id=f"q{sweep}{number}", submitted_s=dice.uniform(0, 100) * HOUR,
                    time_limit_s=dice.choice([model.time_limit_s, HOUR / 2]),
                )
            )  # fmt: skip
    left = tuple(run for run in running if run not in gone)
    unusable = {"h01": "cordoned"} if dice.random() < 0.3 else {}
    return Snapshot(inventory, left, tuple(queue), unusable, {}, now_s)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_looking_at_every_gang_decides_the_same(seed):
    snapshot = random_snapshot(seed)
    found = schedule(snapshot)
    with mock.patch.object(PassState, "waits_like_another", lambda *_: False):
        each = schedule(snapshot)
    assert (found.starts, found.preempts, found.kept, found.reserved) == (
        each.starts, each.preempts, each.kept, each.reserved,
    )  # fmt: skip
    assert found.waits.keys() == each.waits.keys()
    assert found.never == each.never


def test_the_worlds_have_gangs_that_are_alike():
    shared = 0
    for seed in range(20):
        found = schedule(random_snapshot(seed))
        shared += len(found.waits) - len({id(wait) for wait in found.waits.values()})
    assert shared > 100


def test_the_oldest_is_served_though_one_like_it_is_in_front_and_another_gang_gives_up_its_hosts_in_this_pass():
    inventory = cluster(racks=1, hosts=2, gpus=2)
    free, used = (Placement("pascal", (host.rack,), (Grant(host.name, (0, 1)),)) for host in inventory.hosts)
    kept_for = Gang("kept-for", 2, 20 * HOUR, kept=Kept(free, "patience"))
    in_front, oldest = Gang("in-front", 2, 50 * HOUR, priority=5, requeued=True), Gang("oldest", 2, HOUR, priority=5)
    running = Running(Gang("running", 2), used, 0.0, 0.0)
    snapshot = Snapshot(inventory, (running,), (kept_for, in_front, oldest), now_s=100 * HOUR)
    found = schedule(snapshot, replace(DEFAULT, patience_s=HOUR))
    assert [gang.id for gang, _ in found.starts] == ["kept-for"]
    assert list(found.kept) == ["oldest"]

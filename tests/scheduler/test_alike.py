"""Gangs that are alike are looked at once. That saves time and changes no decision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from clusters import cluster
from how_many import count

from gpurun.inventory.model import Pool
from gpurun.jobs.record import Kept
from gpurun.jobs.spec import Constraints, Grant, Placement, Wants
from gpurun.scheduler.model import DEFAULT, Gang, Policy, Running, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.state import PassState

SEEDS = {*range(count("full clusters")), 183, 435}
"""In the last two a gang waited like one that had met an earlier reservation for the same other gang."""

HOUR = 3600.0
POOLS = (
    Pool(name="research", reservation=24, limit=48),
    Pool(name="vision", parent="research", reservation=8, limit=32),
    Pool(name="nlp", parent="research", reservation=8, limit=24),
    Pool(name="batch", reservation=0, limit=40),
)


def random_gang(dice: random.Random, pools: bool) -> Gang:
    gpus = dice.choice([1, 2, 4, 8, 16, 24, 32, 48])
    asked = Constraints(
        locality=dice.choice(["any", "any", "rack"]), gpus_per_host=dice.choice([None, None, 1 if gpus < 4 else 4]),
        avoid=dice.choice([(), (), ("r0h2",), ("r1h0", "r1h2")]),
        hosts=dice.choice([(), (), (), ("r0h0", "r0h1", "r0h2", "r1h0")]),
        locality_wait_s=dice.choice([0, 0, 0, 10 * HOUR, 60 * HOUR]), prefer=dice.choice(["any", "rack", "host"]),
    )  # fmt: skip
    return Gang(
        "", gpus, dice.uniform(0, 100) * HOUR,
        Wants(
            min_gpus=dice.choice([None, None, max(1, gpus // 2)]), constraints=asked,
            pool=dice.choice(["vision", "nlp", "batch", None]) if pools else None, priority=dice.choice([0, 0, 5]),
            preemptible=dice.random() < 0.5, time_limit_s=dice.choice([None, HOUR, 10 * HOUR, 30 * HOUR]),
        ),
        requeued=dice.random() < 0.2, avoid=dice.choice([(), (), ("r0h1",), ("r0h0", "r1h1", "r2h2")]),
    )  # fmt: skip


def one_like(model: Gang, dice: random.Random, held: Sequence[Placement], **more: Any) -> Gang:
    """Mostly like the model, but of its own age."""
    placement = dice.choice(held)
    kept = Kept(placement, dice.choice(["patience", "preemption"])) if placement.gpus == model.least else None
    wants, submitted_s, is_kept = model.wants, dice.uniform(0, 100) * HOUR, dice.random() < 0.1
    limit_s = dice.choice([wants.time_limit_s, HOUR / 2, 30 * HOUR])
    requeued = dice.choice([model.requeued] * 3 + [not model.requeued])
    wants = replace(
        wants, time_limit_s=limit_s, priority=dice.choice([wants.priority] * 3 + [5]),
        preemptible=dice.choice([wants.preemptible] * 4 + [not wants.preemptible]),
    )  # fmt: skip
    kept = kept if is_kept else None
    return model.but(submitted_s=submitted_s, wants=wants, kept=kept, requeued=requeued, **more)


def random_snapshot(seed: int) -> tuple[Snapshot, Policy]:
    """A full cluster from which some gangs have gone, and sweeps of gangs."""
    dice = random.Random(seed)
    pools = seed % 3 != 0
    inventory = cluster(racks=3, hosts=3, gpus=8, pools=POOLS if pools else ())
    now_s, running = 100 * HOUR, []
    first = tuple(random_gang(dice, pools).but(id=f"r{n:02}").wanting(min_gpus=None) for n in range(30))
    filled = schedule(Snapshot(inventory if dice.random() < 0.5 else replace(inventory, pools=()), queue=first))
    for gang, placement in filled.starts:
        granted_s = now_s - dice.uniform(0, 10) * HOUR
        running.append(Running(gang, placement, granted_s, granted_s, stopping=dice.random() < 0.15))
    held = [run.placement for run in running]
    left = tuple(run for run in running if dice.random() < 0.8)
    queue = [
        one_like(model, dice, held, id=f"q{sweep}{number}")
        for sweep, model in enumerate(random_gang(dice, pools) for _ in range(dice.randint(3, 8)))
        for number in range(dice.randint(2, 8))
    ]
    names = [host.name for host in inventory.hosts]
    unusable = {name: "cordoned" for name in names if dice.random() < 0.05}
    policy = replace(
        DEFAULT, patience_s=dice.choice([DEFAULT.patience_s, HOUR, 10 * HOUR, 50 * HOUR]),
        min_run_s=dice.choice([DEFAULT.min_run_s, HOUR, 0.0]),
    )  # fmt: skip
    return Snapshot(inventory, left, tuple(queue), unusable, {}, now_s), policy


@pytest.mark.parametrize("seed", sorted(SEEDS))
def test_looking_at_every_gang_decides_the_same(seed):
    snapshot, policy = random_snapshot(seed)
    found = schedule(snapshot, policy)
    with mock.patch.object(PassState, "waits_like_another", lambda *_: False):
        each = schedule(snapshot, policy)
    assert (found.starts, found.preempts, found.kept, found.reserved) == (
        each.starts, each.preempts, each.kept, each.reserved,
    )  # fmt: skip
    assert found.waits.keys() == each.waits.keys()
    assert found.never == each.never
    if not snapshot.inventory.pools:  # else one may be told that its pool is full where another finds no room
        assert found.wake_s == each.wake_s


def test_the_worlds_have_gangs_that_are_alike():
    shared = 0
    for seed in range(20):
        found = schedule(*random_snapshot(seed))
        shared += len(found.waits) - len({id(wait) for wait in found.waits.values()})
    assert shared > 100


def test_the_oldest_is_served_though_one_like_it_is_in_front_and_another_gang_gives_up_its_hosts_in_this_pass():
    inventory = cluster(racks=1, hosts=2, gpus=2)
    free, used = (Placement("pascal", (host.rack,), (Grant(host.name, (0, 1)),)) for host in inventory.hosts)
    kept_for = Gang("kept-for", 2, 20 * HOUR, kept=Kept(free, "patience"))
    in_front, oldest = (
        Gang("in-front", 2, 50 * HOUR, requeued=True, wants=Wants(priority=5)),
        Gang("oldest", 2, HOUR, wants=Wants(priority=5)),
    )
    running = Running(Gang("running", 2), used, 0.0, 0.0)
    snapshot = Snapshot(inventory, (running,), (kept_for, in_front, oldest), now_s=100 * HOUR)
    found = schedule(snapshot, replace(DEFAULT, patience_s=HOUR))
    assert [gang.id for gang, _ in found.starts] == ["kept-for"]
    assert list(found.kept) == ["oldest"]

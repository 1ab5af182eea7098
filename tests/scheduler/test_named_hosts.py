"""Gangs that name or avoid hosts: the same placements as by the general way, at the price of other gangs."""

import cProfile
import pstats
from dataclasses import replace
from random import Random

import pytest
from clusters import cluster, runs
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from random_worlds import random_inventory

from gpurun.jobs.spec import Constraints, Wants
from gpurun.scheduler import placement
from gpurun.scheduler.model import Gang, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.placement import Index, try_place


def some(rng, names):
    """Some of the hosts, and names that no host has."""
    return tuple(rng.sample([*names, "nobody'; --"], rng.randint(0, len(names))))


@examples("placements near data")
@given(st.integers(0, 10**9))
def test_the_short_ways_find_what_the_general_way_finds(seed):
    rng = Random(seed)
    inventory = random_inventory(rng)
    names = [host.name for host in inventory.hosts]
    taken = {host.name: tuple(g for g in range(host.gpus) if rng.random() < 0.4) for host in inventory.hosts}
    index = Index(Snapshot(inventory, unusable={rng.choice(names): "cordoned"}, taken=taken))
    for gpus in (1, 2, 4, 8):
        wants = Constraints(hosts=some(rng, names) if rng.random() < 0.6 else (), locality=rng.choice(["any", "host"]))
        gang = Gang("g", gpus, avoid=some(rng, names), near=frozenset(some(rng, names)), wants=Wants(constraints=wants))
        found = try_place(index, gang)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "_one_host", lambda *_: None)
            patch.setattr(placement, "_one_named_host", lambda *_: None)
            if wants.locality == "any":
                assert try_place(index, gang) == found
            else:
                assert found is None or len(found.grants) == 1


def test_a_larger_gang_that_avoids_the_same_host_finds_room_where_a_smaller_one_did_not():
    """What a gang really avoids depends on its size: only the host that both failed on could hold the larger one."""
    hosts = [replace(host, gpus=gpus) for host, gpus in zip(cluster(1, 2, 8).hosts, (8, 4), strict=True)]
    inventory = replace(cluster(1, 2, 8), hosts=tuple(hosts))
    small, large = (Gang(name, gpus, float(gpus), avoid=("r0h0",)) for name, gpus in (("small", 4), ("large", 8)))
    busy = runs(Gang("other", 4), ("r0h1", range(4)))
    found = schedule(Snapshot(inventory, (busy,), (small, large), now_s=10.0))
    assert [gang.id for gang, _ in found.starts] == ["large"]
    assert list(found.waits) == ["small"]


def calls_a_gang(queue):
    """Python calls of a pass over a full cluster of 320 hosts, for each gang of the queue."""
    inventory = cluster(10, 32, 8)
    running = tuple(
        runs(Gang(f"r{n}", 8), (host.name, range(8))) for n, host in enumerate(inventory.hosts)
    )  # fmt: skip
    snapshot = Snapshot(inventory, running, tuple(queue), now_s=100.0)
    profile = cProfile.Profile()
    profile.runcall(schedule, snapshot)
    empty = cProfile.Profile()
    empty.runcall(schedule, Snapshot(inventory, running, (), now_s=100.0))
    return (pstats.Stats(profile).total_calls - pstats.Stats(empty).total_calls) / len(queue)


def test_a_gang_that_names_or_avoids_hosts_costs_no_look_at_every_host():
    rng = Random(1)
    names = [f"r{r}h{h}" for r in range(10) for h in range(32)]
    named = [
        Gang(f"n{n}", 8, wants=Wants(constraints=Constraints(hosts=tuple(rng.sample(names, 3))))) for n in range(100)
    ]
    avoiding = [Gang(f"a{n}", 8, avoid=tuple(rng.sample(names, 8))) for n in range(100)]
    assert calls_a_gang(named) < 320
    assert calls_a_gang(avoiding) < 2 * 320

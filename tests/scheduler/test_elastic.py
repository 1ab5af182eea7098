"""Elastic gangs: fewer GPUs where all do not fit, never below the least; growth last, near, within the pool."""

from dataclasses import replace

import pytest
from clusters import cluster, runs

from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Pool, Rack
from gpurun.jobs.spec import Constraints, Grant, Placement, Wants
from gpurun.scheduler.model import Gang, Reason, Snapshot
from gpurun.scheduler.passes import growth, regrown, schedule

ELASTIC = Gang("e", 8, wants=Wants(min_gpus=3))
TCP = {"tcp": Fabric("tcp", FabricKind.TCP, "eth0"), "other": Fabric("other", FabricKind.TCP, "eth1")}


def alike(racks, hosts, gpus, pools=()):
    return replace(cluster(racks, hosts, gpus, pools), fabrics=TCP)


def size(snapshot):
    ((gang, placement),) = schedule(snapshot).starts
    assert gang.gpus == placement.gpus
    return placement.gpus


@pytest.mark.parametrize(("taken", "got"), [(0, 8), (1, 7), (4, 4), (5, 3)])
def test_it_starts_with_the_most_that_fit(taken, got):
    other = runs(Gang("o", taken), ("r0h0", range(min(taken, 4))), ("r0h1", range(taken - min(taken, 4))))
    assert size(Snapshot(cluster(1, 2, 4), (other,), (ELASTIC,))) == got


def test_it_does_not_start_with_fewer_than_its_least():
    other = runs(Gang("o", 6), ("r0h0", range(4)), ("r0h1", range(2)))
    found = schedule(Snapshot(cluster(1, 2, 4), (other,), (ELASTIC,)))
    assert found.starts == () and found.waits["e"].reason is Reason.NO_ROOM


def test_with_gpus_per_host_it_shrinks_by_whole_hosts():
    wants = ELASTIC.wanting(constraints=Constraints(gpus_per_host=2))
    other = runs(Gang("o", 5), ("r0h0", range(3)), ("r0h1", range(2)))
    assert size(Snapshot(cluster(1, 4, 4), (other,), (wants,))) == 6
    assert wants.least == 4


def test_an_inventory_that_holds_only_the_least_is_enough_and_a_smaller_one_never():
    assert size(Snapshot(cluster(1, 1, 4), queue=(ELASTIC,))) == 4
    assert "e" in schedule(Snapshot(cluster(1, 1, 2), queue=(ELASTIC,))).never


def test_it_takes_nothing_that_is_reserved_for_who_came_first():
    first = Gang("f", 8, 0.0)
    other = runs(Gang("o", 4, wants=Wants(time_limit_s=100.0)), ("r0h0", range(4)))
    late = ELASTIC.but(submitted_s=1.0)
    found = schedule(Snapshot(cluster(1, 2, 4), (other,), (first, late)))
    assert found.starts == () and found.waits["e"].reason is Reason.RESERVED
    short = late.wanting(time_limit_s=50.0)
    assert schedule(Snapshot(cluster(1, 2, 4), (other,), (first, short))).starts[0][0].gpus == 4


def grown(snapshot, gang=ELASTIC):
    (mine,) = [run for run in snapshot.running if run.gang.id == gang.id]
    return growth(snapshot, gang, mine.placement)


def running(*grants, **more):
    held = runs(ELASTIC, *grants, **more)
    return replace(held, gang=ELASTIC.but(gpus=held.placement.gpus))


def test_it_grows_on_other_hosts_of_its_racks_first():
    mine = running(("r0h0", range(4)))
    assert grown(Snapshot(alike(2, 2, 4), (mine,))) == Placement("pascal", ("r0",), (Grant("r0h1", (0, 1, 2, 3)),))
    busy = runs(Gang("o", 4), ("r0h1", range(4)))
    assert grown(Snapshot(alike(2, 2, 4), (mine, busy))).racks == ("r1",)
    part = runs(Gang("o", 3), ("r0h1", range(3)))
    assert grown(Snapshot(alike(2, 2, 4), (mine, part))).grants == (Grant("r0h1", (3,)),)


def test_it_does_not_grow_where_somebody_waits_nor_beyond_what_it_asked_for():
    mine = running(("r0h0", range(4)))
    waiting = Gang("w", 12)
    assert grown(Snapshot(alike(1, 3, 4), (mine,), (waiting,))) is None
    assert grown(Snapshot(alike(1, 3, 4), (running(("r0h0", range(4)), ("r0h1", range(4))),))) is None


@pytest.mark.parametrize(
    "idle",
    [
        Gang("impossible'; --", 99),
        Gang("elsewhere", 8, wants=Wants(constraints=Constraints(hosts=("r1h0", "r1h1")))),
        Gang("hosts are out", 16),
        Gang("other pool", 2, wants=Wants(pool="full", preemptible=True)),
        Gang("starts now", 2, wants=Wants(constraints=Constraints(hosts=("r1h1",)))),
    ],
)
def test_a_gang_that_waits_for_something_else_does_not_keep_it_from_growing(idle):
    pools = (Pool("full", limit=1),) if idle.wants.pool else ()
    taken = {"r1h0": (0,)} if "elsewhere" in idle.id else {}
    unusable = {"r1h0": "lost"} if "out" in idle.id else {}
    mine = running(("r0h0", range(4)))
    used = (runs(Gang("u", 1, wants=Wants(pool="full", preemptible=True)), ("r1h1", (3,))),) if idle.wants.pool else ()
    idle = idle.but(gpus=1) if idle.wants.pool else idle
    found = grown(Snapshot(alike(2, 2, 4, pools), (mine, *used), (idle,), unusable, taken))
    assert found is not None and found.hosts == ("r0h1",)


def test_it_leaves_what_its_pool_has_to_a_gang_that_waits_for_that():
    pools = (Pool("p", limit=7),)
    gang = ELASTIC.wanting(pool="p", preemptible=True)
    mine = replace(running(("r0h0", range(4))), gang=gang.but(gpus=4))
    waiting = Gang("w", 4, wants=Wants(pool="p", preemptible=True))
    assert growth(Snapshot(alike(1, 3, 4, pools), (mine,), (waiting,)), gang, mine.placement) is None
    assert growth(Snapshot(alike(1, 3, 4, pools), (mine,), ()), gang, mine.placement).gpus == 3


@pytest.mark.parametrize(("gpus", "least", "got"), [(8, 2, 4), (8, 4, 4), (99, 1, 4), (3, 1, 3)])
def test_a_pool_asks_for_the_least_of_an_elastic_gang_and_bounds_the_rest(gpus, least, got):
    snapshot = Snapshot(cluster(1, 2, 4, (Pool("p", limit=4),)))
    gang = Gang("e", gpus, wants=Wants(min_gpus=least, pool="p", preemptible=True))
    assert size(replace(snapshot, queue=(gang,))) == got
    assert "e" in schedule(replace(snapshot, queue=(gang.wanting(min_gpus=5),))).never or gpus < 5


def test_an_elastic_gang_that_takes_back_starts_with_what_was_emptied_for_it():
    """With more it could keep the gangs that were stopped for it from coming back, and they would stop it in turn."""
    pools = (Pool("a", 4), Pool("b", 4))
    borrower = runs(Gang("r", 8, wants=Wants(pool="a", preemptible=True)), ("r0h0", range(4)), ("r0h1", range(4)))
    elastic = Gang("e", 8, 1.0, wants=Wants(min_gpus=2, pool="b", preemptible=True))
    snapshot = Snapshot(cluster(1, 2, 4, pools), (borrower,), (elastic,), now_s=1e4)
    found = schedule(snapshot)
    assert [one.victim for one in found.preempts] == ["r"] and found.kept["e"].placement.gpus == 2
    assert size(replace(snapshot, running=(), queue=(elastic.but(kept=found.kept["e"]),))) == 2


def test_an_elastic_gang_larger_than_what_is_usable_is_reserved_its_least():
    other = runs(Gang("o", 4, wants=Wants(time_limit_s=100.0)), ("r0h0", range(4)))
    snapshot = Snapshot(cluster(1, 2, 4), (other,), (Gang("e", 8, wants=Wants(min_gpus=4)),), {"r0h1": "lost"})
    found = schedule(snapshot)
    assert found.waits["e"].expected_start_s == 100.0
    assert found.reserved["e"].hosts == ("r0h0",)


@pytest.mark.parametrize(
    "wants", [Constraints(locality="host"), Constraints(hosts=("r0h0",)), Constraints(gpus_per_host=5)]
)
def test_its_constraints_hold(wants):
    gang = ELASTIC.wanting(constraints=wants)
    assert (
        growth(Snapshot(alike(1, 2, 4), (running(("r0h0", range(4))),)), gang, runs(gang, ("r0h0", range(4))).placement)
        is None
    )


def test_it_stays_in_its_rack_where_it_must():
    gang = ELASTIC.wanting(constraints=Constraints(locality="rack"))
    now = runs(gang, ("r0h0", range(4))).placement
    assert growth(Snapshot(alike(2, 1, 4), (running(("r0h0", range(4))),)), gang, now) is None


def test_it_grows_neither_past_its_pool_nor_onto_cordoned_hosts_nor_another_network():
    mine = running(("r0h0", range(4)))
    pools = (Pool("p", reservation=4, limit=6),)
    gang = ELASTIC.wanting(pool="p", preemptible=True)
    mine_in_pool = replace(mine, gang=gang.but(gpus=4))
    found = growth(Snapshot(alike(1, 2, 4, pools), (mine_in_pool,)), gang, mine.placement)
    assert found is None or found.gpus <= 2
    assert grown(Snapshot(alike(1, 2, 4), (mine,), unusable={"r0h1": "lost"})) is None
    hosts = (
        Host("a", "r0", "pascal", 4, "tcp"),
        Host("b", "r0", "pascal", 4, "other"),
        Host("c", "r0", "volta", 4, "tcp"),
    )
    odd = Inventory(hosts, (Rack("r0", ("a", "b", "c")),), TCP)
    assert grown(Snapshot(odd, (running(("a", range(4))),))) is None


def test_a_host_it_failed_on_is_taken_again_only_if_no_other_could_be():
    mine = running(("r0h0", range(4)))
    gang = ELASTIC.but(avoid=("r0h1",))
    assert grown(Snapshot(alike(1, 3, 4), (mine,)), gang).hosts == ("r0h2",)
    busy = runs(Gang("o", 4), ("r0h2", range(4)))
    assert grown(Snapshot(alike(1, 3, 4), (mine, busy)), gang) is None
    assert grown(Snapshot(alike(1, 2, 4), (mine,)), gang).hosts == ("r0h1",)


def formed_again(snapshot, gang=ELASTIC):
    (mine,) = [run for run in snapshot.running if run.gang.id == gang.id]
    return regrown(snapshot, gang, mine.placement)


def test_a_gang_that_is_formed_again_may_also_have_more_of_its_own_hosts():
    mine = running(("r0h0", range(3)))
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,))).hosts == ("r0h0", "r0h1")
    assert growth(Snapshot(alike(1, 1, 4), (mine,)), ELASTIC, mine.placement) is None
    assert formed_again(Snapshot(alike(1, 1, 4), (mine,))).gpus == 4


def test_it_is_not_ended_for_as_many_gpus_elsewhere_nor_for_fewer():
    mine = running(("r0h0", range(4)))
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), taken={"r0h1": range(4)})) is None
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), unusable={"r0h1": "lost"})) is None
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), unusable={"r0h0": "cordoned"})) is None
    whole = running(("r0h0", range(4)), ("r0h1", range(4)))
    assert formed_again(Snapshot(alike(2, 2, 4), (whole,))) is None


def test_it_is_ended_neither_for_gpus_that_others_wait_for_nor_if_others_would_take_its_own():
    mine = running(("r0h0", range(4)))
    waits = Gang("w", 8)
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), (waits,))) is None
    urgent = Gang("u", 8, wants=Wants(priority=9))
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), (urgent,))) is None
    elsewhere = waits.wanting(constraints=Constraints(generations=("volta",)))
    assert formed_again(Snapshot(alike(1, 2, 4), (mine,), (elsewhere,))).gpus == 8


def test_what_would_stop_others_for_it_is_no_growth():
    pools = (Pool("a", 8), Pool("b", 0))
    gang = ELASTIC.wanting(pool="a", preemptible=True)
    mine = replace(running(("r0h0", range(4))), gang=gang.but(gpus=4))
    borrower = runs(Gang("r", 4, wants=Wants(pool="b", preemptible=True)), ("r0h1", range(4)))
    assert formed_again(Snapshot(alike(1, 2, 4, pools), (mine, borrower), now_s=1e4), gang) is None

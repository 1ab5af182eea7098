"""The pass: order, backfill, patience, kept GPUs, pools, preemption, locality that is worth waiting for."""

from dataclasses import replace

import pytest
from clusters import cluster, runs

from gpurun.inventory.model import Pool
from gpurun.jobs.record import Kept
from gpurun.jobs.spec import Constraints, Grant, Placement, Wants
from gpurun.scheduler.model import DEFAULT, Gang, Reason, Snapshot
from gpurun.scheduler.passes import schedule

HOUR = 3600.0


def started(decisions):
    return [gang.id for gang, _ in decisions.starts]


def test_order_is_priority_then_requeued_then_submission():
    queue = (
        Gang("late", 1, 3.0),
        Gang("early", 1, 1.0),
        Gang("again", 1, 2.0, requeued=True),
        Gang("urgent", 1, 9.0, wants=Wants(priority=1)),
    )
    assert schedule(Snapshot(cluster(1, 1, 8), queue=queue)).order == ("urgent", "again", "early", "late")


def test_same_input_same_output_whatever_the_order_of_the_queue():
    queue = tuple(Gang(f"g{n}", 1 + n % 5, float(n // 3)) for n in range(20))
    inventory = cluster(2, 2, 4)
    assert schedule(Snapshot(inventory, queue=queue)) == schedule(Snapshot(inventory, queue=queue[::-1]))


def test_what_could_never_run_is_refused_and_blocks_nobody():
    queue = (
        Gang("huge", 99, 1.0),
        Gang("odd", 3, 2.0, wants=Wants(constraints=Constraints(gpus_per_host=2))),
        Gang("ok", 1, 3.0),
    )
    decisions = schedule(Snapshot(cluster(1, 1, 8), queue=queue))
    assert set(decisions.never) == {"huge", "odd"}
    assert started(decisions) == ["ok"]


# backfill


def blocked_by_limits(*queue, now_s=10.0):
    """One host of 8: 6 used until 100 s; the first of the queue wants all 8."""
    running = (runs(Gang("r", 6, wants=Wants(time_limit_s=100.0)), ("r0h0", range(6))),)
    return schedule(Snapshot(cluster(1, 1, 8), running, (Gang("first", 8, 1.0), *queue), now_s=now_s))


def test_the_first_blocked_gang_gets_a_reservation():
    decisions = blocked_by_limits()
    assert decisions.waits["first"].expected_start_s == 100.0
    assert decisions.reserved["first"].gpus == 8


@pytest.mark.parametrize(("limit", "starts"), [(90.0, True), (91.0, False), (None, False)])
def test_backfill_never_delays_the_expected_start(limit, starts):
    decisions = blocked_by_limits(Gang("small", 2, 2.0, wants=Wants(time_limit_s=limit)))
    assert started(decisions) == (["small"] if starts else [])
    if not starts:
        assert decisions.waits["small"].reason is Reason.RESERVED
        assert decisions.waits["small"].behind == "first"


def test_backfill_beside_the_reservation_needs_no_limit():
    running = (runs(Gang("r", 6, wants=Wants(time_limit_s=100.0)), ("r0h0", range(6))),)
    queue = (
        Gang("first", 8, 1.0, wants=Wants(constraints=Constraints(locality="host", hosts=("r0h0",)))),
        Gang("small", 4, 2.0),
    )
    decisions = schedule(Snapshot(cluster(1, 2, 8), running, queue, now_s=10.0))
    assert started(decisions) == ["small"]
    assert decisions.starts[0][1].hosts == ("r0h1",)


def test_a_gang_past_its_limit_is_expected_to_end_now():
    assert blocked_by_limits(now_s=500.0).waits["first"].expected_start_s == 500.0


def test_a_gang_that_must_reuse_the_host_it_failed_on_is_reserved_that_host():
    running = (runs(Gang("r", 6, wants=Wants(time_limit_s=100.0)), ("r0h0", range(6))),)
    queue = (Gang("whole", 16, 1.0, avoid=("r0h0", "r0h1")), Gang("small", 2, 2.0))
    found = schedule(Snapshot(cluster(1, 2, 8), running, queue, now_s=10.0))
    assert found.waits["whole"].expected_start_s == 100.0
    assert started(found) == []


def test_a_gang_that_cannot_be_split_does_not_hide_room_from_larger_ones_like_it():
    wants = Constraints(gpus_per_host=2)
    queue = (Gang("odd", 3, 1.0, wants=Wants(constraints=wants)), Gang("even", 4, 2.0, wants=Wants(constraints=wants)))
    found = schedule(Snapshot(cluster(1, 2, 8), queue=queue))
    assert started(found) == ["even"] and set(found.never) == {"odd"}


def test_a_gang_that_needs_hosts_that_are_out_holds_nothing_back():
    running = (runs(Gang("r", 6, wants=Wants(time_limit_s=100.0)), ("r0h0", range(6))),)
    queue = (Gang("whole", 16, 1.0), Gang("second", 8, 2.0), Gang("small", 2, 3.0))
    found = schedule(Snapshot(cluster(1, 2, 8), running, queue, {"r0h1": "lost"}, now_s=1e9))
    assert found.waits["whole"].reason is Reason.HOSTS
    assert set(found.reserved) | set(found.kept) == {"second"}


# patience


def overtaken(age_s, gpus=8, **more):
    """Two hosts of 8 with endless gangs; `waits` wants more than is free, `small` fits."""
    running = (runs(Gang("a", 6), ("r0h0", range(6)), granted_s=0.0), runs(Gang("b", 6), ("r0h1", range(6))))
    queue = (Gang("waits", gpus, 0.0), Gang("small", 2, age_s))
    return schedule(Snapshot(cluster(1, 2, 8), running, queue, now_s=age_s), replace(DEFAULT, **more))


def test_a_gang_is_overtaken_while_patience_lasts():
    decisions = overtaken(HOUR)
    assert started(decisions) == ["small"]
    assert decisions.kept == {}
    assert decisions.wake_s == DEFAULT.patience_s


def test_after_its_patience_hosts_are_kept_for_it():
    decisions = overtaken(DEFAULT.patience_s, gpus=16)
    assert started(decisions) == []
    assert decisions.kept["waits"].placement.gpus == 16
    assert decisions.waits["waits"].reason is Reason.KEPT


def test_the_dial_is_patience():
    assert started(overtaken(HOUR, gpus=16, patience_s=HOUR)) == []


def test_the_hosts_kept_are_those_likely_to_be_free_soonest():
    running = (
        runs(Gang("old", 8), ("r0h0", range(8)), granted_s=0.0),
        runs(Gang("young", 7), ("r0h1", range(7)), granted_s=900.0),
    )
    queue = (Gang("waits", 8, 0.0), Gang("small", 1, 1.0))
    decisions = schedule(Snapshot(cluster(1, 2, 8), running, queue, now_s=1000.0), replace(DEFAULT, patience_s=1.0))
    assert decisions.kept["waits"].placement.hosts == ("r0h1",)
    assert started(decisions) == []


def test_what_is_kept_is_for_its_gang_alone_and_starts_when_it_is_free():
    kept = Kept(Placement("pascal", ("r0",), (Grant("r0h0", tuple(range(8))),)), "patience")
    waits, small = Gang("waits", 8, 0.0, kept=kept), Gang("small", 2, -1.0)
    running = (runs(Gang("a", 6), ("r0h0", range(6))), runs(Gang("b", 8), ("r0h1", range(8))))
    decisions = schedule(Snapshot(cluster(1, 2, 8), running, (waits, small), now_s=1.0))
    assert started(decisions) == []
    assert decisions.kept == {"waits": kept}
    decisions = schedule(Snapshot(cluster(1, 2, 8), running[1:], (waits, small), now_s=2.0))
    assert started(decisions) == ["waits"]
    assert decisions.kept == {}


def test_what_is_kept_on_a_lost_host_is_dropped():
    kept = Kept(Placement("pascal", ("r0",), (Grant("r0h0", tuple(range(8))),)), "patience")
    snapshot = Snapshot(cluster(1, 2, 8), queue=(Gang("w", 8, kept=kept),), unusable={"r0h0": "lost"})
    assert schedule(snapshot).starts[0][1].hosts == ("r0h1",)
    gone = replace(kept, placement=replace(kept.placement, grants=(Grant("nobody'; --", (0,)),)))
    assert started(schedule(replace(snapshot, queue=(Gang("w", 8, kept=gone),)))) == ["w"]


def test_a_reservation_for_an_older_gang_does_not_delay_one_whose_patience_is_over():
    """Others may overtake the older gang, so they could overtake both for ever."""
    running = tuple(runs(Gang(f"r{n}", 8, wants=Wants(time_limit_s=9 * HOUR)), (f"r0h{n}", range(8))) for n in range(4))
    older, wide = Gang("older", 8, 0.0), Gang("wide", 12, 1.0)  # the patience of `wide` is a third as long
    found = schedule(Snapshot(cluster(1, 4, 8), running, (older, wide), now_s=0.5 * DEFAULT.patience_s))
    assert set(found.kept) == {"wide"}
    assert set(found.reserved) == {"older"}


# locality


def test_a_gang_may_wait_for_one_rack():
    running = (runs(Gang("a", 4), ("r0h0", range(4))), runs(Gang("b", 4), ("r1h0", range(4))))
    wants = Constraints(prefer="rack", locality_wait_s=100.0)
    queue = (Gang("g", 8, 0.0, wants=Wants(constraints=wants)), Gang("other", 4, 1.0))
    snapshot = Snapshot(cluster(2, 2, 4), running, queue, now_s=50.0)
    decisions = schedule(snapshot)
    assert decisions.waits["g"].reason is Reason.LOCALITY
    assert decisions.waits["g"].until_s == decisions.wake_s == 100.0
    assert started(decisions) == ["other"]
    assert started(schedule(replace(snapshot, now_s=100.0))) == ["g"]
    assert started(schedule(replace(snapshot, running=running[1:]))) == ["g", "other"]


# pools and preemption

POOLS = (Pool("vision", 8, 16), Pool("speech", 8))


def lent(now_s=HOUR, checkpoint_s=None):
    """Two hosts of 8: vision borrows speech's half with two gangs of 4."""
    lender = Wants(pool="vision", preemptible=True)
    return (
        runs(Gang("own", 8, wants=Wants(pool="vision")), ("r0h0", range(8))),
        runs(Gang("old", 4, 1.0, lender), ("r0h1", range(4)), granted_s=1.0, checkpoint_s=checkpoint_s),
        runs(Gang("new", 4, 2.0, lender), ("r0h1", range(4, 8)), granted_s=2.0),
    )


def take_back(gpus, running=None, now_s=HOUR):
    queue = (Gang("owner", gpus, 50.0, Wants(pool="speech")),)
    return schedule(Snapshot(cluster(1, 2, 8, POOLS), running or lent(), queue, now_s=now_s))


def test_what_was_borrowed_is_taken_back_from_the_newest():
    decisions = take_back(4)
    assert [preemption.victim for preemption in decisions.preempts] == ["new"]
    assert decisions.preempts[0].taker == "owner"
    assert decisions.kept["owner"].placement.grants == (Grant("r0h1", (4, 5, 6, 7)),)


def test_whole_gangs_and_no_more_than_it_takes():
    assert {p.victim for p in take_back(8).preempts} == {"old", "new"}
    assert len(take_back(3).preempts) == 1


def test_lowest_priority_goes_first():
    running = lent()
    running = (running[0], replace(running[1], gang=running[1].gang.wanting(priority=-1)), running[2])
    assert [p.victim for p in take_back(4, running).preempts] == ["old"]


def test_not_before_the_minimum_run_time():
    decisions = take_back(4, now_s=60.0)
    assert decisions.preempts == ()
    assert decisions.wake_s == 1.0 + DEFAULT.min_run_s


def test_never_without_then_placing_the_taker():
    running = tuple(replace(run, stopping=run.gang.id == "new") for run in lent())
    kept = Kept(Placement("pascal", ("r0",), (Grant("r0h1", (4, 5, 6, 7)),)), "preemption")
    owner = Gang("owner", 4, 50.0, kept=kept, wants=Wants(pool="speech"))
    rival = Gang("rival", 4, 0.0, wants=Wants(pool="vision", preemptible=True, priority=99))
    snapshot = Snapshot(cluster(1, 2, 8, POOLS), running, (owner, rival), now_s=HOUR)
    assert schedule(snapshot).kept["owner"] == kept
    after = replace(snapshot, running=running[:2])
    assert schedule(after).starts[0] == (owner, kept.placement)


def test_a_gang_that_prefers_one_host_has_gangs_stopped_for_one_host_and_declines_no_part_of_it():
    """Two gangs stop one after the other; meanwhile it would fit over two hosts."""
    prefers = Constraints(prefer="host", locality_wait_s=9 * HOUR)
    lenders = (
        runs(Gang("a", 3, wants=Wants(pool="vision", preemptible=True)), ("r0h0", range(3)), granted_s=1.0),
        runs(
            Gang("b", 3, wants=Wants(pool="vision", preemptible=True)),
            ("r0h0", (3,)),
            ("r0h1", range(2)),
            granted_s=2.0,
        ),
        runs(Gang("c", 1, wants=Wants(pool="vision", preemptible=True)), ("r0h1", (2,)), granted_s=3.0),
    )
    owner = Gang("owner", 4, 50.0, wants=Wants(pool="speech", constraints=prefers))
    snapshot = Snapshot(cluster(1, 2, 4, (Pool("vision", 0), Pool("speech", 8))), lenders, (owner,), now_s=HOUR)
    found = schedule(snapshot)
    assert len(found.kept["owner"].placement.grants) == 1
    victims = [preemption.victim for preemption in found.preempts]
    assert len(victims) == 2
    for last in victims:
        left = [replace(run, stopping=True) if run.gang.id == last else run for run in lenders]
        left = [run for run in left if run.gang.id == last or run.gang.id not in victims]
        queue = (owner.but(kept=found.kept["owner"]),)
        later = schedule(replace(snapshot, running=tuple(left), queue=queue, now_s=HOUR + 10))
        assert later.kept == found.kept


@pytest.mark.parametrize("why", ["patience", "preemption"])
@pytest.mark.parametrize("near", ["rack", "host"])
def test_a_gang_starts_on_what_is_kept_for_it_though_the_clock_is_set_back_to_when_it_declined_that(why, near):
    racks = ("r0", "r1") if near == "rack" else ("r0",)
    hosts = tuple(Grant(host, tuple(range(8))) for host in (("r0h0", "r1h0") if near == "rack" else ("r0h0", "r0h1")))
    kept = Kept(Placement("pascal", racks, hosts), why)
    gang = Gang("g", 16, 0.0, kept=kept, wants=Wants(constraints=Constraints(prefer=near, locality_wait_s=9 * HOUR)))
    snapshot = Snapshot(cluster(2, 2, 8) if near == "host" else cluster(2, 1, 8), queue=(gang,), now_s=HOUR)
    assert schedule(snapshot).starts == ((gang, kept.placement),)
    assert not schedule(replace(snapshot, queue=(gang.but(kept=None),))).starts


def test_a_gang_whose_patience_is_over_has_borrowers_stopped_though_a_more_important_one_of_its_pool_waits():
    """The pool's rest is left for it, so the more important one stops nobody."""
    soft = Wants(pool="vision", preemptible=True)
    running = tuple(runs(Gang(f"s{n}", 8, wants=soft), (f"r0h{n}", range(8)), granted_s=n) for n in range(2))
    queue = (
        Gang("old", 8, 0.0, wants=Wants(pool="speech")),
        Gang("urgent", 4, 9.0, wants=Wants(pool="speech", priority=1)),
    )
    found = schedule(Snapshot(cluster(1, 2, 8, POOLS), running, queue, now_s=1.5 * DEFAULT.patience_s))
    assert [(preemption.victim, preemption.taker) for preemption in found.preempts] == [("s1", "old")]


def test_gpus_for_which_gangs_were_stopped_are_kept_for_the_oldest_gang_after_the_taker():
    """Otherwise one preemption after the other could keep a large gang from getting any hosts."""
    soft = Wants(pool="vision", preemptible=True)
    running = tuple(runs(Gang(f"s{n}", 8, wants=soft), (f"r0h{n}", range(8)), granted_s=n) for n in range(2))
    queue = (Gang("whole", 16, 0.0, soft), Gang("owner", 4, 9.0, wants=Wants(pool="speech")))
    snapshot = Snapshot(
        cluster(1, 2, 8, (Pool("vision", 8), Pool("speech", 8))), running, queue, now_s=1.5 * DEFAULT.patience_s
    )
    first = schedule(snapshot)
    assert {name: (kept.why, kept.placement.gpus) for name, kept in first.kept.items()} == {
        "owner": ("preemption", 4),
        "whole": ("patience", 16),
    }
    waiting = tuple(gang.but(kept=first.kept[gang.id]) for gang in queue)
    other = Gang("other", 1, 0.0, wants=Wants(pool="speech", priority=9))
    then = schedule(replace(snapshot, running=running[:1], queue=(*waiting, other)))
    assert started(then) == ["owner"]
    assert then.kept == {"whole": first.kept["whole"]}


def test_what_was_taken_back_is_not_taken_again():
    """The requeued victim is beyond its pool's entitlement: it waits."""
    running = (
        *lent()[:2],
        runs(Gang("owner", 4, 50.0, wants=Wants(pool="speech")), ("r0h1", range(4, 8)), granted_s=HOUR),
    )
    victim = Gang("new", 4, 2.0, requeued=True, wants=Wants(pool="vision", preemptible=True))
    decisions = schedule(Snapshot(cluster(1, 2, 8, POOLS), running, (victim,), now_s=9 * HOUR))
    assert decisions.preempts == ()
    assert started(decisions) == []


def test_only_preemptible_gangs_borrow():
    inventory = cluster(1, 2, 8, POOLS)
    firm, soft = (
        Gang("firm", 12, wants=Wants(pool="vision")),
        Gang("soft", 12, wants=Wants(pool="vision", preemptible=True)),
    )
    decisions = schedule(Snapshot(inventory, queue=(firm, soft)))
    assert "only preemptible jobs can borrow more" in decisions.never["firm"].message
    assert started(decisions) == ["soft"]


def test_a_limit_is_never_passed():
    queue = tuple(Gang(f"g{n}", 4, float(n), wants=Wants(pool="vision", preemptible=True)) for n in range(9))
    decisions = schedule(Snapshot(cluster(1, 8, 8, POOLS), queue=queue))
    assert len(decisions.starts) == 4
    assert decisions.waits["g4"].reason is Reason.POOL
    assert "uses 16 of at most 16" in decisions.waits["g4"].message


def test_a_reservation_is_honoured_even_if_the_pool_itself_fills_its_limit():
    soft = Wants(pool="vision", preemptible=True)
    running = (
        runs(Gang("s1", 8, 1.0, soft), ("r0h0", range(8)), granted_s=1.0),
        runs(Gang("s2", 8, 2.0, soft), ("r0h1", range(8)), granted_s=2.0),
    )
    snapshot = Snapshot(
        cluster(1, 4, 8, POOLS), running, (Gang("firm", 8, 9.0, wants=Wants(pool="vision")),), now_s=HOUR
    )
    decisions = schedule(snapshot)
    assert [preemption.victim for preemption in decisions.preempts] == ["s2"]
    keeps = snapshot.queue[0].but(kept=decisions.kept["firm"])
    still = replace(snapshot, running=(running[0], replace(running[1], stopping=True)), queue=(keeps,))
    assert schedule(still).kept == decisions.kept
    assert started(schedule(replace(still, running=running[:1]))) == ["firm"]


def test_a_pool_that_is_not_there_is_refused():
    decisions = schedule(Snapshot(cluster(1, 1, 8, POOLS[:1]), queue=(Gang("g", 1, wants=Wants(pool="a'; --")),)))
    assert "no pool" in decisions.never["g"].message


def test_the_entitled_go_before_the_borrowers():
    queue = (
        Gang("borrows", 16, 0.0, wants=Wants(pool="vision", preemptible=True)),
        Gang("owner", 8, 1.0, wants=Wants(pool="speech")),
    )
    assert schedule(Snapshot(cluster(1, 2, 8, POOLS), queue=queue)).order == ("owner", "borrows")


def test_hived_a_guaranteed_gang_takes_its_whole_hosts_back_from_opportunistic_ones():
    """HiveD (OSDI '20): low-priority jobs use what a tenant leaves, and never cost it its topology."""
    pools = (Pool("tenant", 16), Pool("other", 16))
    low = [
        runs(
            Gang(f"low{n}", 1, float(n), wants=Wants(pool="other", preemptible=True)),
            (f"r0h{n % 4}", [n // 4]),
            granted_s=n / 10,
        )
        for n in range(32)
    ]
    queue = (Gang("gang", 16, 99.0, wants=Wants(pool="tenant", constraints=Constraints(gpus_per_host=8))),)
    decisions = schedule(Snapshot(cluster(1, 4, 8, pools), tuple(low), queue, now_s=HOUR))
    assert len(decisions.preempts) == 16
    assert [len(grant.gpus) for grant in decisions.kept["gang"].placement.grants] == [8, 8]


def test_hived_small_gangs_share_hosts_so_that_whole_ones_remain():
    queue = (*(Gang(f"one{n}", 1, float(n)) for n in range(8)), Gang("sixteen", 16, 99.0))
    decisions = schedule(Snapshot(cluster(1, 3, 8), queue=queue))
    assert started(decisions)[-1] == "sixteen"
    assert {placement.hosts for gang, placement in decisions.starts if gang.gpus == 1} == {("r0h0",)}

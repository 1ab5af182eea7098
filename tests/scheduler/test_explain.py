"""Explanations: read off the decision, and every change they offer really starts the gang."""

from dataclasses import replace

import pytest

from gpurun.inventory.model import Host, Inventory, Pool, Rack
from gpurun.jobs.spec import Constraints, Grant, Placement, Wants
from gpurun.scheduler.explain import explain, lines
from gpurun.scheduler.model import DEFAULT, Gang, Running, Snapshot
from gpurun.scheduler.passes import schedule


def cluster(racks, hosts, gpus, pools=()):
    found = tuple(
        Host(f"r{r}h{h}", f"r{r}", "volta" if r == 9 else "pascal", gpus, "tcp") for r in racks for h in range(hosts)
    )
    names = {f"r{r}": tuple(host.name for host in found if host.rack == f"r{r}") for r in racks}
    return Inventory(found, tuple(Rack(name, hosts) for name, hosts in names.items()), {}, pools)


def runs(gang, *grants, granted_s=0.0):
    placed = tuple(Grant(host, tuple(gpus)) for host, gpus in grants)
    return Running(gang, Placement("pascal", ("r0",), placed), granted_s, granted_s)


def why(snapshot, gang):
    return explain(schedule(snapshot), snapshot, gang)


def busy(*queue, **more):
    """Two hosts of 4: one full until 100 s, 2 GPUs free on the other for ever."""
    running = (
        runs(Gang("short", 4, wants=Wants(time_limit_s=100.0)), ("r0h0", range(4))),
        runs(Gang("endless", 2), ("r0h1", range(2))),
    )
    return Snapshot(cluster([0], 2, 4), running, queue, now_s=10.0, **more)


def test_why_a_gang_waits():
    found = why(busy(Gang("g", 4, 1.0)), "g")
    assert found.state == "waits"
    assert found.position == 1
    assert found.expected_start_s == 100.0
    assert [(group.hosts, group.free) for group in found.groups] == [(("r0h1",), 2), (("r0h0",), 0)]
    assert [(holder.gang, holder.gpus, holder.free_s) for holder in found.holders] == [
        ("short", 4, 100.0),
        ("endless", 2, None),
    ]
    assert [(change.what, change.value) for change in found.changes] == [("gpus", "2")]


def test_expected_start_behind_others():
    queue = (
        Gang("first", 4, 1.0, wants=Wants(time_limit_s=50.0)),
        Gang("second", 6, 2.0, wants=Wants(time_limit_s=30.0)),
        Gang("third", 4, 3.0),
    )
    found = why(busy(*queue), "third")
    assert found.ahead == ("first", "second")
    assert found.expected_start_s == 180.0


def test_nobody_can_know_when_endless_gangs_end():
    assert why(busy(Gang("g", 8, 1.0)), "g").expected_start_s is None


@pytest.mark.parametrize(
    ("constraints", "what", "value"),
    [
        (Constraints(generations=("pascal",)), "generation", "volta"),
        (Constraints(hosts=("r0h0",)), "hosts", "any"),
        (Constraints(generations=("pascal",), locality="host"), "generation", "volta"),
    ],
)
def test_other_constraints_that_would_start_it(constraints, what, value):
    running = (runs(Gang("r", 6), ("r0h0", range(4)), ("r0h1", range(2))),)
    snapshot = Snapshot(cluster([0, 9], 2, 4), running, (Gang("g", 4, wants=Wants(constraints=constraints)),))
    assert (what, value) in [(change.what, change.value) for change in why(snapshot, "g").changes]


def test_locality_that_would_start_it():
    running = (runs(Gang("r", 4), ("r0h0", range(2)), ("r0h1", range(2))),)
    snapshot = Snapshot(
        cluster([0], 2, 4), running, (Gang("g", 4, wants=Wants(constraints=Constraints(locality="host"))),)
    )
    assert [change.value for change in why(snapshot, "g").changes if change.what == "locality"] == ["rack", "any"]


def test_a_time_limit_that_would_start_it():
    snapshot = busy(Gang("first", 6, 1.0, wants=Wants(time_limit_s=9.0)), Gang("g", 2, 2.0))
    changes = {change.what: change.value for change in why(snapshot, "g").changes}
    assert changes["time_limit"] == "90s"
    assert changes["priority"] == "1"


def test_a_cordoned_host_that_would_start_it():
    snapshot = replace(busy(Gang("g", 2, 1.0)), unusable={"r0h1": "cordoned: fan"})
    found = why(snapshot, "g")
    assert [(group.why, group.hosts) for group in found.groups if "cordoned" in group.why] == [
        ("cordoned: fan", ("r0h1",))
    ]
    assert ("uncordon", "r0h1") in [(change.what, change.value) for change in found.changes]


def test_a_host_that_is_out_is_not_uncordoned():
    snapshot = replace(busy(Gang("g", 2, 1.0)), unusable={"r0h1": "out: no route to host"})
    assert ("repair", "r0h1") in [(change.what, change.value) for change in why(snapshot, "g").changes]
    snapshot = replace(busy(Gang("g", 6, 1.0)), unusable={"r0h0": "cordoned: fan", "r0h1": "out: no route to host"})
    assert not [change for change in why(snapshot, "g").changes if change.what == "uncordon" and "r0h1" in change.value]


def test_a_pool_that_would_start_it():
    inventory = cluster([0], 2, 4, (Pool("a", 2, 4), Pool("b", 4)))
    running = (runs(Gang("r", 2, wants=Wants(pool="a")), ("r0h0", range(2))),)
    snapshot = Snapshot(inventory, running, (Gang("g", 2, wants=Wants(pool="a")),))
    found = why(snapshot, "g")
    assert found.pool.used == 2
    assert {("pool", "a.reservation=4"), ("preemptible", "true")} <= {(c.what, c.value) for c in found.changes}


def test_what_starts_runs_or_is_nowhere():
    snapshot = busy(Gang("g", 2, 1.0))
    assert why(snapshot, "g").placement.hosts == ("r0h1",)
    assert why(snapshot, "short").state == "runs"
    assert why(snapshot, "a'; --").state == "unknown"
    assert why(busy(Gang("g", 99)), "g").state == "never"


def test_what_can_never_start_has_no_place_in_the_queue_and_hosts_are_told_as_they_are():
    snapshot = busy(Gang("huge", 99, 1.0), Gang("g", 8, 2.0), unusable={"r0h1": "lost"})
    text = said(snapshot, "huge")
    assert "huge can never start: the job needs 99 GPUs" in text and "place in the queue" not in text
    assert "r0h0: pascal: all GPUs are in use" in text and "r0h1: lost" in text
    assert "place in the queue: 1\n" in said(snapshot) and "huge" not in said(snapshot)


def test_every_change_that_is_offered_starts_it():
    queue = (
        Gang("first", 6, 1.0),
        Gang("g", 5, 2.0, wants=Wants(constraints=Constraints(locality="host", gpus_per_host=5))),
    )
    found = why(busy(*queue), "g")
    assert found.state == "never"  # no host has 5
    found = why(
        busy(Gang("first", 6, 1.0), Gang("g", 4, 2.0, wants=Wants(constraints=Constraints(locality="host")))), "g"
    )
    gang = next(gang for gang in busy(*queue).queue if gang.id == "g")
    for change in found.changes:
        if change.what == "gpus":
            snapshot = busy(Gang("first", 6, 1.0), gang.but(gpus=int(change.value)).wanting(constraints=Constraints()))
            assert [g.id for g, _ in schedule(snapshot).starts] == ["g"]


def said(snapshot, gang="g", now_s=10.0):
    return "\n".join(lines(why(snapshot, gang), now_s=now_s, fold=",".join))


def test_words_say_what_an_expected_start_depends_on():
    assert "in 1m30s if running jobs use their whole time limits" in said(busy(Gang("g", 4, 1.0)))
    assert "unknown: the start depends on jobs without a time limit" in said(busy(Gang("g", 8, 1.0)))


def test_gangs_have_the_names_that_people_know():
    found = why(busy(Gang("ahead", 8, 1.0), Gang("g", 8, 2.0)), "g")
    text = "\n".join(lines(found, now_s=10.0, fold=",".join, named=lambda gang: f"job of {gang}"))
    assert "behind job of ahead" in text
    assert found.holders and all(f"job of {holder.gang}: {holder.gpus} GPUs" in text for holder in found.holders)


def test_a_gang_that_waits_for_lost_hosts_is_told_so_though_nothing_runs():
    snapshot = Snapshot(cluster([0], 2, 4), (), (Gang("g", 8),), {"r0h1": "lost"}, now_s=10.0)
    text = said(snapshot)
    assert "unknown: the start depends on hosts that are out of use" in text and "time limit" not in text
    foreign = Snapshot(cluster([0], 1, 4), (), (Gang("g", 4),), taken={"r0h0": (0,)})
    assert "that other programs hold" in said(foreign)


def test_a_gang_that_waits_for_lost_hosts_is_told_so_though_others_run_where_it_could():
    """That they end is not enough: it would not fit."""
    endless = runs(Gang("r", 2), ("r0h0", range(2)))
    snapshot = Snapshot(cluster([0], 2, 4), (endless,), (Gang("g", 8),), {"r0h1": "lost"}, now_s=10.0)
    text = said(snapshot)
    assert "unknown: the start depends on hosts that are out of use" in text and "depends on jobs" not in text


def test_while_a_gang_stops_the_start_is_expected_after_grace_and_fence():
    stops = Running(Gang("s", 4, stop_allowance_s=30.0), runs(Gang("s", 4), ("r0h0", range(4))).placement, 0.0, 0.0)
    snapshot = Snapshot(cluster([0], 1, 4), (replace(stops, stopping=True),), (Gang("g", 4),), now_s=10.0)
    assert "expected start: in 30s when the stopping jobs have ended" in said(snapshot)


def test_a_gang_without_a_limit_beside_one_that_stops_promises_no_time_limit():
    stops = replace(runs(Gang("s", 4, stop_allowance_s=30.0), ("r0h0", range(4))), stopping=True)
    endless = runs(Gang("endless", 4), ("r0h1", range(4)))
    snapshot = Snapshot(cluster([0], 2, 4), (stops, endless), (Gang("g", 4),), now_s=10.0)
    text = said(snapshot)
    assert "expected start: in 30s when the stopping jobs have ended" in text
    assert (
        "gpurun keeps r0h0 for the job until the stopping jobs have ended there" in text and "time limits" not in text
    )
    limited = replace(
        snapshot, running=(replace(stops, stopping=False, gang=stops.gang.wanting(time_limit_s=60)), endless)
    )
    assert "gpurun keeps r0h0 for the job until time limits end there" in said(limited)


def test_the_expected_end_of_a_gang_that_stops_comes_nearer():
    stops = Running(Gang("s", 4, stop_allowance_s=30.0), runs(Gang("s", 4), ("r0h0", range(4))).placement, 0.0, 0.0)
    told = replace(stops, stopping=True, told_s=10.0)
    snapshot = Snapshot(cluster([0], 1, 4), (told,), (Gang("g", 4),), now_s=35.0)
    assert "expected start: in 5s when the stopping jobs have ended" in said(snapshot, now_s=35.0)
    late = replace(snapshot, now_s=300.0)
    assert "expected start: soon:" in said(late, now_s=300.0)
    odd = replace(snapshot, running=(replace(told, told_s=1e9),))
    assert "expected start: in 30s" in said(odd, now_s=35.0), "the head's clock was set back"


def test_a_gang_behind_two_that_stop_one_after_the_other_is_told_when_the_last_has_ended():
    stops = [
        replace(runs(Gang(f"s{n}", 4, stop_allowance_s=n), (f"r0h{n // 20}", range(4))), stopping=True, told_s=10.0)
        for n in (10, 30)
    ]
    snapshot = Snapshot(cluster([0], 2, 4), tuple(stops), (Gang("g", 8),), now_s=10.0)
    assert "expected start: in 30s when" in said(snapshot)


def test_a_holder_that_prepares_or_is_overdue_is_said_to_be():
    run = Running(Gang("p", 4, wants=Wants(time_limit_s=100.0)), runs(Gang("p", 4), ("r0h0", range(4))).placement, 0.0)
    snapshot = Snapshot(cluster([0], 1, 4), (run,), (Gang("g", 4),), now_s=10.0)
    assert "prepares; its time limit does not count yet" in said(snapshot)
    late = replace(snapshot, running=(replace(run, running_s=0.0),), now_s=500.0)
    assert "should have ended by its time limit" in said(late, now_s=500.0)
    assert "soon:" in said(late, now_s=500.0)


def test_pools_are_named_when_they_give_back():
    inventory = cluster([0], 1, 8, (Pool("a", 4),))
    lends = replace(runs(Gang("l", 8, wants=Wants(preemptible=True)), ("r0h0", range(8))), granted_s=-1e6)
    (preemption,) = schedule(Snapshot(inventory, (lends,), (Gang("g", 4, wants=Wants(pool="a")),), now_s=10.0)).preempts
    assert "None" not in preemption.message
    assert "of pool a is entitled to them" in preemption.message


LATE_S = 1.5 * DEFAULT.patience_s


def pool_where_nothing_runs(*queue):
    """Each of two hosts has 2 of 4 GPUs free, for ever, and nobody of pool `a` runs."""
    endless = runs(Gang("e", 4, wants=Wants(pool="b")), ("r0h0", range(2)), ("r0h1", range(2)))
    return Snapshot(cluster([0], 2, 4, (Pool("a", 4, 4), Pool("b", 4))), (endless,), queue, now_s=LATE_S)


def test_what_a_pool_keeps_for_a_gang_is_not_said_to_be_in_use():
    first = Gang("first", 4, 1.0, wants=Wants(pool="a", constraints=Constraints(locality="host")))
    snapshot = pool_where_nothing_runs(first, Gang("g", 2, 2.0, wants=Wants(pool="a")))
    text = said(snapshot, now_s=LATE_S)
    assert "0 of the 4 GPUs that pool a reserves are in use" in text and "4 are kept for first" in text
    assert "expected start: in 5d00h" in text, "then enough has been kept for first"
    assert why(snapshot, "g").behind == "first"
    limited = [gang.wanting(preemptible=True) for gang in snapshot.queue]
    text = said(replace(snapshot, queue=tuple(limited)), now_s=LATE_S)
    assert "pool a uses 0 of at most 4 GPUs; 4 are kept for first" in text


def test_what_a_pool_sets_aside_for_a_gang_depends_on_that_gang():
    first = Gang("first", 4, 1.0, wants=Wants(pool="a", constraints=Constraints(locality="host")))
    snapshot = pool_where_nothing_runs(first, Gang("g", 2, 2.0, wants=Wants(pool="a", priority=9)))
    text = said(snapshot, now_s=LATE_S)
    assert "for first, which has waited longest" in text
    assert "expected start: in 5d00h" in text


def test_a_gang_that_waits_for_gpus_kept_for_another_is_told_for_which():
    first = Gang("first", 8, 1.0)
    endless = runs(Gang("e", 1), ("r0h0", (0,)))
    queue = (first, Gang("g", 2, 2.0, wants=Wants(constraints=Constraints(hosts=("r0h1",)))))
    snapshot = Snapshot(cluster([0], 2, 4), (endless,), queue, now_s=LATE_S)
    text = said(snapshot, now_s=LATE_S)
    assert "unknown: the start depends on first, for which GPUs are kept" in text
    assert "gpurun keeps GPUs of r0h0 and 1 more host for the job" in said(snapshot, "first", now_s=LATE_S)


def test_the_pool_whose_limit_is_reached_is_named():
    pools = (Pool("org", 4, 4), Pool("x", 0, parent="org"), Pool("y", 0, parent="org"))
    endless = runs(Gang("e", 4, wants=Wants(pool="y")), ("r0h0", range(4)))
    snapshot = Snapshot(
        cluster([0], 2, 4, pools), (endless,), (Gang("g", 2, 2.0, wants=Wants(pool="x", preemptible=True)),)
    )
    text = said(snapshot)
    assert "pool org uses 4 of at most 4 GPUs" in text
    assert "unknown: the start depends on jobs of pool org without a time limit" in text


def test_a_start_that_only_time_brings_promises_no_time_limits():
    """It prefers one rack for a while, and nothing runs."""
    near = Constraints(prefer="rack", locality_wait_s=300.0)
    snapshot = Snapshot(cluster([0, 1], 1, 4), (), (Gang("g", 8, 10.0, wants=Wants(constraints=near)),), now_s=10.0)
    text = said(snapshot)
    assert "expected start: in 5m00s\n" in text and "time limits" not in text
    endless = runs(Gang("e", 8, wants=Wants(pool="b", preemptible=True)), ("r0h0", range(4)), ("r0h1", range(4)))
    snapshot = Snapshot(
        cluster([0], 2, 4, (Pool("a", 8),)), (endless,), (Gang("g", 4, wants=Wants(pool="a")),), now_s=10.0
    )
    borrows = replace(endless, gang=endless.gang.wanting(pool=None))
    text = said(replace(snapshot, running=(borrows,)))
    assert "expected start: in 14m50s" in text and "time limits" not in text, "it will be preempted"


def test_lost_gpus_are_not_said_to_be_another_inventorys():
    snapshot = Snapshot(cluster([0], 1, 4), (), (Gang("g", 4),), taken={"r0h0": (0,)})
    assert "GPUs that are lost or that other programs hold; `gpurun status` shows these GPUs" in said(snapshot)


@pytest.mark.parametrize("name", ["g", "a'; touch /tmp/x #", "ü\n"])
def test_one_screen_of_lines(name):
    queue = tuple(Gang(f"{name}{n}", 4, float(n)) for n in range(40))
    snapshot = busy(*queue)
    found = why(snapshot, f"{name}39")
    text = lines(found, now_s=10.0, fold=",".join)
    assert len(text) <= 24
    assert any("expected start" in line for line in text)

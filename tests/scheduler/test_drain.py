"""What becomes of gangs on hosts that are being drained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import cluster, runs

from gpurun.inventory.model import Fabric, FabricKind, Pool
from gpurun.jobs.spec import Constraints, Grant, Wants
from gpurun.scheduler.explain import Tenant, departures, host_state, in_words, may_lose
from gpurun.scheduler.model import Gang, Snapshot
from gpurun.scheduler.passes import growth, schedule

TCP = {"tcp": Fabric("tcp", FabricKind.TCP, "eth0")}
FOUR = cluster(racks=1, hosts=4, gpus=4)


def tenant(gang, *grants, drained=("r0h0",), may_restart=False, **more):
    members = tuple(Grant(host, tuple(gpus)) for host, gpus in grants) or (Grant("r0h0", (0, 1, 2, 3)),)
    return Tenant(gang.wanting(max_restarts=1) if may_restart else gang, members, drained, **more)


def one(found_tenant, *, inventory=FOUR, also_unusable=(), until_s=None, now_s=100.0):
    draining = dict.fromkeys(found_tenant.hosts, until_s)
    (found,) = departures(inventory, {*draining, *also_unusable}, draining, [found_tenant], now_s)
    return found


def test_a_gang_moves_if_it_may_be_restarted_or_preempted_and_is_waited_for_otherwise():
    assert one(tenant(Gang("j", 4), may_restart=True)).fate == "moves"
    assert one(tenant(Gang("j", 4, wants=Wants(preemptible=True)))).fate == "moves"
    waited = one(tenant(Gang("j", 4)))
    assert (waited.fate, waited.until_s) == ("waits", None)
    assert "max_restarts is 0" in waited.why


def test_a_gang_whose_containers_do_not_exist_yet_has_nothing_to_lose_and_moves():
    assert one(tenant(Gang("j", 4), begun=False)).fate == "moves"


def test_an_elastic_gang_that_cannot_release_hosts_moves_and_one_that_can_shrinks():
    members = ("r0h0", range(4)), ("r0h1", range(4))
    elastic = Gang("j", 8, wants=Wants(min_gpus=4))
    assert one(tenant(elastic, *members, drained=("r0h1",))).fate == "shrinks"
    assert one(tenant(elastic.wanting(reforms=True), *members, drained=("r0h1",))).fate == "moves"


@pytest.mark.parametrize(
    "gang",
    [
        Gang("too large", 16),
        Gang("named host", 4, wants=Wants(constraints=Constraints(hosts=("r0h0",)))),
        Gang("no such kind", 4, wants=Wants(constraints=Constraints(gpu_model="b'; rm -rf"))),
    ],
)
def test_a_gang_that_no_other_hosts_could_run_is_waited_for(gang):
    found = one(tenant(gang, may_restart=True))
    assert found.fate == "waits" and "no other hosts could run the job" in found.why


def test_hosts_that_are_out_of_use_for_another_reason_do_not_count_as_a_place_to_go():
    assert one(tenant(Gang("j", 12), may_restart=True)).fate == "moves"
    assert one(tenant(Gang("j", 12), may_restart=True), also_unusable=["r0h3"]).fate == "waits"


def test_it_needs_only_to_fit_not_to_find_free_gpus_or_one_rack():
    """Gangs that run elsewhere end some day. A preference for one rack is none."""
    two = cluster(racks=2, hosts=2, gpus=4)
    near = Constraints(prefer="rack", locality_wait_s=1e6)
    assert one(tenant(Gang("j", 8, wants=Wants(constraints=near)), may_restart=True), inventory=two).fate == "moves"


def test_a_gang_whose_pool_would_not_start_it_again_is_waited_for():
    pools = (Pool("vision", reservation=2, limit=2),)
    limited = cluster(racks=1, hosts=4, gpus=4, pools=pools)
    assert one(tenant(Gang("j", 2, wants=Wants(pool="vision")), may_restart=True), inventory=limited).fate == "moves"
    assert one(tenant(Gang("j", 4, wants=Wants(pool="vision")), may_restart=True), inventory=limited).fate == "waits"
    gone = one(tenant(Gang("j", 2, wants=Wants(pool="no'; such")), may_restart=True), inventory=limited)
    assert gone.fate == "waits" and "there is no pool" in gone.why


def test_an_elastic_gang_releases_the_host_if_its_others_are_enough_and_its_launcher_is_not_there():
    grants = [("r0h1", (0, 1)), ("r0h0", (0, 1))]
    assert one(tenant(Gang("j", 4, wants=Wants(min_gpus=2)), *grants)).fate == "shrinks"
    assert one(tenant(Gang("j", 4, wants=Wants(min_gpus=3)), *grants)).fate == "waits"
    assert one(tenant(Gang("j", 4, wants=Wants(min_gpus=3)), *grants, may_restart=True)).fate == "moves"
    assert one(tenant(Gang("j", 4, wants=Wants(min_gpus=2)), *reversed(grants))).fate == "waits"
    assert not may_lose([], ["r0h0"], 1), "a gang without members can lose none"


def test_a_gang_that_is_ending_is_left_alone():
    assert one(tenant(Gang("j", 4, wants=Wants(preemptible=True)), stopping=True)).fate == "stops"
    assert one(tenant(Gang("j", 4), stopping=True), until_s=1.0).fate == "stops"


def test_the_deadline_ends_whom_the_drain_waits_for_and_nobody_else():
    stays = tenant(Gang("j", 4))
    assert one(stays, until_s=100.5).fate == "waits"
    assert one(stays, until_s=100.5).until_s == 100.5
    assert one(stays, until_s=100.0).fate == "ends"
    assert one(stays, until_s=-1e300).fate == "ends"
    assert one(tenant(Gang("j", 4), may_restart=True), until_s=1.0).fate == "moves"
    assert (
        one(tenant(Gang("j", 4, wants=Wants(min_gpus=2)), ("r0h1", (0, 1)), ("r0h0", (0, 1))), until_s=1.0).fate
        == "shrinks"
    )


def test_of_two_hosts_with_deadlines_the_earlier_one_counts():
    both = tenant(Gang("j", 8), ("r0h0", (0,)), ("r0h1", (0,)), drained=("r0h0", "r0h1"))
    (found,) = departures(FOUR, {"r0h0", "r0h1"}, {"r0h0": 500.0, "r0h1": 300.0}, [both], 100.0)
    assert (found.fate, found.until_s) == ("waits", 300.0)


def test_a_host_says_how_many_leave_and_how_many_are_waited_for():
    gangs = [
        tenant(Gang("a", 1, wants=Wants(preemptible=True))), tenant(Gang("b", 1), may_restart=True),
        tenant(Gang("c", 1)),
    ]  # fmt: skip
    found = departures(FOUR, {"r0h0"}, {"r0h0": None}, gangs, 1.0)
    assert host_state("r0h0", found, is_empty=False) == "draining: 2 gangs leave, 1 must end first"
    assert host_state("r0h0", found[1:], is_empty=False) == "draining: 1 gang leaves, 1 must end first"
    assert host_state("r0h0", found[2:], is_empty=False) == "draining: 1 must end first"
    assert host_state("r0h1", found, is_empty=False) == "draining", "somebody else's gpurun holds its GPUs"
    assert host_state("r0h0", (), is_empty=True) == "drained"


def test_each_fate_has_words():
    waits = one(tenant(Gang("c", 1)), until_s=161.0)
    assert in_words(waits, 102.0).startswith(
        "must end before the drain is complete, and is stopped in 59s if it still runs"
    )
    assert "and is stopped in 1h00m if" in in_words(replace(waits, until_s=3700.0), 100.0)
    assert "deadline is over" in in_words(one(tenant(Gang("c", 1)), until_s=1.0), 100.0)
    assert in_words(one(tenant(Gang("c", 1), may_restart=True)), 0.0) == (
        "stops, is queued again and continues on other hosts"
    )


def test_a_draining_host_gets_no_new_gang_and_no_growth():
    unusable = {"r0h0": "draining: fan", "r0h1": "draining"}
    started = schedule(Snapshot(FOUR, queue=(Gang("q", 8),), unusable=unusable)).starts
    assert [grant.host for _, placed in started for grant in placed.grants] == ["r0h2", "r0h3"]
    assert not schedule(Snapshot(FOUR, queue=(Gang("q", 12),), unusable=unusable)).starts
    elastic = Gang("e", 16, wants=Wants(min_gpus=4))
    now, wired = runs(elastic.sized(4), ("r0h2", (0, 1, 2, 3))), replace(FOUR, fabrics=TCP)
    grown = growth(Snapshot(wired, running=(now,), unusable=unusable), elastic, now.placement)
    assert grown is not None and grown.hosts == ("r0h3",)
    all_others = {**unusable, "r0h3": "draining"}
    assert growth(Snapshot(wired, running=(now,), unusable=all_others), elastic, now.placement) is None

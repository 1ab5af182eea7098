"""Hosts without GPUs carry the servers of gangs: which of them, and what becomes of a gang if none can be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import cluster, runs
from hypothesis import given
from hypothesis import strategies as st

from gpurun.inventory.model import Host
from gpurun.jobs.spec import Constraints, Grant, Roles, Wants
from gpurun.scheduler.explain import Tenant, departures, explain
from gpurun.scheduler.model import Gang, Reason, Snapshot
from gpurun.scheduler.passes import schedule

GPUS = cluster(2, 2, 4)
CPUS = (
    Host("c0", "r0", "none", 0, "tcp", labels={"role": "ps"}),
    Host("c1", "r1", "none", 0, "tcp", labels={"role": "ps"}),
    Host("c2", "r1", "none", 0, "tcp"),
)
BOTH = replace(GPUS, hosts=(*CPUS[:1], *GPUS.hosts, *CPUS[1:]))


def gang(name="a", gpus=4, servers=1, hosts=("role=ps",), avoid=(), **more):
    return Gang(name, gpus, avoid=avoid, wants=Wants(roles=Roles(ps=servers, ps_hosts=hosts), **more))


def started(*gangs, inventory=BOTH, **seen):
    decisions = schedule(Snapshot(inventory, queue=gangs, **seen))
    return {found.id: [*placement.grants] for found, placement in decisions.starts}, decisions


def servers_of(grants):
    return [grant.host for grant in grants if not grant.gpus]


def test_servers_come_behind_the_gpus_and_a_rack_of_the_gang_is_preferred():
    found, _ = started(gang(constraints=Constraints(hosts=("r1h0",))))
    assert found["a"] == [Grant("r1h0", (0, 1, 2, 3)), Grant("c1", ())]


def test_as_many_hosts_as_servers_but_no_more_than_there_are():
    for servers, hosts in ((1, ["c0"]), (2, ["c0", "c1"]), (9, ["c0", "c1"])):
        assert servers_of(started(gang(servers=servers))[0]["a"]) == hosts


def test_gangs_of_one_pass_and_of_earlier_ones_share_hosts_evenly():
    first = runs(Gang("x", 4, wants=Wants(roles=Roles(ps=1))), ("r0h0", range(4)), ("c0", ()))
    found, _ = started(gang("a"), gang("b"), gang("c"), running=(first,))
    hosts = [host for name in "abc" for host in servers_of(found[name])]
    assert sorted(["c0", *hosts]) == ["c0", "c0", "c1", "c1"]


def test_a_host_it_failed_on_comes_last():
    assert servers_of(started(gang(avoid=("c0",)))[0]["a"]) == ["c1"]
    assert servers_of(started(gang(avoid=("c0", "c1")))[0]["a"]) == ["c0"]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("nowhere",), "host 'nowhere' for parameter servers is not in the inventory"),
        (("r0h0",), "host 'r0h0' for parameter servers has GPUs"),
        (("role=db",), "no host without GPUs has the label role=db"),
        (("=", "role=ps=x"), "no host without GPUs has the label = or role=ps=x"),
    ],
)
def test_what_could_never_be_is_refused(hosts, said):
    found, decisions = started(gang(hosts=hosts))
    assert not found and decisions.never["a"].never and said in decisions.never["a"].message


def test_a_gang_whose_servers_hosts_are_out_of_use_waits_and_stops_nobody():
    unusable = {"c0": "cordoned: fan", "c1": "lost"}
    found, decisions = started(gang("a"), gang("b"), Gang("c", 16), unusable=unusable)
    assert [*found] == ["c"], "others overtake it"
    for name in "ab":
        wait = decisions.waits[name]
        assert wait.reason is Reason.HOSTS
        assert "(role=ps), and none can be used: cordoned: fan, lost" in wait.message
    seen = Snapshot(BOTH, queue=(gang("a"),), unusable=unusable)
    assert "none can be used" in explain(schedule(seen), seen, "a").message
    assert servers_of(started(gang("a"), unusable={"c0": "cordoned"})[0]["a"]) == ["c1"]


def test_a_drain_of_a_servers_host_moves_its_gang_if_there_is_another():
    members = (Grant("r0h0", (0, 1, 2, 3)), Grant("c0", ()))
    for hosts, fate in ((("role=ps",), "moves"), (("c0",), "waits")):
        tenant = Tenant(gang(hosts=hosts, max_restarts=1), members, ("c0",))
        (found,) = departures(BOTH, {"c0"}, {"c0": None}, [tenant], 0.0)
        assert found.fate == fate, found


def test_hosts_without_gpus_carry_nobody_else():
    found, decisions = started(Gang("a", 16), Gang("b", 1, wants=Wants(constraints=Constraints(hosts=("c0",)))))
    assert servers_of(found["a"]) == [] and "b" in decisions.never
    assert BOTH.generations == ("pascal",)


sizes = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 5)), min_size=1, max_size=8)


@given(sizes, st.sets(st.sampled_from(["c0", "c1", "r0h0", "r1h1"])))
def test_servers_take_no_gpu_from_anybody(wanted, out):
    with_servers = [gang(f"g{n}", gpus, servers) for n, (gpus, servers) in enumerate(wanted)]
    plain = [one.wanting(roles=None) for one in with_servers]
    unusable = dict.fromkeys(out, "cordoned")
    found, decisions = started(*with_servers, unusable=unusable)
    others, _ = started(*plain, unusable=unusable)
    assert {name: [grant for grant in grants if grant.gpus] for name, grants in found.items()} == (
        {} if {"c0", "c1"} <= out else others
    )
    for one in with_servers:
        hosts = servers_of(found.get(one.id, ()))
        assert len(hosts) == len({*hosts}) and not {*hosts} & out
        assert one.id in found or one.id in decisions.waits or one.id in decisions.never

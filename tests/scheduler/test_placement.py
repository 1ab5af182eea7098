"""Placement: exact by the stated objective, against every other answer there is."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.jobs.spec import Constraints, Placement, Wants
from gpurun.scheduler.model import Gang, Refusal, Snapshot
from gpurun.scheduler.placement import choose_gpus, place


def cluster(*racks, generation="pascal", **host):
    """Racks given as lists of GPU counts: cluster([4, 4], [4])."""
    hosts = tuple(
        Host(f"r{r}h{h}", f"r{r}", generation, gpus, "tcp", **host)
        for r, sizes in enumerate(racks)
        for h, gpus in enumerate(sizes)
    )
    return of(hosts)


def of(hosts):
    names = dict.fromkeys(host.rack for host in hosts)
    return Inventory(tuple(hosts), tuple(Rack(r, tuple(h.name for h in hosts if h.rack == r)) for r in names), {})


def with_free(inventory, free):
    """Only the lowest `free[host]` GPUs of each host are free."""
    taken = {host.name: tuple(range(free[host.name], host.gpus)) for host in inventory.hosts if host.name in free}
    return Snapshot(inventory, taken=taken)


def hosts_of(answer):
    assert isinstance(answer, Placement), answer
    return {grant.host: len(grant.gpus) for grant in answer.grants}


# the objective, by trying everything


def free_of(snapshot):
    return {h.name: h.gpus - len(snapshot.taken.get(h.name, ())) for h in snapshot.inventory.hosts}


def best_by_hand(snapshot, gang):
    """The smallest key of the documented objective over every set of hosts; None if nothing fits."""
    free, wants, best = free_of(snapshot), gang.wants.constraints, None
    order = {host.name: n for n, host in enumerate(snapshot.inventory.hosts)}
    for generation in snapshot.inventory.generations:
        if wants.generations and generation not in wants.generations:
            continue
        kin = [host for host in snapshot.inventory.hosts if host.generation == generation]
        eligible = [host for host in kin if free[host.name] and host.name not in (*wants.avoid, *gang.avoid)]
        for number in range(1, len(eligible) + 1):
            for chosen in combinations(eligible, number):
                if not enough(gang, [free[host.name] for host in chosen]):
                    continue
                racks = {host.rack for host in chosen}
                if (wants.locality == "host" and number > 1) or (wants.locality == "rack" and len(racks) > 1):
                    continue
                room = {rack: sum(free[h.name] for h in kin if h.rack == rack) for rack in racks}
                empty = sum(all(free[h.name] == h.gpus for h in kin if h.rack == rack) for rack in racks)
                key = (
                    len(racks),
                    number,
                    sorted((free[host.name] for host in chosen), reverse=True),
                    empty,
                    sum(free[host.name] == host.gpus for host in chosen),
                    sorted(room.values(), reverse=True),
                    sum(host.name not in gang.near for host in chosen),
                    sorted(order[host.name] for host in chosen),
                )
                best = key if best is None or key < best else best
    return best


def enough(gang, frees):
    per_host = gang.wants.constraints.gpus_per_host
    if per_host:
        return len(frees) * per_host == gang.gpus and min(frees) >= per_host
    return sum(frees) >= gang.gpus


def key_of(snapshot, answer, near=frozenset()):
    free, inventory = free_of(snapshot), snapshot.inventory
    chosen = [inventory.by_name[grant.host] for grant in answer.grants]
    kin = [host for host in inventory.hosts if host.generation == answer.generation]
    room = {rack: sum(free[h.name] for h in kin if h.rack == rack) for rack in answer.racks}
    order = {host.name: n for n, host in enumerate(inventory.hosts)}
    return (
        len(answer.racks),
        len(chosen),
        sorted((free[host.name] for host in chosen), reverse=True),
        sum(all(free[h.name] == h.gpus for h in kin if h.rack == rack) for rack in answer.racks),
        sum(free[host.name] == host.gpus for host in chosen),
        sorted(room.values(), reverse=True),
        sum(host.name not in near for host in chosen),
        sorted(order[host.name] for host in chosen),
    )


@st.composite
def situations(draw):
    hosts = []
    for rack in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(1, 3))):
            generation = draw(st.sampled_from(["pascal", "pascal", "volta"]))
            hosts.append(Host(f"r{rack}h{number}", f"r{rack}", generation, draw(st.sampled_from([2, 4, 4, 8])), "tcp"))
    inventory = of(hosts)
    free = {host.name: draw(st.integers(0, host.gpus)) for host in hosts}
    wants = Constraints(
        generations=draw(st.sampled_from([(), ("pascal",), ("volta",)])),
        gpus_per_host=draw(st.sampled_from([None, None, 1, 2, 4])),
        locality=draw(st.sampled_from(["any", "any", "rack", "host"])),
        avoid=draw(st.sampled_from([(), ("r0h0",)])),
    )
    near = draw(st.frozensets(st.sampled_from([*free, "a host that is gone"])))
    return with_free(inventory, free), Gang("g", draw(st.integers(1, 20)), near=near, wants=Wants(constraints=wants))


@examples("placements, by brute force")
@given(situations())
def test_brute_force_finds_no_better_answer(situation):
    snapshot, gang = situation
    best, answer = best_by_hand(snapshot, gang), place(snapshot, gang)
    if best is None:
        assert isinstance(answer, Refusal)
        return
    assert isinstance(answer, Placement)
    assert key_of(snapshot, answer, gang.near) == best
    check(snapshot, gang, answer)


@examples("placements near data")
@given(situations())
def test_hosts_with_data_change_nothing_but_the_choice_among_equals(situation):
    snapshot, gang = situation
    answer, without = place(snapshot, gang), place(snapshot, gang.but(near=frozenset()))
    assert type(answer) is type(without)
    if isinstance(answer, Placement):
        assert key_of(snapshot, answer)[:-2] == key_of(snapshot, without)[:-2]
        assert sum(host in gang.near for host in answer.hosts) >= sum(host in gang.near for host in without.hosts)


def check(snapshot, gang, answer):
    """All of the gang, only free GPUs, one generation, ranks in rack order."""
    assert answer.gpus == gang.gpus
    by_name, racks = snapshot.inventory.by_name, []
    for grant in answer.grants:
        host = by_name[grant.host]
        assert host.generation == answer.generation
        assert list(grant.gpus) == sorted(set(grant.gpus))
        assert set(grant.gpus) <= set(range(host.gpus)) - set(snapshot.taken.get(grant.host, ()))
        racks.append(host.rack)
    assert tuple(dict.fromkeys(racks)) == answer.racks
    assert len([rack for n, rack in enumerate(racks) if n == 0 or racks[n - 1] != rack]) == len(answer.racks)


@examples("racks with free GPUs")
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 12))
def test_the_largest_gangs_stay_possible(free, gpus):
    """In one rack: no way to use as few hosts leaves more GPUs on one host, then on two, and so on."""
    inventory = cluster([4] * len(free))
    names = [host.name for host in inventory.hosts]
    answer = place(with_free(inventory, dict(zip(names, free, strict=True))), Gang("g", gpus))
    if isinstance(answer, Refusal):
        assert sum(free) < gpus
        return
    used = {grant.host: len(grant.gpus) for grant in answer.grants}
    left = sorted((f - used.get(name, 0) for name, f in zip(names, free, strict=True)), reverse=True)
    for split in product(*(range(f + 1) for f in free)):
        if sum(split) == gpus and sum(s > 0 for s in split) <= len(used):
            assert sorted((f - s for f, s in zip(free, split, strict=True)), reverse=True) <= left


@pytest.mark.parametrize(
    ("racks", "free", "gpus", "expected"),
    [
        pytest.param([[8, 8, 8]], {"r0h0": 3, "r0h1": 5}, 3, {"r0h0": 3}, id="tightest host"),
        pytest.param([[8, 8, 8]], {"r0h0": 2, "r0h1": 2}, 4, {"r0h2": 4}, id="one host before tight ones"),
        pytest.param([[4, 4], [4, 4]], {"r0h0": 0}, 4, {"r0h1": 4}, id="an empty rack stays whole"),
        pytest.param([[4, 4], [4, 4]], {"r0h0": 3, "r1h0": 1}, 8, {"r0h0": 3, "r0h1": 4, "r1h0": 1}, id="two racks"),
        pytest.param([[4, 4], [8]], {"r1h0": 5}, 5, {"r1h0": 5}, id="one host before two"),
        pytest.param([[4, 4], [4, 4]], {"r0h0": 2, "r1h0": 2}, 6, {"r0h0": 2, "r0h1": 4}, id="first of equal racks"),
        pytest.param([[8, 8, 8]], {"r0h0": 6, "r0h1": 6}, 12, {"r0h0": 6, "r0h1": 6}, id="the empty host stays whole"),
        pytest.param([[4, 8]], {"r0h1": 4}, 4, {"r0h1": 4}, id="a part-used host before an empty one as free"),
    ],
)
def test_published_rules(racks, free, gpus, expected):
    if free == {"r0h0": 3, "r1h0": 1}:  # rack 0 has 7 free, rack 1 has 5: 8 needs both
        answer = place(with_free(cluster(*racks), free), Gang("g", gpus))
        assert answer.racks == ("r0", "r1")
        assert answer.gpus == gpus
        assert len(answer.grants) == 2
        return
    assert hosts_of(place(with_free(cluster(*racks), free), Gang("g", gpus))) == expected


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, {"r0h0": 2}),
        (4, {"r1h0": 4}),
        (8, {"r1h1": 8}),
        (12, {"r1h0": 4, "r1h1": 8}),
        (16, {"r2h0": 8, "r2h1": 8}),
    ],
)
def test_the_picture_in_the_documentation(gpus, expected):
    snapshot = with_free(cluster([8, 8], [8, 8], [8, 8]), {"r0h0": 2, "r0h1": 5, "r1h0": 4})
    assert hosts_of(place(snapshot, Gang("g", gpus))) == expected


def test_gpus_per_host_takes_the_tightest_hosts_that_are_enough():
    snapshot = with_free(cluster([8, 8, 8, 8]), {"r0h0": 2, "r0h1": 5, "r0h2": 1})
    assert hosts_of(place(snapshot, Gang("g", 4, wants=Wants(constraints=Constraints(gpus_per_host=2))))) == {
        "r0h0": 2,
        "r0h1": 2,
    }


def test_a_gang_never_mixes_generations():
    hosts = (Host("a", "r", "pascal", 4, "tcp"), Host("b", "r", "volta", 4, "tcp"))
    answer = place(Snapshot(of(hosts)), Gang("g", 6))
    assert isinstance(answer, Refusal)
    assert answer.never
    assert "at most 4" in answer.message


def test_memory_that_the_inventory_does_not_say_is_never_enough():
    known = Host("a", "r", "pascal", 4, "tcp", gpu_memory_mib=16384)
    unknown = replace(known, name="b", gpu_memory_mib=None)
    gang = Gang("g", 2, wants=Wants(constraints=Constraints(min_gpu_memory_mib=16000)))
    assert hosts_of(place(Snapshot(of((unknown, known))), gang)) == {"a": 2}
    assert place(Snapshot(of((unknown,))), gang).never


ISLANDS = {"nvlink": ((0, 1, 2, 3), (4, 5, 6, 7)), "near_hca": (4, 5)}


@pytest.mark.parametrize(
    ("taken", "gpus", "expected"),
    [
        pytest.param((), 2, (4, 5), id="near the HCA"),
        pytest.param((), 4, (4, 5, 6, 7), id="a whole island"),
        pytest.param((5,), 3, (4, 6, 7), id="the island with one near"),
        pytest.param((4, 5, 0), 3, (1, 2, 3), id="the other island, although two here are far"),
        pytest.param((4, 5), 2, (6, 7), id="none near: the tighter island"),
        pytest.param((), 6, (0, 1, 2, 3, 4, 5), id="two islands if it must"),
    ],
)
def test_islands_and_the_hca(taken, gpus, expected):
    snapshot = Snapshot(cluster([8], **ISLANDS), taken={"r0h0": taken})
    assert place(snapshot, Gang("g", gpus)).grants[0].gpus == expected


def gpus_of(answer):
    return [grant.gpus for grant in answer.grants]


@pytest.mark.parametrize(
    ("taken", "gpus", "expected"),
    [
        ({"r0h1": range(6)}, 2, [(6, 7), (6, 7)]),
        ({"r0h0": (0,), "r0h1": (1, 2)}, 4, [(3, 4, 5, 6)] * 2),
        ({"r0h0": (0, 1, 2, 3), "r0h1": (4, 5, 6, 7)}, 2, [(4, 5), (0, 1)]),  # they have none in common
        ({"r0h0": (7,), "r0h1": (0, 2, 4, 6, 7)}, 3, [(1, 3, 5)] * 2),
        ({}, 3, [(0, 1, 2)] * 2),
    ],
)
def test_hosts_give_the_same_gpus_if_they_can(taken, gpus, expected):
    """Where each GPU has a NIC of its own, NCCL connects NICs of the same number without crossing switches."""
    gang = Gang("g", 2 * gpus, wants=Wants(constraints=Constraints(gpus_per_host=gpus)))
    for islands in ({}, {"nvlink": (tuple(range(8)),)}):
        snapshot = Snapshot(cluster([8, 8], **islands), taken={host: tuple(some) for host, some in taken.items()})
        assert gpus_of(place(snapshot, gang)) == expected


def test_same_gpus_come_after_nvlink_and_the_hca():
    taken = {"r0h1": (0, 1, 2, 3)}
    gang = Gang("g", 4, wants=Wants(constraints=Constraints(gpus_per_host=2)))
    near = Snapshot(cluster([8, 8], near_hca=(0, 1, 4, 5)), taken=taken)
    assert gpus_of(place(near, gang)) == [(4, 5), (4, 5)]
    near = Snapshot(cluster([8, 8], near_hca=(0, 1)), taken=taken)
    assert gpus_of(place(near, gang)) == [(0, 1), (4, 5)]
    islands = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gpus_of(place(Snapshot(cluster([8, 8], nvlink=islands), taken=taken), gang)) == [(4, 5), (4, 5)]


@given(
    free=st.integers(1, 255), common=st.integers(0, 255), near=st.sets(st.integers(0, 7)),
    size=st.sampled_from([8, 4, 2, 1]), data=st.data(),
)  # fmt: skip
@examples("GPUs of a host, by brute force")
def test_no_other_gpus_of_a_host_are_better(free, common, near, size, data):
    islands = tuple(tuple(range(at, at + size)) for at in range(0, 8, size)) if size < 8 else ()
    able = [gpu for gpu in range(8) if free >> gpu & 1]
    gpus = data.draw(st.integers(1, len(able)))

    def key(chosen):
        touched = {gpu // size for gpu in chosen}
        left = sum(gpu // size in touched for gpu in able) - gpus
        return len(touched), -len(near & set(chosen)), left, -sum(common >> gpu & 1 for gpu in chosen), chosen

    host = Host("h", "r", "pascal", 8, "tcp", nvlink=islands, near_hca=tuple(sorted(near)))
    assert choose_gpus(host, free, gpus, common) == min(combinations(able, gpus), key=key)


def test_the_part_of_a_last_host_has_gpus_that_the_others_have():
    answer = place(Snapshot(cluster([8, 8]), taken={"r0h1": (0, 1)}), Gang("g", 13))
    assert gpus_of(answer) == [tuple(range(8)), (2, 3, 4, 5, 6)]


def test_nvlink_only_counts_what_is_connected():
    snapshot = Snapshot(cluster([8, 8], **ISLANDS), taken={"r0h0": (0, 4)})
    gang = Gang("g", 7, wants=Wants(constraints=Constraints(nvlink=True)))
    answer = place(snapshot, gang)
    assert sorted(len(grant.gpus) for grant in answer.grants) == [3, 4]
    assert all(len({gpu // 4 for gpu in grant.gpus}) == 1 for grant in answer.grants)
    assert place(Snapshot(cluster([8])), gang.but(gpus=2)).never


def test_a_host_it_failed_on_is_left_out_while_the_others_could_hold_it():
    gang = Gang("g", 8, avoid=("r0h0",))
    assert place(Snapshot(cluster([8])), gang).hosts == ("r0h0",)
    answer = place(Snapshot(cluster([8, 8]), taken={"r0h1": (0,)}), gang)
    assert isinstance(answer, Refusal)
    assert not answer.never


def test_of_the_hosts_it_failed_on_those_that_failed_it_last_are_left_out_as_long_as_possible():
    """Too many failed it for all to be left out; but the one that failed a moment ago is not tried again at once."""
    four = cluster([4, 4, 4, 4])
    for last in ("r0h0", "r0h1", "r0h2"):
        avoid = (*sorted({"r0h0", "r0h1", "r0h2"} - {last}), last)
        found = hosts_of(place(Snapshot(four), Gang("g", 8, avoid=avoid)))
        assert last not in found and "r0h3" in found and avoid[0] in found
    everywhere = Gang("g", 16, avoid=("r0h3", "gone'; rm", "r0h0"))
    assert len(hosts_of(place(Snapshot(four), everywhere))) == 4
    most = Gang("g", 12, avoid=("r0h3", "r0h1", "r0h0"))
    assert set(hosts_of(place(Snapshot(four), most))) == {"r0h1", "r0h2", "r0h3"}


def test_unusable_hosts_are_for_nobody():
    snapshot = Snapshot(cluster([8, 8]), unusable={"r0h0": "cordoned: fan"})
    assert hosts_of(place(snapshot, Gang("g", 8))) == {"r0h1": 8}
    assert place(snapshot, Gang("g", 16)).never is False


@pytest.mark.parametrize("name", ["a'; touch /tmp/x #", "host with spaces", "naïve", "new\nline", '"', "\\", "0"])
def test_hostile_names_are_just_names(name):
    host = Host(name, name, name, 4, "tcp")
    answer = place(Snapshot(of((host,)), unusable={"other": name}), Gang(name, 3))
    assert answer.racks == (name,)
    assert answer.grants[0].host == name


@given(situations(), st.randoms())
def test_the_order_of_dictionaries_changes_nothing(situation, random):
    snapshot, gang = situation
    items = list(snapshot.taken.items())
    random.shuffle(items)
    again = replace(snapshot, taken=dict(items), unusable={})
    assert place(again, gang) == place(snapshot, gang)


def test_many_racks_are_searched_greedily_and_still_fewest():
    inventory = cluster(*([[8] * 4] * 30))
    snapshot = with_free(inventory, {host.name: n % 9 for n, host in enumerate(inventory.hosts)})
    answer = place(snapshot, Gang("g", 100))
    rooms = sorted((sum(free_of(snapshot)[h] for h in rack.hosts) for rack in inventory.racks), reverse=True)
    fewest = next(n for n in range(1, 31) if sum(rooms[:n]) >= 100)
    assert len(answer.racks) == fewest
    check(snapshot, Gang("g", 100), answer)

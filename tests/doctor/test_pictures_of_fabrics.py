"""Fabrics as hosts have them: pre-flight blocks only what the gang uses, and ranks are told the right ports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabric_pictures import ROCE, TCP, Picture, check, dgx, host, ib, rails, roce, seen, v1, v2

from gpurun.doctor.survey import Survey, judge
from gpurun.facts import Gpu

ALL, EIGHT = rails(*range(8)), tuple(f"mlx5_{number}" for number in range(8))
DOWN = {"state": "DOWN"}
BOND = (v1(2, "bond0"), v2(3, "bond0"))
VLAN = (v2(3, "ens1f0"), v2(5, "ens1f0.90", "10.9.0.1"))
SIX = tuple(roce(f"mlx5_{at}", at, v2(1, f"ens{at}", "fe80::1"), v2(3, f"ens{at}", f"fd00:{at}::1")) for at in range(8))
PICTURES = {
    "whole": Picture((dgx(), dgx()), (ALL, ALL), hcas=EIGHT),
    "half-used-hosts": Picture((dgx(), dgx()), (ALL, ALL), hcas=EIGHT, gpus=((0, 1), (6, 7))),
    "half-used-hosts-none-named": Picture((dgx(), dgx()), (ALL, ALL), gpus=((0, 1), (6, 7))),
    "loose-cable-one-host": Picture((dgx(mlx5_7=DOWN),), (None,), hcas=EIGHT, gpus=((0,),)),
    "loose-cable-of-eight": Picture((dgx(mlx5_7=DOWN), dgx()), (rails(*range(7)), ALL), hcas=EIGHT),
    "loose-cable-all-gpus": Picture(
        (dgx(mlx5_7=DOWN), dgx()), (rails(*range(7)), ALL), hcas=EIGHT, gpus=(tuple(range(8)),) * 2
    ),
    "all-cables-loose": Picture(
        (dgx(**dict.fromkeys(EIGHT, DOWN)), dgx()), ("=" + ",".join(EIGHT), ALL), hcas=EIGHT, blocked=("a",)
    ),
    "all-cables-loose-one-host": Picture(
        (dgx(**dict.fromkeys(EIGHT, DOWN)),), (None,), hcas=EIGHT, gpus=(tuple(range(8)),)
    ),
    "no-hca-one-host": Picture((host(),), (None,), hcas=EIGHT, gpus=((0,),)),
    "no-hca": Picture((host(), dgx()), ("=" + ",".join(EIGHT), ALL), hcas=EIGHT, blocked=("a",)),
    "no-subnet-manager": Picture(
        (host(ib("mlx5_0", 0, state="INIT")), dgx()), (None, ALL), blocked=("a",)
    ),
    "second-port-of-a-card-without-cable": Picture(
        (host(ib("mlx4_0", 0, more=("DOWN",))),) * 2, ("=mlx4_0:1",) * 2, hcas=("mlx4_0",)
    ),
    "second-port-as-a-device-without-cable": Picture(
        (host(ib("mlx5_0", 0), ib("mlx5_1", 0, state="DOWN")),) * 2, (rails(0),) * 2
    ),
    "second-port-named": Picture(
        (host(ib("mlx5_0", 0), ib("mlx5_1", 0, state="DOWN")),) * 2, (rails(0),) * 2, hcas=("mlx5_0:1", "mlx5_1:1")
    ),
    "storage-nic-ethernet": Picture(
        (host(ib("mlx5_0", 0), ib("mlx5_4", 200, layer="Ethernet")),) * 2, (rails(0),) * 2
    ),
    "storage-nic-infiniband": Picture(
        (host(*dgx().hcas, ib("mlx5_8", 200), ib("mlx5_9", 200, state="DOWN")),) * 2, (ALL, ALL)
    ),
    "device-file-missing-for-one": Picture(
        (dgx(mlx5_3={"node": False}), dgx()), (rails(0, 1, 2, 4, 5, 6, 7), ALL), hcas=EIGHT
    ),
    "lag": Picture((host(roce("mlx5_bond_0", 0, *BOND), nic="bond0"),) * 2, ("=mlx5_bond_0:1",) * 2, ROCE,
                   nic="bond0", gid="3"),
    "vlan": Picture((host(roce("mlx5_0", 0, *VLAN), nic="ens1f0.90"),) * 2, (rails(0),) * 2, ROCE, nic="ens1f0.90",
                    gid="5"),
    "vlan-first": Picture((host(roce("mlx5_0", 0, v2(3, "ens1f0.90"), v2(5, "ens1f0")), nic="ens1f0"),) * 2,
                          (rails(0),) * 2, ROCE, nic="ens1f0", gid="5"),
    "roce-port-without-address": Picture(
        (host(roce("mlx5_0", 0, v1(0, "ens1"), v2(3, "ens1")), roce("mlx5_1", 0), nic="ens1"),) * 2, (rails(0),) * 2,
        ROCE, hcas=("mlx5_0", "mlx5_1"), nic="ens1", gid="3",
    ),
    "roce-fresh-nccl": Picture((host(roce("mlx5_0", 0, v1(2, "ens1"), v2(3, "ens1")), nic="ens1"),) * 2,
                               (rails(0),) * 2, ROCE, nic="ens1", gid="3"),
    "roce-indices-differ": Picture(
        (host(roce("mlx5_0", 0, v2(3, "ens1")), roce("mlx5_1", 1, v2(5, "ens2", "10.1.0.1")), nic="ens1"),) * 2,
        (rails(0, 1),) * 2, ROCE, nic="ens1",
    ),
    "ipv6-rails-and-one-port-with-ipv4-too": Picture(
        (host(*SIX[:2], roce("mlx5_2", 2, v2(3, "ens2", "fd00:2::1"), v2(5, "ens2")), *SIX[3:]), host(*SIX)),
        (ALL, ALL), ROCE, hcas=EIGHT, gid="3",
    ),
    "ipv6-rails-and-a-nic-for-logins-beside-a-gpu": Picture(
        (host(*SIX, roce("mlx5_8", 0, v2(3, "eno1"))),) * 2, (ALL, ALL), ROCE, gid="3"
    ),
    "socket-interface-down": Picture(
        (replace(dgx(), nics=host(state="DOWN").nics), dgx()), (ALL, ALL), hcas=EIGHT, blocked=("a",)
    ),
    "socket-interface-down-one-host": Picture(
        (replace(dgx(), nics=host(state="DOWN").nics),), (None,), hcas=EIGHT, gpus=((0, 1),)
    ),
    "socket-interface-missing-one-host": Picture((dgx(),), (None,), hcas=EIGHT, nic="ib0", gpus=((0, 1),)),
    "socket-interface-missing": Picture((dgx(), dgx()), (ALL, ALL), hcas=EIGHT, nic="ib0", blocked=("a", "b")),
    "no-network-at-all-one-host": Picture((replace(dgx(), nics=()),), (None,), hcas=EIGHT, gpus=((0, 1),)),
    "loopback": Picture((dgx(), dgx()), (None, None), TCP, nic="lo", blocked=("a", "b")),
    "loopback-one-host": Picture((dgx(),), (None,), TCP, nic="lo", gpus=((0, 1),)),
    "cards-with-unknown-places": Picture(
        (replace(dgx(), gpus=(Gpu(0), Gpu(1))),) * 2, (ALL, ALL), gpus=((0,), (1,))
    ),
}  # fmt: skip


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_preflight_blocks_only_what_the_gang_uses_and_ranks_are_told_the_ports_that_work(picture):
    check(picture)


def test_what_a_gang_does_not_use_is_said_all_the_same():
    inventory, hardware = seen(PICTURES["loose-cable-of-eight"])
    (finding,) = judge(inventory, Survey(hardware, {}), {"a": (0,), "b": (0,)}).other
    assert (finding.check, finding.hosts, finding.evidence) == ("hca-port", ("a",), "mlx5_7 port 1 is DOWN")


def test_the_address_of_a_fabric_does_not_matter_to_a_gang_on_one_host():
    inventory, hardware = seen(PICTURES["whole"])
    moved = replace(inventory, hosts=tuple(replace(each, fabric_address="10.9.9.9") for each in inventory.hosts))
    alone = judge(moved, Survey({"a": hardware["a"]}, {}), {"a": (0, 1)})
    assert alone.blocking == ()
    assert judge(moved, Survey(hardware, {}), {"a": (0,), "b": (0,)}).bad_hosts.keys() == {"a", "b"}


def test_a_gang_that_grows_is_not_alone_on_its_only_host():
    inventory, hardware = seen(PICTURES["all-cables-loose-one-host"])
    survey, grants = Survey(hardware, {}), {"a": (0,)}
    assert judge(inventory, survey, grants).blocking == ()
    assert judge(inventory, survey, grants, is_alone=False).bad_hosts.keys() == {"a"}

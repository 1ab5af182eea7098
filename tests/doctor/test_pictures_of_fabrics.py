"""Twenty fabrics as hosts have them: pre-flight blocks only what the gang uses, and ranks are told the right ports."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gpurun.doctor.preflight import judge
from gpurun.doctor.survey import Survey
from gpurun.facts.hardware import DockerFacts, Gid, Gpu, Hardware, Hca, HcaPort, Nic
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack
from gpurun.launch.fabric import for_gang, settings

IB, ROCE = FabricKind.INFINIBAND, FabricKind.ROCE


def ib(name, bus, *, state="ACTIVE", layer="InfiniBand", more=(), node=True):
    """A HCA behind the PCI switch `bus`; `more` are the states of its other ports."""
    ports = [HcaPort(at, each, layer, 200.0) for at, each in enumerate((state, *more), 1)]
    uverbs = f"uverbs{name.rpartition('_')[2]}" if node else None
    return Hca(name, tuple(ports), (f"pci0000:{bus:02x}", f"{bus:02x}:01.0", f"{bus:02x}:02.0"), bus // 4, uverbs)


def roce(name, bus, *gids, state="ACTIVE"):
    return replace(ib(name, bus), ports=(HcaPort(1, state, "Ethernet", 100.0, gids=gids),))


def v2(index, nic, address="10.0.0.1"):
    return Gid(index, address if ":" in address else f"::ffff:{address}", "RoCE v2", nic)


def v1(index, nic):
    return Gid(index, "::ffff:10.0.0.1", "IB/RoCE v1", nic)


def host(*hcas, gpus=8, nic="eno1", state="UP", **more):
    """A host whose GPU N is behind PCI switch N."""
    cards = tuple(
        Gpu(at, "H100", "hopper", 81559, f"GPU-{at}", f"{at:02x}:00", (f"pci0000:{at:02x}", f"{at:02x}:01.0"), at // 4)
        for at in range(gpus)
    )
    nics = (Nic(nic, state, 9000, 100_000, addresses=("10.0.0.1/24",), driver="mlx5_core"),)
    nodes = (*(hca.uverbs for hca in hcas if hca.uverbs), "rdma_cm")
    return Hardware(
        "h", gpus=cards, hcas=hcas, nics=nics, infiniband_nodes=nodes, peermem="1", folder_kind="ext4",
        docker=DockerFacts(version="28.0", gpu_support="runtime", free_bytes=1 << 40), **more,
    )  # fmt: skip


def dgx(**changed):
    """Eight rails, one beside each GPU; `changed` are keywords of `ib` by name."""
    return host(*(ib(f"mlx5_{at}", at, **changed.get(f"mlx5_{at}", {})) for at in range(8)))


@dataclass(frozen=True)
class Picture:
    """Two hosts of a fabric and a gang on them.

    Attributes:
        hcas: what the inventory names.
        told: NCCL_IB_HCA on each host; None = no RDMA.
        gid: NCCL_IB_GID_INDEX on the first host.
        blocked: the hosts that pre-flight refuses.
    """

    hosts: tuple[Hardware, ...]
    told: tuple[str | None, ...]
    kind: FabricKind = IB
    hcas: tuple[str, ...] = ()
    nic: str = "eno1"
    gpus: tuple[tuple[int, ...], ...] = ((0,), (0,))
    gid: str | None = None
    blocked: tuple[str, ...] = ()


def rails(*numbers):
    return "=" + ",".join(f"mlx5_{number}:1" for number in numbers)


ALL, EIGHT = rails(*range(8)), tuple(f"mlx5_{number}" for number in range(8))
DOWN = {"state": "DOWN"}
BOND = (v1(2, "bond0"), v2(3, "bond0"))
VLAN = (v2(3, "ens1f0"), v2(5, "ens1f0.90", "10.9.0.1"))
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
    "socket-interface-down": Picture(
        (replace(dgx(), nics=host(state="DOWN").nics), dgx()), (ALL, ALL), hcas=EIGHT, blocked=("a",)
    ),
    "socket-interface-down-one-host": Picture(
        (replace(dgx(), nics=host(state="DOWN").nics),), (None,), hcas=EIGHT, gpus=((0, 1),)
    ),
    "socket-interface-missing-one-host": Picture((dgx(),), (None,), hcas=EIGHT, nic="ib0", gpus=((0, 1),)),
    "socket-interface-missing": Picture((dgx(), dgx()), (ALL, ALL), hcas=EIGHT, nic="ib0", blocked=("a", "b")),
    "no-network-at-all-one-host": Picture((replace(dgx(), nics=()),), (None,), hcas=EIGHT, gpus=((0, 1),)),
    "cards-with-unknown-places": Picture(
        (replace(dgx(), gpus=(Gpu(0), Gpu(1))),) * 2, (ALL, ALL), gpus=((0,), (1,))
    ),
}  # fmt: skip


def seen(picture):
    names = ("a", "b")[: len(picture.hosts)]
    hosts = tuple(Host(name, "r", "hopper", len(found.gpus), "f") for name, found in zip(names, picture.hosts))  # noqa: B905
    fabric = Fabric("f", picture.kind, picture.nic, picture.hcas)
    inventory = Inventory(hosts, (Rack("r", names),), {"f": fabric})
    hardware = {
        name: replace(found, nics=tuple(replace(nic, addresses=(f"10.0.0.{at}/24",)) for nic in found.nics))
        for at, (name, found) in enumerate(zip(names, picture.hosts), 1)  # noqa: B905
    }
    return inventory, hardware


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_preflight_blocks_only_what_the_gang_uses(picture):
    inventory, hardware = seen(picture)
    found = judge(inventory, Survey(hardware, {}), dict(zip(hardware, picture.gpus)))  # noqa: B905
    assert sorted(found.bad_hosts) == list(picture.blocked), found.blocking


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_ranks_are_told_the_ports_that_work(picture):
    inventory, hardware = seen(picture)
    fabric = for_gang(inventory.fabrics["f"], is_alone=len(hardware) == 1)
    told = [settings(fabric, inventory.by_name[name], found).as_dict() for name, found in hardware.items()]
    assert [each.get("NCCL_IB_HCA") for each in told] == list(picture.told)
    assert told[0].get("NCCL_IB_GID_INDEX") == picture.gid
    assert all((each.get("NCCL_NET") == "IB") == (len(told) > 1) for each in told), "alone, NCCL must not need a HCA"
    nic = picture.nic if len(told) > 1 else "lo"
    assert {each["NCCL_SOCKET_IFNAME"] for each in told} == {f"={nic}"}, "alone, ranks must not need a network"


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

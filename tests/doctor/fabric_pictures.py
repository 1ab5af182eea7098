"""Fabrics as hosts have them: what probes find, what the inventory says, and a gang."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpurun.doctor.survey import Survey, judge
from gpurun.facts import DockerFacts, Gid, Gpu, Hardware, Hca, HcaPort, Nic
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack
from gpurun.launch.fabric import fabric_settings, for_gang

IB, ROCE, TCP = FabricKind.INFINIBAND, FabricKind.ROCE, FabricKind.TCP


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


def values(settings):
    return {setting.name: setting.value for setting in settings.environment}


def check(picture):
    """Check what pre-flight refuses, and what ranks on each host are told."""
    inventory, hardware = seen(picture)
    found = judge(inventory, Survey(hardware, {}), dict(zip(hardware, picture.gpus)))  # noqa: B905
    assert sorted(found.bad_hosts) == list(picture.blocked), found.blocking
    fabric = for_gang(inventory.fabrics["f"], is_alone=len(hardware) == 1)
    told = [values(fabric_settings(fabric, inventory.by_name[name], found)) for name, found in hardware.items()]
    assert [each.get("NCCL_IB_HCA") for each in told] == list(picture.told)
    assert told[0].get("NCCL_IB_GID_INDEX") == picture.gid
    is_rdma = len(told) > 1 and picture.kind is not TCP
    assert all((each.get("NCCL_NET") == "IB") == is_rdma for each in told), "alone, NCCL must not need a HCA"
    nic = picture.nic if len(told) > 1 else "lo"
    assert {each["NCCL_SOCKET_IFNAME"] for each in told} == {f"={nic}"}, "alone, ranks must not need a network"

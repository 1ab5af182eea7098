"""Fabrics that people describe in public reports, with ``ibstat``, ``ibdev2netdev``, ``show_gids`` or ``rdma link``.

Each has its source. Addresses are the reports'; places on the PCI bus are as on such machines.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabric_pictures import ROCE, TCP, Picture, check, host, ib, rails, roce, v2

from gpurun.facts import Gid

FAR = 200
"""A PCI bus that no GPU is near."""


def table(nic, *addresses, first=0):
    """A GID table as Linux makes it: for each address of an interface, RoCE v1 and v2."""
    kinds = ("IB/RoCE v1", "RoCE v2")
    return tuple(
        Gid(first + 2 * at + which, address if ":" in address else f"::ffff:{address}", kind, nic)
        for at, address in enumerate(addresses)
        for which, kind in enumerate(kinds)
    )


def local(nic):
    """The table of an interface that is up, without an address: the kernel gives it a link-local one."""
    return table(nic, "fe80::ac0:ebff:feda:1cfb")


def usual(nic, address):
    return table(nic, "fe80::ac0:ebff:feda:1cfb", address)


def ethernet(name, bus, *, state="ACTIVE"):
    return ib(name, bus, layer="Ethernet", state=state)


def in_pairs(*hcas, **more):
    """A host whose GPUs 2N and 2N + 1 are behind the PCI switch 2N, as the NIC there."""
    found = host(*hcas, **more)
    cards = tuple(replace(gpu, pci_path=found.gpus[gpu.index // 2 * 2].pci_path) for gpu in found.gpus)
    return replace(found, gpus=cards)


def beside_cpu(hca, node):
    """A NIC for logins or storage: in a slot of a CPU, behind no GPU's switch."""
    return replace(hca, pci_path=(f"pci0000:f{node}", f"f{node}:01.0"), numa_node=node)


def twice(found, told, **more):
    return Picture((found,) * 2, (told,) * 2, **more)


RAILS = (0, 3, 4, 5, 6, 9, 10, 11)
PICTURES = {
    # imbue-ai/cluster-health issue 4: IPoIB is down on all rails, which does not matter to verbs
    "eight-rails-among-twelve-names": twice(
        host(
            ib("mlx5_0", 0), ethernet("mlx5_1", 0), ethernet("mlx5_2", 0, state="DOWN"), ib("mlx5_3", 1),
            ib("mlx5_4", 2), ib("mlx5_5", 3), ib("mlx5_6", 4), ethernet("mlx5_7", 4),
            ethernet("mlx5_8", 4, state="DOWN"), ib("mlx5_9", 5), ib("mlx5_10", 6), ib("mlx5_11", 7),
            nic="enp27s0f0np0",
        ),
        rails(*RAILS), nic="enp27s0f0np0",
    ),
    # stepfun-ai/StepMesh issue 15: four InfiniBand rails down, a bond for logins up
    "all-rails-down-bond-up": twice(
        host(*(ib(f"mlx5_{at}", at, state="DOWN") for at in (0, 3, 4, 7)),
             roce("mlx5_bond_0", FAR, *usual("bond0", "10.0.0.1")), nic="bond0"),
        None, nic="bond0", blocked=("a", "b"),
    ),
    "all-rails-down-bond-named": twice(
        host(*(ib(f"mlx5_{at}", at, state="DOWN") for at in (0, 3, 4, 7)),
             roce("mlx5_bond_0", FAR, *usual("bond0", "10.0.0.1")), nic="bond0"),
        "=mlx5_bond_0:1", kind=ROCE, hcas=("mlx5_bond_0",), nic="bond0", gid="3",
    ),
    # IBM/SpectrumScale_NETWORK_READINESS issue 4: two link-local addresses before the one that can be routed
    "two-link-local-addresses": twice(
        host(roce("mlx5_0", 0, *table("ens1f0", "fe80::e42:a1ff:fe5d:4db8", "fe80::1186:a6b1:3f0b:c441",
                                      "172.19.0.60")), nic="ens1f0"),
        rails(0), kind=ROCE, nic="ens1f0", gid="5",
    ),
    # openucx/ucx pull request 9484: a VXLAN has the bond's own address, at a lower index
    "vxlan-with-the-address-of-the-bond": twice(
        host(roce("mlx5_bond_0", 0, *local("bond1"), *table("b3.vxlan.30100", "30.153.10.175", first=2),
                  *table("bond1", "30.153.10.175", first=4)), nic="bond1"),
        "=mlx5_bond_0:1", kind=ROCE, nic="bond1", gid="5",
    ),
    # NVIDIA/nccl issue 769: index 1, link-local, times out; 3 works
    "bond-with-a-link-local-gid-first": twice(
        host(roce("mlx5_bond_0", 0, *usual("bond0", "200.0.209.6")), nic="bond0"),
        "=mlx5_bond_0:1", kind=ROCE, nic="bond0", gid="3",
    ),
    # deepseek-ai/3FS pull request 283: both ports of a card have a cable, one has an address
    "second-port-up-without-address": twice(
        host(roce("mlx5_0", 0, *usual("p1p1", "192.168.56.106")), roce("mlx5_1", 0, *local("p1p2")), nic="p1p1"),
        rails(0), kind=ROCE, nic="p1p1", gid="3",
    ),
    "second-port-up-without-address-named": twice(
        host(roce("mlx5_0", 0, *usual("p1p1", "192.168.56.106")), roce("mlx5_1", 0, *local("p1p2")), nic="p1p1"),
        rails(0), kind=ROCE, nic="p1p1", gid="3", hcas=("mlx5_0", "mlx5_1"),
    ),
    # NVIDIA/nccl issue 224: four cards with addresses, and thirty virtual functions without
    "virtual-functions": twice(
        host(*(roce(f"mlx5_{at}", at, *usual(f"ens{at}", f"10.{at}.0.1")) for at in range(4)),
             *(roce(f"mlx5_{at}", at % 4, *local(f"ens{at % 4}v{at}")) for at in range(5, 35)), nic="ens0"),
        rails(0, 1, 2, 3), kind=ROCE, nic="ens0", gid="3",
    ),
    "no-port-has-an-address": twice(
        host(roce("mlx5_0", 0, *local("ens0")), roce("mlx5_1", 1, *local("ens1"))),
        rails(0, 1), kind=ROCE, gid="1",
    ),
    "one-host-lost-the-address-of-its-rail": Picture(
        (host(roce("mlx5_0", 0, *usual("ens0", "10.0.0.1"))), host(roce("mlx5_0", 0, *local("ens0")))),
        (rails(0), rails(0)), kind=ROCE, gid="3", blocked=("b",),
    ),
    "one-host-has-ipv6-alone": Picture(
        (host(roce("mlx5_0", 0, *usual("ens0", "10.0.0.1"))), host(roce("mlx5_0", 0, *usual("ens0", "fd00::1")))),
        (rails(0), rails(0)), kind=ROCE, gid="3", blocked=("a", "b"),
    ),
    # NVIDIA/nccl issue 1277: the same cards have other names on the other host; each has NICs for logins and storage
    "names-differ-between-hosts": Picture(
        (
            in_pairs(*(roce(f"mlx5_{at}", bus, *usual(f"ens{bus}", f"10.{bus}.0.1"))
                       for at, bus in ((0, 0), (3, 2), (5, 4), (8, 6))),
                     *(beside_cpu(roce(f"mlx5_{at}", 0, *usual(f"eno{at}", "10.9.0.1")), 0) for at in (1, 2))),
            in_pairs(*(roce(f"mlx5_{at}", bus, *usual(f"ens{bus}", f"10.{bus}.0.2"))
                       for at, bus in ((0, 0), (1, 2), (4, 4), (5, 6))),
                     *(beside_cpu(roce(f"mlx5_{at}", 0, *usual(f"eno{at}", "10.9.0.2")), 0) for at in (2, 3))),
        ),
        (rails(0, 3, 5, 8), rails(0, 1, 4, 5)), kind=ROCE, gid="3",
    ),
    # deepseek-ai/DeepEP issue 38: four of eight InfiniBand cards are in use, one card is Ethernet
    "every-second-card-has-a-cable": twice(
        host(*(ib(f"mlx5_{number}", at, state="ACTIVE" if number in (1, 7, 9, 13) else "DOWN")
               for at, number in enumerate((0, 1, 6, 7, 8, 9, 12, 13))), ethernet("mlx5_2", FAR)),
        rails(1, 7, 9, 13),
    ),
    # NVIDIA/nccl issue 1291: a GH200, with two Ethernet ports in a bond and one InfiniBand port
    "grace-hopper": twice(
        host(replace(ethernet("mlx5_bond_0", 80), numa_node=0), replace(ib("mlx5_2", 90), numa_node=0), gpus=1,
             nic="bond0"),
        rails(2), nic="bond0",
    ),
    # microsoft/mscclpp issue 493: sixteen ports, the second of each card without a cable
    "sixteen-ports-of-eight-cards": twice(
        host(*(roce(f"mlx5_{at}", at // 2, *(usual(f"ens{at}", f"10.{at}.0.1") if at % 2 == 0 else ()),
                    state="DOWN" if at % 2 else "ACTIVE") for at in range(16))),
        rails(*range(0, 16, 2)), kind=ROCE, gid="3",
    ),
    # claudebarthels/infinity issue 5: one card in Ethernet mode, one without any cable
    "three-cards-one-in-use": twice(
        host(ib("mlx4_0", 0, layer="Ethernet", more=("DOWN",)), ib("mlx4_1", 1),
             ib("mlx4_2", 2, state="DOWN", more=("DOWN",))),
        "=mlx4_1:1",
    ),
    # NVIDIA/nccl-tests issue 128: a disabled InfiniBand card and a ConnectX-4 Lx for logins
    "one-of-two-cards-disabled": twice(
        host(ib("mlx5_0", 0), ib("mlx5_1", 4, state="DOWN"), ethernet("mlx5_2", FAR)), rails(0), gpus=((0, 7), (0, 7)),
    ),
    # uccl-project/uccl issue 163: EFA is no verbs device, its link layer is Unspecified
    "efa-as-roce": twice(host(ib("rdmap16s27", 0, layer="Unspecified")), None, kind=ROCE, blocked=("a", "b")),
    "efa-as-tcp": twice(host(ib("rdmap16s27", 0, layer="Unspecified")), None, kind=TCP),
    # aws/sagemaker-hyperpod-cli pull request 282: NVLink's controllers are InfiniBand devices, too
    "nvlink-controllers": twice(
        host(ib("ibp115s0f0", FAR), ib("ibp116s0f0", FAR), *(ib(f"mlx5_{at}", at) for at in range(8))),
        rails(*range(8)),
    ),
    # NVIDIA/nccl issue 2345: two rails that are not connected with each other; sockets over one of them
    "isolated-rails": twice(
        host(roce("rocep80s0", 0, *usual("ens80f0np0", "10.80.0.1")),
             roce("rocep203s0", 4, *usual("ens203f0np0", "10.203.0.1")), nic="ens80f0np0"),
        "=rocep80s0:1,rocep203s0:1", kind=ROCE, nic="ens80f0np0", gid="3",
    ),
    # mark-ramsey-ri/vllm-dgx-spark issue 1: one cable between two DGX Spark, which the kernel sees as two devices
    "spark": twice(
        host(*(roce(name, bus, *(usual(nic, "169.254.28.198") if is_up else ()), state="ACTIVE" if is_up else "DOWN")
               for name, bus, nic, is_up in (
                   ("rocep1s0f0", 80, "enp1s0f0np0", False), ("rocep1s0f1", 80, "enp1s0f1np1", True),
                   ("roceP2p1s0f0", 90, "enP2p1s0f0np0", False), ("roceP2p1s0f1", 90, "enP2p1s0f1np1", True),
               )), gpus=1, nic="enp1s0f1np1"),
        "=rocep1s0f1:1,roceP2p1s0f1:1", kind=ROCE, nic="enp1s0f1np1", gid="3",
    ),
    # tonyd2wild/DeepSeek-v4-Flash-…-DGX-Spark pull request 40: after an event, one table is in another order
    "spark-after-a-drift": twice(
        host(roce("rocep1s0f1", 80, *usual("enp1s0f1np1", "10.0.0.1")),
             roce("roceP2p1s0f1", 90, v2(1, "enP2p1s0f1np1", "fe80::1"), v2(4, "enP2p1s0f1np1", "10.1.0.1")),
             gpus=1, nic="enp1s0f1np1"),
        "=rocep1s0f1:1,roceP2p1s0f1:1", kind=ROCE, nic="enp1s0f1np1",
    ),
    # openucx/ucx pull request 10939: RoCE with IPv6 alone
    "rails-with-ipv6-alone": twice(
        host(*(roce(f"mlx5_{at}", at, *usual(f"ens{at}", f"fd00:{at}::1")) for at in range(8))),
        rails(*range(8)), kind=ROCE, gid="3",
    ),
    # ROCm/rccl issue 1423: the link of one rail comes and goes
    "a-rail-that-flaps": twice(
        host(*(ib(f"mlx5_{at}", at, state="DOWN" if at == 7 else "ACTIVE") for at in range(8))), rails(*range(7)),
    ),
    # NVIDIA/nccl issue 1814: sockets over bond0, each rail a bond of its own
    "rails-of-bonds": twice(
        host(beside_cpu(roce("mlx5_bond_0", 0, *usual("bond0", "172.36.134.184")), 0),
             *(roce(f"mlx5_bond_{at + 1}", at, *usual(f"bond{at + 1}", f"29.87.{at}.221")) for at in range(8)),
             nic="bond0"),
        "=" + ",".join(f"mlx5_bond_{at}:1" for at in range(1, 9)), kind=ROCE, nic="bond0", gid="3",
    ),
    # Mellanox/k8s-rdma-shared-dev-plugin issue 164: containers' addresses have filled the table before
    "a-table-that-begins-late": twice(
        host(roce("mlx5_0", 0, *table("ens1", "192.168.6.6", first=14)), nic="ens1"),
        rails(0), kind=ROCE, nic="ens1", gid="15",
    ),
    # each rail has the VLAN of the fabric, and an untagged address at a lower index
    "a-vlan-on-each-rail": twice(
        host(*(roce(f"mlx5_{at}", at, *usual(f"ens{at}", f"10.{at}.0.1"),
                    *table(f"ens{at}.90", f"10.90.{at}.1", first=4)) for at in range(2)), nic="ens0.90"),
        rails(0, 1), kind=ROCE, nic="ens0.90", gid="5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_preflight_blocks_only_what_the_gang_uses_and_ranks_are_told_the_ports_that_work(picture):
    check(picture)

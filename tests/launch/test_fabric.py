"""Settings of each fabric from the inventory alone, from a probe, and with the user's own values."""

import dataclasses
import subprocess

import pytest

from gpurun.facts import DockerFacts, Gid, Gpu, Hardware, Hca, HcaPort
from gpurun.inventory.model import Fabric, FabricKind, Host
from gpurun.launch.fabric import fabric_settings
from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.rank import rank_script

TCP = Fabric("tcp", FabricKind.TCP, "eno1")
ROCE = Fabric("roce25", FabricKind.ROCE, "ens1f0", hcas=("mlx5_0",), traffic_class=106)
IB = Fabric("ib", FabricKind.INFINIBAND, "ib0", hcas=("mlx5_0", "mlx5_1:2"), service_level=3)
HOST = Host("gpu-r1-01", "r1", "pascal", 4, "roce25")


def values(settings):
    return {setting.name: setting.value for setting in settings.environment}


def roce_port(*gids, state="ACTIVE", number=1):
    return HcaPort(number, state, "Ethernet", 25.0, gids=tuple(gids))


V1 = Gid(0, "fe80::1", "IB/RoCE v1", "ens1f0")
V2_LOCAL = Gid(1, "fe80::1", "RoCE v2", "ens1f0")
V1_IPV4 = Gid(2, "::ffff:10.0.0.1", "IB/RoCE v1", "ens1f0")
V2_IPV4 = Gid(3, "::ffff:10.0.0.1", "RoCE v2", "ens1f0")


def roce_facts(*gids, **changes):
    hca = Hca("mlx5_0", (roce_port(*gids),), uverbs="uverbs0")
    plain = Hardware("gpu-r1-01", hcas=(hca,), infiniband_nodes=("rdma_cm", "uverbs0"))
    return dataclasses.replace(plain, **changes)


def test_tcp_needs_no_probe_and_no_device():
    found = fabric_settings(TCP, HOST)
    assert values(found) == {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "HOROVOD_GLOO_IFACE": "eno1",
        "OMPI_MCA_btl_tcp_if_include": "eno1",
        "OMPI_MCA_oob_tcp_if_include": "eno1",
        "NCCL_IB_DISABLE": "1",
        "UCX_NET_DEVICES": "eno1",
    }
    assert "--device" not in found.docker_flags
    assert found.docker_flags == ("--ulimit", "stack=67108864:67108864")


def test_roce_from_the_inventory_alone():
    found = fabric_settings(ROCE, HOST)
    assert values(found) == {
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        "HOROVOD_GLOO_IFACE": "ens1f0",
        "OMPI_MCA_btl_tcp_if_include": "ens1f0",
        "OMPI_MCA_oob_tcp_if_include": "ens1f0",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_0",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "NCCL_IB_TC": "106",
        "UCX_IB_TRAFFIC_CLASS": "106",
    }
    assert found.docker_flags[-4:] == ("--device", "/dev/infiniband", "--cap-add", "IPC_LOCK")


def test_infiniband_never_gets_a_gid_index():
    found = values(fabric_settings(IB, HOST))
    assert found["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1:2"
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:2"
    assert (found["NCCL_IB_SL"], found["UCX_IB_SL"]) == ("3", "3")
    assert not any("GID" in name for name in found)


@pytest.mark.parametrize("fabric", [TCP, ROCE, IB])
def test_nothing_that_the_documentation_warns_against(fabric):
    found = fabric_settings(fabric, HOST)
    assert "--privileged" not in found.docker_flags
    names = values(found)
    assert not {"NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_CUDA_SUPPORT", "OMPI_MCA_pml"} & set(names)
    assert len(names) == len(found.environment)
    assert all(setting.reason and setting.source for setting in found.environment)


def test_the_gid_index_is_always_set_where_the_probe_knows_it():
    """An image's NCCL_VERSION is its base's; the NCCL that PyTorch brings may be older and then takes index 0."""
    found = values(fabric_settings(ROCE, HOST, roce_facts(V1, V2_LOCAL, V1_IPV4, V2_IPV4)))
    assert found["NCCL_IB_GID_INDEX"] == "3"
    assert "UCX_IB_GID_INDEX" not in found  # UCX finds an IPv4 RoCE v2 entry itself


def test_link_local_only_needs_the_index_in_every_version():
    found = values(fabric_settings(ROCE, HOST, roce_facts(V1, V2_LOCAL)))
    assert found["NCCL_IB_GID_INDEX"] == found["UCX_IB_GID_INDEX"] == "1"


def test_ipv6_only():
    found = values(fabric_settings(ROCE, HOST, roce_facts(V1, V2_LOCAL, Gid(5, "2001:db8::1", "RoCE v2", "ens1f0"))))
    assert found["NCCL_IB_GID_INDEX"] == "5"
    assert "NCCL_IB_ADDR_FAMILY" not in found


@pytest.mark.parametrize(
    ("addresses", "told"),
    [
        (("::ffff:10.0.0.1", "::ffff:10.1.0.1"), {"NCCL_IB_ADDR_FAMILY": "AF_INET"}),
        (("2001:db8::1", "2001:db8::2"), {"NCCL_IB_ADDR_FAMILY": "AF_INET6"}),
        (("fe80::1", "fe80::2"), {"NCCL_IB_GID_INDEX": "3", "UCX_IB_GID_INDEX": "3"}),
    ],
)
def test_ports_that_need_different_indices_leave_the_choice_to_nccl_that_can_make_it(addresses, told):
    ports = [roce_port(Gid(index, address, "RoCE v2")) for index, address in zip((3, 5), addresses, strict=True)]
    hcas = tuple(Hca(f"mlx5_{at}", (port,), uverbs=f"uverbs{at}") for at, port in enumerate(ports))
    facts = roce_facts(hcas=hcas, infiniband_nodes=("rdma_cm", "uverbs0", "uverbs1"))
    found = values(fabric_settings(dataclasses.replace(ROCE, hcas=()), HOST, facts))
    assert {name: value for name, value in found.items() if "GID" in name or "FAMILY" in name} == told


def test_a_vlan_in_front_of_the_fabrics_own_gid_needs_the_index():
    vlan = Gid(3, "::ffff:10.9.0.1", "RoCE v2", "ens1f0.9")
    facts = roce_facts(V1, vlan, dataclasses.replace(V2_IPV4, index=5))
    assert values(fabric_settings(ROCE, HOST, facts))["NCCL_IB_GID_INDEX"] == "5"


def test_the_inventorys_index_beats_the_probe():
    fixed = dataclasses.replace(ROCE, gid_index=7)
    found = fabric_settings(fixed, HOST, roce_facts(V2_IPV4))
    by_name = {setting.name: setting for setting in found.environment}
    assert (by_name["NCCL_IB_GID_INDEX"].value, by_name["NCCL_IB_GID_INDEX"].source) == ("7", "inventory")


def test_a_probed_hca_gets_its_own_device_nodes_only():
    found = fabric_settings(ROCE, HOST, roce_facts(V2_IPV4))
    assert values(found)["NCCL_IB_HCA"] == "=mlx5_0:1"
    devices = [found.docker_flags[at + 1] for at, flag in enumerate(found.docker_flags) if flag == "--device"]
    assert devices == ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]


@pytest.mark.parametrize(("has", "fabric", "given"), [(True, ROCE, True), (False, ROCE, False), (True, TCP, False)])
def test_gdrcopy_s_device_goes_with_rdma_if_the_host_has_it(has, fabric, given):
    flags = fabric_settings(fabric, HOST, roce_facts(V2_IPV4, gdrdrv=has)).docker_flags
    assert ("/dev/gdrdrv" in flags) == given
    assert "/dev/gdrdrv" not in fabric_settings(ROCE, HOST, None).docker_flags


def test_a_device_node_that_is_not_there_is_not_asked_for():
    found = fabric_settings(ROCE, HOST, roce_facts(V2_IPV4, infiniband_nodes=("uverbs0",)))
    assert "/dev/infiniband/rdma_cm" not in found.docker_flags


def gpu(index, *path, numa=None):
    return Gpu(index, pci_path=path, numa_node=numa)


def two_rails():
    near0 = Hca("mlx5_1", (HcaPort(1, "ACTIVE", "InfiniBand"),), ("pci0000:10", "10:01.0", "11:00.0"), 0, "uverbs1")
    near1 = Hca("mlx5_10", (HcaPort(1, "ACTIVE", "InfiniBand"),), ("pci0000:80", "80:01.0", "81:00.0"), 1, "uverbs2")
    gpus = (
        gpu(0, "pci0000:10", "10:01.0", "12:00.0", numa=0),
        gpu(1, "pci0000:80", "80:02.0", "82:00.0", numa=1),
    )
    return Hardware("dgx", gpus=gpus, hcas=(near0, near1), infiniband_nodes=("rdma_cm", "uverbs1", "uverbs2"))


def test_every_job_of_a_host_gets_all_its_rails_and_no_nic_for_storage():
    """NCCL takes the port nearest to each GPU itself; gangs on parts of hosts must meet on the same ports."""
    facts = two_rails()
    storage = Hca("mlx5_2", facts.hcas[0].ports, ("pci0000:f0", "f0:01.0"), 1, "uverbs1")
    found = fabric_settings(
        dataclasses.replace(IB, hcas=()), HOST, dataclasses.replace(facts, hcas=(*facts.hcas, storage))
    )
    assert values(found)["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_10:1"


def test_a_dead_port_leaves_the_others():
    facts = two_rails()
    dead = dataclasses.replace(facts.hcas[0], ports=(HcaPort(1, "DOWN", "InfiniBand"),))
    facts = dataclasses.replace(facts, hcas=(dead, facts.hcas[1]))
    fabric = dataclasses.replace(IB, hcas=("mlx5_1", "mlx5_10"))
    assert values(fabric_settings(fabric, HOST, facts))["NCCL_IB_HCA"] == "=mlx5_10:1"


def test_no_working_port_keeps_the_inventorys_so_that_nccl_fails_loudly():
    facts = roce_facts(V2_IPV4, hcas=(Hca("mlx5_0", (roce_port(state="DOWN"),)),))
    found = values(fabric_settings(ROCE, HOST, facts))
    assert (found["NCCL_IB_HCA"], found["NCCL_NET"]) == ("=mlx5_0", "IB")


def test_the_users_value_wins_and_says_so():
    mine = {"NCCL_IB_TC": "104", "NCCL_DEBUG": "INFO", "PATH": "/x", "NCCL_SOCKET_IFNAME": "eth1"}
    found = {setting.name: setting for setting in fabric_settings(ROCE, HOST, None, mine).environment}
    assert (found["NCCL_IB_TC"].value, found["NCCL_IB_TC"].source) == ("104", "user")
    assert "106" in found["NCCL_IB_TC"].reason
    assert found["NCCL_DEBUG"].source == "user"
    assert "PATH" not in found


@pytest.mark.parametrize("value", ["a'; touch /tmp/x #", "two\nlines", '"$(id)" `id`', "ünïcode ü", ""])
def test_rank_script_passes_values_and_arguments_byte_for_byte(value, tmp_path):
    script = tmp_path / "rank"
    environment = fabric_settings(TCP, HOST, None, {"NCCL_DEBUG": value}).environment
    script.write_text(rank_script(environment, GLOO, grace_s=1.0))
    shown = subprocess.run(
        ["sh", script, "sh", "-c", 'printf "%s|%s" "$NCCL_DEBUG" "$1"', "_", value],
        env={"NCCL_DEBUG": "rank 0's", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{value}|{value}"


def limits(found):
    return [found.docker_flags[at + 1] for at, flag in enumerate(found.docker_flags) if flag == "--ulimit"]


def test_limits_an_engine_cannot_give_are_not_asked_for():
    weak = DockerFacts(memlock_bytes=8 << 20, nofile=524288, may_raise_limits=False)
    stack = "stack=67108864:67108864"
    assert limits(fabric_settings(ROCE, HOST, roce_facts(V2_IPV4, docker=weak))) == ["nofile=524288:524288", stack]
    assert limits(fabric_settings(TCP, HOST, roce_facts(V2_IPV4, docker=weak))) == ["nofile=524288:524288", stack]


def test_limits_where_everything_is_possible():
    strong = DockerFacts(memlock_bytes=8 << 20, nofile=1024, may_raise_limits=True)
    stack, nofile = "stack=67108864:67108864", "nofile=1048576:1048576"
    assert limits(fabric_settings(ROCE, HOST, roce_facts(docker=strong))) == ["memlock=-1:-1", nofile, stack]
    assert limits(fabric_settings(TCP, HOST, roce_facts(docker=strong))) == ["memlock=-1:-1", nofile, stack]
    assert limits(fabric_settings(ROCE, HOST)) == ["memlock=-1:-1", nofile, stack]
    assert limits(fabric_settings(TCP, HOST)) == [stack]

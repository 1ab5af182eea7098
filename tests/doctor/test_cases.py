"""Recorded machine → what the probe finds → the settings a job gets there."""

import pytest

from gpurun.inventory.model import Fabric, FabricKind, Host
from gpurun.launch.fabric import fabric_settings
from gpurun.node import nvml, nvml_apart

IB = FabricKind.INFINIBAND
ROCE = FabricKind.ROCE

# case, fabric kind, interface, HCAs named in the inventory → NCCL_IB_HCA, GID index, uverbs
EXPECTED = [
    # The eight compute HCAs, not the two Ethernet ones for storage.
    ("dgx-a100-infiniband", IB, "ibp12s0", (),
     "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1", None, "0 1 2 3 6 7 8 9"),
    ("dgx-a100-infiniband", IB, "ibp12s0", ("mlx5_0", "mlx5_9:1"), "mlx5_0:1,mlx5_9:1", None, "0 9"),
    ("roce-v2", ROCE, "ens1f0", ("mlx5_0",), "mlx5_0:1", "3", "0"),
    ("roce-link-local", ROCE, "ens1f0", ("mlx5_0",), "mlx5_0:1", "1", "0"),
    ("roce-ipv6", ROCE, "ens1f0", ("mlx5_0",), "mlx5_0:1", "3", "0"),
    ("ports-down", IB, "ib2", (), "mlx5_2:1", None, "2"),
    ("mixed-link-layers", IB, "ib0", (), "mlx4_0:1", None, "0"),
    ("mixed-link-layers", ROCE, "ens2d1", ("mlx4_0",), "mlx4_0:2", "3", "0"),
    ("mixed-link-layers", ROCE, "ens3", ("mlx5_0",), "mlx5_0:1", "3", "1"),
    ("mlx5-1-and-mlx5-10", IB, "ib1", (), "mlx5_1:1", None, "1"),
    ("gid-holes", ROCE, "ens1f0", ("mlx5_0",), "mlx5_0:1", "5", "0"),
    ("gid-holes", ROCE, "ens1f0.90", ("mlx5_0",), "mlx5_0:1", "7", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kind", "interface", "hcas", "names", "gid", "nodes"), EXPECTED)
def test_settings_of_a_machine(machine, case, kind, interface, hcas, names, gid, nodes):
    fabric = Fabric("fabric", kind, interface, hcas)
    found = fabric_settings(fabric, Host(case, "r1", "any", 8, "fabric"), machine(case))
    values = {setting.name: setting.value for setting in found.environment}
    assert values["NCCL_IB_HCA"] == f"={names}"
    assert values["UCX_NET_DEVICES"] == names
    assert values.get("NCCL_IB_GID_INDEX") == gid
    flags = found.docker_flags
    devices = [flags[at + 1] for at, flag in enumerate(flags) if flag == "--device"]
    assert devices == [*(f"/dev/infiniband/uverbs{node}" for node in nodes.split()), "/dev/infiniband/rdma_cm"]
    assert all(case in setting.reason for setting in found.environment if setting.source == "probe")


def test_dgx(machine):
    found = machine("dgx-a100-infiniband")
    assert (found.driver, found.cuda, found.peermem) == ("470.141.03", "11.4", "470.141.03")
    first = found.gpus[0]
    assert (first.model, first.generation, first.memory_mib) == ("NVIDIA A100-SXM4-80GB", "ampere", 81920)
    assert first.pci_path == ("pci0000:00", "0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:07:00.0")
    assert first.nvlink_peers == (1, 2, 3, 4, 5, 6, 7)  # over the switches
    assert (found.gpus[3].retired_pages, found.gpus[3].retirement_pending) == (3, True)
    assert [hca.name for hca in found.hcas] == [f"mlx5_{n}" for n in range(10)]
    port = found.hcas[0].ports[0]
    assert (port.link_layer, port.rate_gbit, port.active) == ("InfiniBand", 200.0, True)
    assert [gid.index for gid in port.gids] == [0]


def test_roce_host(machine):
    found = machine("roce-v2")
    assert [gpu.nvlink_peers for gpu in found.gpus] == [(1,), (0,), (3,), (2,)]
    assert found.gpus[3].nvlink_inactive == (3,)
    assert found.gpus[2].throttle == ("hardware thermal slowdown",)  # a power cap is no fault
    assert found.gpus[0].retired_pages == 1
    port = found.hcas[0].ports[0]
    assert [(gid.index, gid.kind, gid.address) for gid in port.gids][3] == (3, "RoCE v2", "::ffff:10.200.1.10")
    assert {gid.interface for gid in port.gids} == {"ens1f0"}


def test_holes_and_empty_entries_are_left_out(machine):
    gids = machine("gid-holes").hcas[0].ports[0].gids
    assert [gid.index for gid in gids] == [0, 1, 4, 5, 7]


def test_natural_order(machine):
    assert [hca.name for hca in machine("mlx5-1-and-mlx5-10").hcas][1:3] == ["mlx5_1", "mlx5_2"]


def test_a_lost_gpu_is_named_and_the_others_are_there(machine):
    good, bad = machine("mlx5-1-and-mlx5-10").gpus
    assert (good.generation, good.problem) == ("hopper", "")
    assert "nvmlDeviceGetHandleByIndex" in bad.problem
    assert bad.memory_mib is None


def test_an_old_driver(machine):
    found = machine("no-hca")
    assert [gpu.generation for gpu in found.gpus] == ["volta", "volta"]
    assert [gpu.numa_node for gpu in found.gpus] == [0, 1]
    assert found.gpus[0].processes[0].memory_mib is None
    assert found.hcas == ()


def test_a_real_h200_in_a_virtual_machine(machine):
    """NVLink and retired pages are "not supported" there, and the device has no NUMA node: none of it is a fault."""
    (gpu,) = machine("one-h200").gpus
    assert (gpu.model, gpu.generation, gpu.memory_mib, gpu.problem) == ("NVIDIA H200", "hopper", 143771, "")
    assert (gpu.ecc, gpu.ecc_uncorrected, gpu.retired_pages, gpu.throttle) == (True, 0, 0, ())
    assert (gpu.pci_bus, gpu.numa_node, gpu.nvlink_peers, gpu.nvlink_inactive) == ("0000:00:06.0", None, (), ())


def test_an_idle_gpu_uses_no_memory_as_nvidia_smi_says(nvml_of):
    """The driver keeps 615 MiB of an H200 for itself; only NVML's second version leaves them out."""
    (sample,) = nvml.sample_gpus(nvml.open_devices(nvml_of("one-h200")))
    assert (sample["memory_used_mib"], sample["memory_mib"], sample["power_w"]) == (0, 143771, 80.0)
    recorded = nvml_of("one-h200")
    assert nvml_apart._card(recorded, (0, ""))["memory_mib"] == 0
    del recorded.document["gpus"][0][f"nvmlDeviceGetMemoryInfo[{nvml.MEMORY_V2}]"]
    recorded.document["gpus"][0]["nvmlDeviceGetMemoryInfo"] = {"error": 3}
    assert nvml_apart._card(recorded, (0, ""))["memory_mib"] is None


def test_a_driver_without_the_second_version_counts_its_own_memory(nvml_of):
    recorded = nvml_of("one-h200")
    recorded.document["gpus"][0][f"nvmlDeviceGetMemoryInfo[{nvml.MEMORY_V2}]"] = {"error": 13}
    assert nvml_apart._card(recorded, (0, ""))["memory_mib"] == 615
    assert nvml.sample_gpus(nvml.open_devices(recorded))[0]["memory_used_mib"] == 615


def test_down_ports(machine):
    states = [(port.state, port.physical_state) for hca in machine("ports-down").hcas for port in hca.ports]
    assert states == [("DOWN", "Polling"), ("INIT", "LinkUp"), ("ACTIVE", "LinkUp")]


def test_numa_node_minus_one_is_not_known(machine):
    assert {hca.numa_node for hca in machine("mixed-link-layers").hcas} == {None}

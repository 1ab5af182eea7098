"""Healthy hosts, and each fault that a host can have, as their probes describe them."""

import dataclasses

from gpurun.doctor.survey import Survey, diagnose
from gpurun.facts import DockerFacts, Gid, Gpu, GpuProcess, Hardware, Hca, HcaPort, Limits, Nic
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack

ROCE = Fabric("roce25", FabricKind.ROCE, "ens1f0", hcas=("mlx5_0",), traffic_class=106)
TCP = Fabric("tcp", FabricKind.TCP, "ens1f0")
NAMES = tuple(f"gpu-r1-{n:02d}" for n in range(1, 17))
GB = 1 << 30


def inventory(fabric=ROCE, names=NAMES, **host):
    hosts = tuple(Host(name, "r1", "pascal", 2, fabric.name, **host) for name in names)
    return Inventory(hosts, (Rack("r1", names),), {fabric.name: fabric})


def healthy(at=1):
    gids = (
        Gid(1, f"fe80::{at:x}", "RoCE v2", "ens1f0"),
        Gid(2, f"::ffff:10.0.0.{at}", "IB/RoCE v1", "ens1f0"),
        Gid(3, f"::ffff:10.0.0.{at}", "RoCE v2", "ens1f0"),
    )
    port = HcaPort(1, "ACTIVE", "Ethernet", 25.0, "LinkUp", gids)
    return Hardware(
        f"gpu-r1-{at:02d}",
        hostname=f"gpu-r1-{at:02d}",
        clock_offset_s=0.001,
        clock_error_s=0.002,
        resolves_to=(f"10.0.0.{at}",),
        driver="535.183.06",
        gpus=tuple(Gpu(n, "Tesla P100-SXM2-16GB", "pascal", 16280) for n in range(2)),
        peermem="535.183.06",
        hcas=(Hca("mlx5_0", (port,), uverbs="uverbs0"),),
        nics=(Nic("ens1f0", "UP", 9000, 25000, addresses=(f"10.0.0.{at}/24",), trust="dscp", pfc=(3,)),),
        infiniband_nodes=("rdma_cm", "uverbs0"),
        docker=DockerFacts("26.1", "overlay2", "/var/lib/docker", 500 * GB, 900 * GB, "runtime"),
        limits=Limits(-1, 1048576),
    )


def with_nic(found, **changes):
    return dataclasses.replace(found, nics=(dataclasses.replace(found.nics[0], **changes),))


def with_port(found, **changes):
    port = dataclasses.replace(found.hcas[0].ports[0], **changes)
    return dataclasses.replace(found, hcas=(dataclasses.replace(found.hcas[0], ports=(port,)),))


def with_gpu(found, **changes):
    return dataclasses.replace(found, gpus=(dataclasses.replace(found.gpus[0], **changes), *found.gpus[1:]))


def found_of(change, fabric=ROCE, count=16, **host):
    """Findings when the seventh host has a fault."""
    hardware = {name: healthy(at) for at, name in enumerate(NAMES[:count], 1)}
    hardware[NAMES[6]] = change(hardware[NAMES[6]])
    return diagnose(inventory(fabric, **host), Survey(hardware, {}))


def replaced(**changes):
    return lambda found: dataclasses.replace(found, **changes)


GPU_FAULTS = {
    "gpu-driver": replaced(gpus=(), gpu_problem="no NVIDIA driver: Driver Not Loaded"),
    "gpu-count": replaced(gpus=(Gpu(0, "Tesla P100-SXM2-16GB", "pascal", 16280),)),
    "gpu-generation": lambda found: with_gpu(found, generation="volta"),
    "gpu-lost": lambda found: with_gpu(found, problem="GPU is lost"),
    "gpu-ecc": lambda found: with_gpu(found, ecc_uncorrected=3),
    "gpu-throttle": lambda found: with_gpu(found, throttle=("power brake",)),
    "gpu-pcie": lambda found: with_gpu(found, pcie_width=8, pcie_max_width=16),
    "gpu-nvlink": lambda found: with_gpu(found, nvlink_inactive=(3,)),
    "gpu-stranger": lambda found: with_gpu(found, processes=(GpuProcess(7, 100, "eve", "/usr/bin/python3 x.py"),)),
}
HOST_FAULTS = {
    "docker": replaced(docker=DockerFacts(problem="no Docker engine answers at /var/run/docker.sock")),
    "docker-gpu": lambda found: dataclasses.replace(found, docker=dataclasses.replace(found.docker, gpu_support="")),
    "docker-space": lambda found: dataclasses.replace(found, docker=dataclasses.replace(found.docker, free_bytes=GB)),
    "memory-limit": lambda found: dataclasses.replace(
        found, docker=dataclasses.replace(found.docker, limits_memory=False)
    ),
    "interface": lambda found: with_nic(found, name="eno1"),
    "address": lambda found: with_nic(found, addresses=()),
    "own-name": replaced(resolves_to=("127.0.1.1",)),
    "hca": replaced(hcas=()),
    "hca-port": lambda found: with_port(found, state="DOWN", physical_state="Polling"),
    "hca-link-layer": lambda found: with_port(found, link_layer="InfiniBand"),
    "hca-node": replaced(infiniband_nodes=("rdma_cm",)),
    "roce-gid": lambda found: with_port(found, gids=()),
    "roce-qos": lambda found: with_nic(found, trust="pcp"),
    "gpudirect": replaced(peermem=""),
    "probe": replaced(problems={"limits": "OSError: no"}),
    "mtu": lambda found: with_nic(found, mtu=1500),
    "link-rate": lambda found: with_port(found, rate_gbit=10.0),
    "driver": replaced(driver="470.1"),
    "clock": replaced(clock_offset_s=7.0),
}

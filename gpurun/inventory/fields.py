"""Every key an inventory may have: its kind and what it means.

The loader, ``set`` and the schema read this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpurun.inventory.model import FabricKind
from gpurun.inventory.values import (
    DOCKER_HOST,
    HCA,
    INTERFACE,
    LABEL,
    USER,
    Address,
    Choice,
    Flag,
    GpuIndices,
    Kind,
    Labels,
    Many,
    Memory,
    Positive,
    Text,
    Whole,
    Word,
)

NAME = Word(LABEL, "a name (letters, digits, '.', '_', '-')")


@dataclass(frozen=True)
class Field:
    """One key: how its value is read, and one sentence for people."""

    kind: Kind
    about: str


HOST: Mapping[str, Field] = {
    "gpus": Field(Whole(0, 128), "How many GPUs the host has"),
    "generation": Field(NAME, "GPU family, such as pascal; a gang never mixes generations"),
    "fabric": Field(NAME, "Name of the fabric its ranks train over"),
    "gpu_model": Field(Text(), "GPU model as NVML names it, such as Tesla P100-SXM2-16GB"),
    "gpu_memory_mib": Field(Memory(), "Memory of each GPU in MiB, or such as 80GiB"),
    "nvlink": Field(Many(GpuIndices()), "Groups of GPU indices that NVLink connects: [[0, 1, 2, 3], 4-7]"),
    "near_hca": Field(GpuIndices(), "GPU indices on the HCA's own PCI root or NUMA node"),
    "user": Field(Word(USER, "a user name"), "Whom SSH logs in as; ~/.ssh/config decides if left out"),
    "address": Field(Address(), "What SSH connects to; the host's name if left out; a range for a range of hosts"),
    "port": Field(Whole(1, 65535), "SSH port"),
    "fabric_address": Field(Address(), "Address other hosts' ranks use; the fabric interface's own if left out"),
    "labels": Field(Labels(), "Words of your own, chosen from with @label:KEY=VALUE"),
}

PER_HOST = ("address", "fabric_address")  # no two hosts have the same

FABRIC: Mapping[str, Field] = {
    "kind": Field(Choice(tuple(kind.value for kind in FabricKind)), "How ranks of different hosts talk"),
    "interface": Field(Word(INTERFACE, "a network interface"), "Interface for sockets, such as ens1f0"),
    "hcas": Field(Many(Word(HCA, "an HCA such as mlx5_0 or mlx5_0:1")), "RDMA devices in use"),
    "traffic_class": Field(Whole(0, 255, nullable=True), "NCCL_IB_TC: DSCP << 2 plus ECN bits"),
    "service_level": Field(Whole(0, 15, nullable=True), "NCCL_IB_SL"),
    "gid_index": Field(Whole(0, 255, nullable=True), "NCCL_IB_GID_INDEX, if it must be fixed"),
    "host_to_host": Field(Flag(), "Whether hosts may open connections to each other for image transfer"),
    "chains": Field(Whole(1, 64), "How many parallel transfer chains the fabric carries"),
}
FABRIC_NEEDS = ("kind", "interface")

POOL: Mapping[str, Field] = {
    "parent": Field(NAME, "The pool this one is part of"),
    "reservation": Field(Whole(0, 10_000_000), "GPUs that are always this team's"),
    "limit": Field(Whole(0, 10_000_000, nullable=True), "Most GPUs at once; null = no limit"),
    "share": Field(Positive(), "Weight when what is left is shared"),
}

HEAD: Mapping[str, Field] = {
    "docker_host": Field(
        Word(DOCKER_HOST, "a Docker address such as unix:///run/docker.sock"),
        "The head node's Docker, as DOCKER_HOST",
    ),
}

SSH_CONFIG = Field(Text(longest=4096), "OpenSSH client configuration to use; relative to this file")
VERSION = Field(Choice(("1",)), "Format of this file")
TOP = ("version", "defaults", "fabrics", "racks", "pools", "ssh_config", "head")
RACK = ("hosts", "defaults")

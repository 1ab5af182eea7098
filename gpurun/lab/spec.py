"""The options and the hosts of a lab, as frozen values. Nothing here changes the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from gpurun.errors import BadInput
from gpurun.lab.gpus.models import MODELS

MOST_HOSTS = 240
MOST_GPUS = 16
HEAD = "head"
FABRICS = ("tcp", "roce")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")
_SMALLEST_DISK_MIB = 64
_FIRST_HOST = 11  # the address of host number 0 within the lab's /24; .1 is the head


@dataclass(frozen=True)
class LabSpec:
    """The options of ``gpurun lab up``.

    Attributes:
        hosts: hosts per rack.
        gpus: GPUs per host.
        generation: GPU generation of each rack; the last one also applies to all further racks.
        host_link_bps, rack_uplink_bps: link rates, bits per second, each direction.
        fabric: the hosts' fabric in the inventory that the lab writes.
        disk_mib: size of each host's own disk; None = the machine's file system, unlimited.
        resolve_names: each host's ``/etc/hosts`` contains the other hosts (False: a fault for doctor to find).
    """

    name: str = "default"
    racks: int = 2
    hosts: int = 2
    gpus: int = 4
    generation: tuple[str, ...] = ("pascal",)
    host_link_bps: int = 10_000_000_000
    rack_uplink_bps: int = 2_500_000_000
    fabric: str = "tcp"
    disk_mib: int | None = None
    resolve_names: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_count("--racks", self.racks, MOST_HOSTS)
        _check_count("--hosts", self.hosts, MOST_HOSTS // self.racks)
        _check_count("--gpus", self.gpus, MOST_GPUS)
        for generation in self.generation:
            if generation not in MODELS:
                raise BadInput(
                    f"unknown GPU generation {generation!r}", hint=f"choose from: {', '.join(sorted(MODELS))}"
                )
        if self.disk_mib is not None and self.disk_mib < _SMALLEST_DISK_MIB:
            raise BadInput(f"a disk of {self.disk_mib} MiB is too small", hint=f"give {_SMALLEST_DISK_MIB}MiB or more")
        if self.fabric not in FABRICS:
            raise BadInput(f"unknown fabric {self.fabric!r}", hint=f"choose from: {', '.join(FABRICS)}")

    def to_json(self) -> dict[str, object]:
        """Return the options as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LabSpec:
        """Return the options from the values of `to_json`."""
        known = dict(fields)
        known["generation"] = tuple(known["generation"])
        return cls(**known)


@dataclass(frozen=True)
class LabHost:
    """One host of a lab, with its name, address and namespace.

    Attributes:
        number: counted through the whole lab, from 0.
        netns: name of its network namespace, as ``ip netns`` lists it.
    """

    name: str
    rack: str
    number: int
    address: IPv4Address
    generation: str
    gpus: int
    netns: str


def check_name(name: str) -> None:
    """Refuse lab names that are not valid in the name of a namespace, cgroup or folder."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} is not a valid name for a lab",
            hint="use up to 30 lower-case letters, digits and dashes, such as my-lab",
        )


def racks_of(spec: LabSpec) -> tuple[str, ...]:
    """Return the names of the racks: r1, r2, …"""
    return tuple(f"r{number}" for number in range(1, spec.racks + 1))


def hosts_of(spec: LabSpec, subnet: IPv4Network) -> tuple[LabHost, ...]:
    """Return all hosts, rack by rack: gpu-r1-01, gpu-r1-02, …"""
    return tuple(
        LabHost(
            name=(name := f"gpu-{rack}-{place + 1:02d}"),
            rack=rack,
            number=(number := index * spec.hosts + place),
            address=subnet[_FIRST_HOST + number],
            generation=spec.generation[min(index, len(spec.generation) - 1)],
            gpus=spec.gpus,
            netns=netns_of(spec.name, name),
        )
        for index, rack in enumerate(racks_of(spec))
        for place in range(spec.hosts)
    )


def netns_prefix(lab: str) -> str:
    """Return the prefix of a lab's network namespaces. It is unique, because no lab's name contains its dot."""
    return f"gpurun.{lab}."


def netns_of(lab: str, host: str) -> str:
    """Return a host's network namespace."""
    return netns_prefix(lab) + host


def fabric_netns(lab: str) -> str:
    """Return the network namespace of a lab's bridges."""
    return f"{netns_prefix(lab)}fabric"


def _check_count(option: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise BadInput(f"{option} is {count}, but must be between 1 and {most}", hint="choose a number in this range")

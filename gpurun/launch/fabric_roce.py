"""Which GID a RoCE port should use, and whether NCCL would find it without being told. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from gpurun.facts.hardware import Gid
from gpurun.inventory.model import Fabric
from gpurun.launch.fabric_hcas import ChosenPort

ROCE_V2 = "RoCE v2"
FINDS_GID_ITSELF = (2, 21)
"""NCCL release since which the GID index is found at run time (NCCL user guide, NCCL_IB_GID_INDEX)."""


@dataclass(frozen=True)
class GidNeed:
    """What NCCL must be told about GIDs on one host; nothing, if all fields are empty.

    Attributes:
        ucx_too: UCX's own automatic choice would miss this GID as well.
    """

    index: int | None = None
    address_family: str = ""
    reason: str = ""
    ucx_too: bool = False


def gid_need(fabric: Fabric, ports: tuple[ChosenPort, ...], version: tuple[int, ...] | None) -> GidNeed:
    """Decide for one host.

    Before 2.21, NCCL used index 0 by default, which is RoCE v1 on most hosts. Since 2.21 it finds the first
    RoCE v2 entry of NCCL_IB_ADDR_FAMILY (IPv4 by default), and its guide says to leave the index unset. It
    skips link-local addresses (`net_ib/connect.cc`, `ncclUpdateGidIndex`, `validGid`). If the version is
    unknown, gpurun sets the index: the right index harms no version, and 2.18 does not work with a wrong one.

    `NCCL_IB_GID_INDEX` is one number for all ports. If no index fits all ports, gpurun uses the first port's.
    """
    tables = [port.probed.gids for port in ports if port.probed]
    best = [candidates(gids, fabric.interface) for gids in tables]
    if not best or not all(best):
        return GidNeed()
    index = _common_index(best)
    chosen = next(gid for gid in best[0] if gid.index == index)
    kind = address_kind(chosen.address)
    if version is None or version < FINDS_GID_ITSELF:
        age = "this image's NCCL version is not known" if version is None else "NCCL before 2.21 takes index 0"
        return GidNeed(index, reason=f"RoCE v2 GID {chosen.address} is at {index}; {age}", ucx_too=kind == "link-local")
    if kind == "link-local":
        why = f"only link-local GIDs, which NCCL passes over; RoCE v2 is at {index}"
        return GidNeed(index, reason=why, ucx_too=True)
    if kind == "ipv6":
        return GidNeed(address_family="AF_INET6", reason=f"RoCE v2 GIDs are IPv6 only ({chosen.address})")
    if all(_nccl_finds(gids) == index for gids in tables):
        return GidNeed()
    why = f"RoCE v2 GID {chosen.address} of {fabric.interface} is at {index}, NCCL would take another"
    return GidNeed(index, reason=why)


def candidates(gids: tuple[Gid, ...], interface: str) -> tuple[Gid, ...]:
    """RoCE v2 entries, best first: the fabric's interface, then IPv4, IPv6, link-local, then lowest index.

    Entries of other interfaces count only if the fabric's own has none: it may be a bond over the HCAs.
    """
    v2 = [gid for gid in gids if gid.kind == ROCE_V2 and address_kind(gid.address)]
    own = [gid for gid in v2 if gid.interface == interface]
    order = ("ipv4", "ipv6", "link-local")
    return tuple(sorted(own or v2, key=lambda gid: (order.index(address_kind(gid.address)), gid.index)))


def address_kind(address: str) -> str:
    """``ipv4`` (mapped), ``ipv6`` or ``link-local``; empty for what is no address."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return ""
    if parsed.ipv4_mapped:
        return "ipv4"
    return "link-local" if parsed.is_link_local else "ipv6"


def _common_index(best: list[tuple[Gid, ...]]) -> int:
    kind = address_kind(best[0][0].address)
    same_kind = [{gid.index for gid in gids if address_kind(gid.address) == kind} for gids in best]
    shared = set.intersection(*same_kind)
    first = best[0][0].index
    return first if first in shared or not shared else min(shared)


def _nccl_finds(gids: tuple[Gid, ...]) -> int | None:
    found = (gid.index for gid in gids if gid.kind == ROCE_V2 and address_kind(gid.address) == "ipv4")
    return min(found, default=None)

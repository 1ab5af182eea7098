"""Which GID the RoCE ports of a host should use. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.facts.hardware import Gid
from gpurun.inventory.model import Fabric

ROCE_V2 = "RoCE v2"
_KINDS = ("ipv4", "ipv6")
"""Kinds of addresses that are a port's own, the one that reaches most hosts first."""
_ORDER = (*_KINDS, "link-local")


@dataclass(frozen=True)
class GidChoice:
    """What NCCL and UCX are told about GIDs on one host; nothing, if all fields are empty.

    Attributes:
        index: the index for all ports.
        address_family: the kind of address that NCCL looks for itself, if no index fits all ports.
        ucx_too: UCX's own automatic choice would miss this GID as well.
    """

    index: int | None = None
    address_family: str = ""
    reason: str = ""
    ucx_too: bool = False


def choose_gid(fabric: Fabric, tables: Sequence[tuple[Gid, ...]]) -> GidChoice:
    """Choose for one host.

    Before 2.21, NCCL uses index 0, which is RoCE v1 on most hosts. Since 2.21 it finds an index itself, the first
    RoCE v2 entry of NCCL_IB_ADDR_FAMILY, also that of a VLAN, and skips link-local addresses (`net_ib/connect.cc`,
    `ncclUpdateGidIndex`, `validGid`). An image does not say which NCCL runs in it: its ``NCCL_VERSION`` is the base
    image's, and PyTorch brings its own. The right index harms no version, so gpurun always sets it.

    ``NCCL_IB_GID_INDEX`` is one number for all ports. If they need different ones, only NCCL since 2.21 can do it.

    Args:
        tables: the GIDs of each port that the job uses.
    """
    best = [candidates(gids, fabric.interface) for gids in tables]
    if not best or not all(best):
        return GidChoice()
    common = common_kind(tables, fabric)
    first = next((gid for gid in best[0] if address_kind(gid.address) == common), best[0][0])
    kind = address_kind(first.address)
    indices = [{gid.index for gid in gids if address_kind(gid.address) == kind} for gids in best]
    shared = set.intersection(*indices)
    if not shared and kind != "link-local":
        why = "the ports need different GID indices, which NCCL before 2.21 cannot use"
        return GidChoice(address_family="AF_INET6" if kind == "ipv6" else "AF_INET", reason=why)
    index = first.index if first.index in shared or not shared else min(shared)
    address = next((gid.address for gid in best[0] if gid.index == index), first.address)
    return GidChoice(index, reason=f"RoCE v2 GID {address} is at index {index}", ucx_too=kind == "link-local")


def has_gid(gids: tuple[Gid, ...], fabric: Fabric) -> bool:
    """Return whether a port has a GID that a job can use: at the inventory's index, if it fixes one."""
    if fabric.gid_index is None:
        return bool(candidates(gids, fabric.interface))
    return any(gid.index == fabric.gid_index and gid.kind == ROCE_V2 for gid in gids)


def kinds_of(gids: tuple[Gid, ...], fabric: Fabric) -> frozenset[str]:
    """Return the kinds of addresses by which a job can use a port."""
    return frozenset(address_kind(gid.address) for gid in candidates(gids, fabric.interface))


def common_kind(tables: Sequence[tuple[Gid, ...]], fabric: Fabric) -> str:
    """Return the kind of address of their own that most ports of a host have; link-local if none has one.

    Where all rails have IPv6 addresses, one port may have an IPv4 address, too: it leads to none of the others.
    """
    found = Counter(kind for gids in tables for kind in kinds_of(gids, fabric))
    most = max(_KINDS, key=lambda kind: found[kind])
    return most if most in found else next(iter(found), "")


def candidates(gids: tuple[Gid, ...], interface: str) -> tuple[Gid, ...]:
    """RoCE v2 entries, best first: the fabric's interface, then IPv4, IPv6, link-local, then lowest index.

    Entries of other interfaces count only if the fabric's own has none: it may be a bond over the HCAs.
    """
    v2 = [gid for gid in gids if gid.kind == ROCE_V2 and address_kind(gid.address)]
    own = [gid for gid in v2 if gid.interface == interface]
    return tuple(sorted(own or v2, key=lambda gid: (_ORDER.index(address_kind(gid.address)), gid.index)))


def address_kind(address: str) -> str:
    """``ipv4`` (mapped), ``ipv6`` or ``link-local``; empty for what is no address."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return ""
    if parsed.ipv4_mapped:
        return "ipv4"
    return "link-local" if parsed.is_link_local else "ipv6"

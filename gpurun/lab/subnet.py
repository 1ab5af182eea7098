"""Which addresses a lab gets: the same ones every time, unless the machine already uses them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from ipaddress import IPv4Network

from gpurun.lab.commands import run
from gpurun.lab.errors import LabFailed

RANGE = IPv4Network("10.192.0.0/11")  # 8192 networks of 254 addresses, private by RFC 1918


def choose(lab: str, taken: Iterable[IPv4Network]) -> IPv4Network:
    """The lab's /24: where its name's hash points to, or the next one after it that overlaps nothing taken."""
    taken = tuple(taken)
    networks = list(RANGE.subnets(new_prefix=24))
    first = int.from_bytes(hashlib.sha256(lab.encode()).digest()[:8], "big") % len(networks)
    for network in (*networks[first:], *networks[:first]):
        if not any(network.overlaps(other) for other in taken):
            return network
    raise LabFailed(
        f"this machine already has routes for all of {RANGE}", hint="take down labs or VPNs that are not needed"
    )


def taken() -> tuple[IPv4Network, ...]:
    """Every IPv4 network that this machine has a route to, its default route aside."""
    routes = json.loads(run(["ip", "-4", "-json", "route", "show", "table", "all"]))
    return tuple(
        IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default" and route.get("type") not in ("broadcast", "local", "multicast")
    )

"""The addresses of a lab: the same every time, unless the machine already uses them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from ipaddress import IPv4Network

from gpurun.lab.commands import run
from gpurun.lab.errors import LabFailed

RANGE = IPv4Network("10.192.0.0/11")  # 8192 networks of 254 addresses, private by RFC 1918


def choose(lab: str, taken: Iterable[IPv4Network]) -> IPv4Network:
    """Return the lab's /24: the network that its name's hash selects, or the next network without a conflict."""
    taken = tuple(taken)
    networks = list(RANGE.subnets(new_prefix=24))
    first = int.from_bytes(hashlib.sha256(lab.encode()).digest()[:8], "big") % len(networks)
    for network in (*networks[first:], *networks[:first]):
        if not any(network.overlaps(other) for other in taken):
            return network
    raise LabFailed(
        f"a lab needs a free network in {RANGE}, but this machine has routes for all of this range",
        hint="stop labs or VPNs that you do not need",
    )


def taken() -> tuple[IPv4Network, ...]:
    """Return every IPv4 network to which this machine has a route, except its default route."""
    routes = json.loads(run(["ip", "-4", "-json", "route", "show", "table", "all"]))
    return tuple(
        IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default" and route.get("type") not in ("broadcast", "local", "multicast")
    )

"""A lab's network: one bridge per rack, a spine that connects them, and rate limits on every link in both directions.

All bridges are in one separate network namespace. So the machine's own namespace gets only one new interface, the
head's link to the spine, and the machine's firewall does not filter traffic between hosts::

    head ─── spine ═══ uplink ═══ rack r1 ─── eth0 of gpu-r1-01
               ║                         └─── eth0 of gpu-r1-02
               ╚══════ uplink ═══ rack r2 ─── …

In the fabric's namespace, a port has the name of the connected host: ``head``, ``gpu-r1-01``. An uplink has two ends:
``r1-up`` on the spine and ``r1-down`` on the rack's bridge.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from gpurun.lab.process import LabFailed, run_command
from gpurun.lab.spec import HEAD, LabHost, LabSpec, fabric_netns, netns_of, netns_prefix, racks_of

# The addresses of a lab: the same every time, unless the machine already uses them.


RANGE = IPv4Network("10.192.0.0/11")  # 8192 networks of 254 addresses, private by RFC 1918


def choose_subnet(lab: str, taken: Iterable[IPv4Network]) -> IPv4Network:
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


def taken_subnets() -> tuple[IPv4Network, ...]:
    """Return every IPv4 network to which this machine has a route, except its default route."""
    routes = json.loads(run_command(["ip", "-4", "-json", "route", "show", "table", "all"]))
    return tuple(
        IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default" and route.get("type") not in ("broadcast", "local", "multicast")
    )


# Check the size of the kernel's neighbour table, which all hosts of all labs on the machine share.


SETTING = "net.ipv4.neigh.default.gc_thresh3"


def check_neighbours(labs: Iterable[LabSpec], proc: Path = Path("/proc/sys")) -> None:
    """Refuse labs whose hosts could fill the table. Does nothing if the kernel does not report the table's size.

    Raises:
        LabFailed: the table is too small; the hint is the command that enlarges it.
    """
    try:
        most = int((proc / SETTING.replace(".", "/")).read_text())
    except (OSError, ValueError):
        return
    needed = sum(_entries(lab.racks * lab.hosts) for lab in labs)
    if needed > most:
        room = 1 << (2 * needed).bit_length()
        raise LabFailed(
            f"the kernel's neighbour table holds at most {most} entries, but this machine's labs may need {needed}",
            hint=f"run: sudo sysctl -w {SETTING}={room}",
        )


def _entries(hosts: int) -> int:
    """Return the entries: the head knows each host; each host knows the head and each other host."""
    return hosts * (hosts + 1)


NETNS_FOLDER = Path("/run/netns")

_LONGEST_INTERFACE = 15  # IFNAMSIZ - 1
_BURST_S = 0.001  # tbf: bytes that pass at line rate; at least two of the largest segments
_SMALLEST_BURST_BYTES = 131_072
_LINK_UP_S = 20.0
_QUEUE_S = 0.01  # tbf: delay of a full queue, as in a switch with a shared buffer


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed a link since its creation, as the kernel counts them, with headers.

    Attributes:
        to_bytes: towards the host, the rack or the head.
        from_bytes: the other direction.
    """

    to_bytes: int
    from_bytes: int


def head_interface(lab: str) -> str:
    """Return the name of the only interface that a lab adds to the machine: ``gl-NAME``, hashed if that is too long."""
    name = f"gl-{lab}"
    if len(name) <= _LONGEST_INTERFACE:
        return name
    return f"gl-{hashlib.sha256(lab.encode()).hexdigest()[:12]}"


def build_network(spec: LabSpec, subnet: IPv4Network) -> None:
    """Create the spine, the racks, and the head's link with its address. No host is attached yet."""
    fabric, head = fabric_netns(spec.name), head_interface(spec.name)
    _ip(
        f"netns add {fabric}",
        f"link add {head} type veth peer name {HEAD} netns {fabric}",
        f"address add {subnet[1]}/{subnet.prefixlen} dev {head}",
        f"link set {head} up",
    )
    bridge = "type bridge mcast_snooping 0"
    lines = [f"link add spine {bridge}", f"link set {HEAD} master spine"]
    for rack in racks_of(spec):
        lines += [
            f"link add {rack} {bridge}",
            f"link add {rack}-up type veth peer name {rack}-down",
            f"link set {rack}-up master spine",
            f"link set {rack}-down master {rack}",
        ]
    names = ["spine", HEAD, *(f"{rack}{end}" for rack in racks_of(spec) for end in ("", "-up", "-down"))]
    _ip(*lines, *(f"link set {name} up" for name in names), netns=fabric)
    _tc(
        *(_shape(f"{rack}-{end}", spec.rack_uplink_bps) for rack in racks_of(spec) for end in ("up", "down")),
        _shape(HEAD, spec.host_link_bps),
        netns=fabric,
    )
    _tc(_shape(head, spec.host_link_bps))


def attach(spec: LabSpec, subnet: IPv4Network, host: LabHost) -> None:
    """Create a host's network namespace and connect its eth0 to its rack."""
    fabric = fabric_netns(spec.name)
    _ip(
        f"netns add {host.netns}",
        f"link add {host.name} netns {fabric} type veth peer name eth0 address {_mac(host)} netns {host.netns}",
    )
    _ip(
        "link set lo up",
        f"address add {host.address}/{subnet.prefixlen} dev eth0",
        "link set eth0 up",
        f"route add default via {subnet[1]}",
        netns=host.netns,
    )
    _ip(f"link set {host.name} master {host.rack} up", netns=fabric)
    _tc(_shape("eth0", spec.host_link_bps), netns=host.netns)
    _tc(_shape(host.name, spec.host_link_bps), netns=fabric)


def unplug(lab: str, host: str) -> None:
    """Remove a host's link immediately: no further packet leaves the host. Does nothing if it has no link."""
    fabric = fabric_netns(lab)
    if exists(fabric) and host in _ports(fabric):
        _ip(f"link delete {host}", netns=fabric)


def detach(lab: str, host: str) -> None:
    """Remove a host's link and network namespace; does nothing if there are none."""
    unplug(lab, host)
    if exists(netns_of(lab, host)):
        _ip(f"netns delete {netns_of(lab, host)}")


def remove_network(lab: str) -> None:
    """Remove everything that `build` created, even if it did not finish. Hosts must be detached first."""
    head = head_interface(lab)
    if Path(f"/sys/class/net/{head}").exists():
        _ip(f"link delete {head}")
    if exists(fabric_netns(lab)):
        _ip(f"netns delete {fabric_netns(lab)}")


def set_port(lab: str, port: str, *, up: bool) -> None:
    """Connect or cut the link of a host or of ``head``, at the switch's end. A connected link is usable on return.

    Raises:
        LabFailed: the kernel does not bring the link up.
    """
    _ip(f"link set {port} {'up' if up else 'down'}", netns=fabric_netns(lab))
    deadline = time.monotonic() + _LINK_UP_S
    while up and not _carries(lab, port):
        if time.monotonic() > deadline:
            raise LabFailed(
                f"the network link {port} does not come up", hint="check the load of the machine, then try again"
            )
        time.sleep(0.02)
    if up:
        _forget_unanswered(lab)


def _forget_unanswered(lab: str) -> None:
    """Flush unanswered neighbour entries. Otherwise connections fail with "no route to host" for some seconds."""
    flush = "neighbour flush nud incomplete nud failed dev"
    _ip(f"{flush} {head_interface(lab)}")
    for host in hosts_with_netns(lab):
        _ip(f"{flush} eth0", netns=netns_of(lab, host))


def _carries(lab: str, port: str) -> bool:
    """Return True if both ends of a link are up and its bridge forwards; a busy kernel takes seconds for this."""
    (near,) = json.loads(run_command(["ip", "-json", "-details", "-netns", fabric_netns(lab), "link", "show", port]))
    where = ["dev", head_interface(lab)] if port == HEAD else ["dev", "eth0"]
    netns = [] if port == HEAD else ["-netns", netns_of(lab, port)]
    (far,) = json.loads(run_command(["ip", "-json", *netns, "link", "show", *where]))
    states = (near["operstate"], far["operstate"], near["linkinfo"]["info_slave_data"]["state"])
    return states == ("UP", "UP", "forwarding")


def shape_port(lab: str, port: str, rate_bps: int) -> None:
    """Set the rate of a link of a host or of ``head``, in both directions."""
    _tc(_shape(port, rate_bps), netns=fabric_netns(lab))
    if port == HEAD:
        _tc(_shape(head_interface(lab), rate_bps))
    else:
        _tc(_shape("eth0", rate_bps), netns=netns_of(lab, port))


def ports_up(lab: str) -> frozenset[str]:
    """Return the connected ports: names of hosts, ``head``, and the ends of the uplinks."""
    return frozenset(name for name, up in _ports(fabric_netns(lab)).items() if up)


def traffic(lab: str) -> dict[str, Traffic]:
    """Return the bytes over each port since its creation. For an uplink, ``r1-up`` counts the traffic of rack r1."""
    links = json.loads(run_command(["ip", "-json", "-stats", "-netns", fabric_netns(lab), "link", "show"]))
    return {
        link["ifname"]: Traffic(to_bytes=link["stats64"]["tx"]["bytes"], from_bytes=link["stats64"]["rx"]["bytes"])
        for link in links
        if link["ifname"] != "lo"
    }


def exists(netns: str) -> bool:
    """Return True if a network namespace has this name."""
    return (NETNS_FOLDER / netns).exists()


def hosts_with_netns(lab: str) -> list[str]:
    """Return the hosts of a lab that have a network namespace now, whatever the records contain."""
    prefix = netns_prefix(lab)
    if not NETNS_FOLDER.is_dir():
        return []
    names = [path.name.removeprefix(prefix) for path in NETNS_FOLDER.iterdir() if path.name.startswith(prefix)]
    return sorted(set(names) - {"fabric"})


def _mac(host: LabHost) -> str:
    """Return a host's MAC address. It stays the same after a restart, because neighbours cache it."""
    return "02:67:" + host.address.packed.hex(":")


def _ports(netns: str) -> dict[str, bool]:
    links = json.loads(run_command(["ip", "-json", "-netns", netns, "link", "show"]))
    return {link["ifname"]: "UP" in link["flags"] for link in links}


def _shape(interface: str, rate_bps: int) -> str:
    """Return the tc line that limits an interface's outgoing rate (tc-tbf(8))."""
    burst = max(_SMALLEST_BURST_BYTES, int(rate_bps / 8 * _BURST_S))
    return f"qdisc replace dev {interface} root tbf rate {rate_bps}bit burst {burst} latency {int(_QUEUE_S * 1000)}ms"


def _ip(*lines: str, netns: str | None = None) -> None:
    _batch("ip", lines, netns)


def _tc(*lines: str, netns: str | None = None) -> None:
    _batch("tc", lines, netns)


def _batch(program: str, lines: Iterable[str], netns: str | None) -> None:
    where = ["-netns", netns] if netns else []
    run_command([program, *where, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))

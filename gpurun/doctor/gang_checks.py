"""Checks across hosts that may train together: differences where hosts should be alike, and each way between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

from gpurun.doctor.findings import Finding, Severity
from gpurun.doctor.host_checks import plain_addresses
from gpurun.facts import Hardware
from gpurun.inventory.folding import fold
from gpurun.inventory.model import FabricKind, Inventory
from gpurun.launch.fabric import LINK_LAYER, LOOPBACK, candidates, choose_ports, common_kind, split_name
from gpurun.quantities import count
from gpurun.remote.agent import Agent, Reply, bad_answer
from gpurun.remote.fleet import Fleet
from gpurun.state.filesystem import is_shared

CLOCK_WARNING_S = 1.0
CLOCK_ERROR_S = 30.0
"""horovodrun sends wall-clock deadlines between hosts; its default start time-out is 30 s."""

Found = Mapping[str, Hardware]


def check_gang(inventory: Inventory, found: Found) -> Iterator[Finding]:
    """Run every check that compares hosts of one fabric, or of one GPU generation."""
    by_fabric = _groups(inventory, found, lambda name: inventory.by_name[name].fabric)
    for fabric_name, hosts in by_fabric.items():
        interface = inventory.fabrics[fabric_name].interface
        yield from _mtu(hosts, interface)
        yield from _nic_speed(hosts, interface)
        yield from _same_address(hosts, interface)
        if inventory.fabrics[fabric_name].kind is not FabricKind.TCP:
            yield from _hca_rate(hosts, inventory, fabric_name)
            yield from _gid_index(hosts, inventory, fabric_name)
            yield from _gid_kind(hosts, inventory, fabric_name)
    for hosts in _groups(inventory, found, lambda name: inventory.by_name[name].generation).values():
        yield from _drivers(hosts)
    yield from check_clocks(found)


def check_shared_folders(
    found: Found, others: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Iterator[Finding]:
    """Check that no two hosts have one folder: each made a sign in its folder, and none may see another's.

    A file system that is known to be shared is a finding at each host (`gpurun.doctor.host_checks.check_folder`).

    Args:
        others: host that was probed earlier → the signs that it sees now.
    """
    own = {name: host for name, host in found.items() if host.folder_sign and not is_shared(host.folder_kind)}
    seen = {**others, **{name: host.folder_signs for name, host in own.items()}}
    for together in _joined({name, *(by for by in own if own[by].folder_sign in seen[name])} for name in seen):
        hosts = tuple(sorted(together & own.keys()))
        kinds = ", ".join(sorted({own[name].folder_kind or "a file system of unknown type" for name in hosts}))
        evidence = (
            f"{fold(sorted(together))} share one folder, {own[hosts[0]].folder} on {kinds}, so each host"
            " would remove files of the others"
        )
        remedy = (
            "run `gpurun inventory set {hosts} folder=DIR`: DIR is a folder on a local disk that the user may write to"
        )
        yield Finding("shared-folder", Severity.ERROR, hosts, evidence, remedy)


def _joined(groups: Iterable[set[str]]) -> list[set[str]]:
    """Return groups of more than one, those that overlap as one."""
    joined: list[set[str]] = []
    for group in groups:
        near = [each for each in joined if each & group]
        joined = [each for each in joined if not each & group] + [group.union(*near)]
    return [group for group in joined if len(group) > 1]


def _groups(inventory: Inventory, found: Found, key: Callable[[str], str]) -> dict[str, Found]:
    groups: dict[str, dict[str, Hardware]] = {}
    for name in found:
        if name in inventory.by_name:
            groups.setdefault(key(name), {})[name] = found[name]
    return dict(groups)


def odd_ones(values: Mapping[str, object]) -> tuple[dict[object, tuple[str, ...]], object]:
    """Return the hosts that differ from the majority: (value → hosts, the usual value).

    Without a clear majority, returns every host, and None as the usual value.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return {}, None
    (usual, most), (_, second) = counts.most_common(2)
    clear = most > second
    odd: dict[object, tuple[str, ...]] = {}
    for host, value in values.items():
        if not clear or value != usual:
            odd[value] = (*odd.get(value, ()), host)
    return odd, usual if clear else None


def _differing(
    check: str, severity: Severity, what: str, values: Mapping[str, object], remedy: Callable[[object], str]
) -> Iterator[Finding]:
    odd, usual = odd_ones(values)
    if not odd:
        return
    if usual is None:
        sides = "; ".join(f"{value} on {fold(hosts)}" for value, hosts in odd.items())
        everyone = tuple(host for hosts in odd.values() for host in hosts)
        yield Finding(check, severity, everyone, f"{what} differs: {sides}", remedy(None))
        return
    for value, hosts in odd.items():
        yield Finding(check, severity, hosts, f"{what} is {value}, but {usual} on the other hosts", remedy(usual))


def _mtu(hosts: Found, interface: str) -> Iterator[Finding]:
    mtus = {name: nic.mtu for name, found in hosts.items() if (nic := found.nic(interface)) and nic.mtu}
    yield from _differing(
        "mtu", Severity.ERROR, f"the MTU of {interface}", mtus,
        lambda usual: f"sudo ip link set {interface} mtu {usual or 'MTU, with the same MTU on all hosts'}",
    )  # fmt: skip


def _slower(
    check: str, what: str, rates: Mapping[str, float], unit: str, remedy: str, severity: Severity
) -> Iterator[Finding]:
    """Yield hosts below the group's usual rate; without a usual rate, below the best. Faster hosts are no problem."""
    counts = Counter(rates.values()).most_common(2)
    if not counts:
        return
    usual = max(rates.values()) if len(counts) > 1 and counts[0][1] == counts[1][1] else counts[0][0]
    for name, rate in rates.items():
        if rate < usual:
            evidence = f"{what} runs at {rate:g} {unit}, but at {usual:g} {unit} on the other hosts"
            yield Finding(check, severity, (name,), evidence, remedy)


def _nic_speed(hosts: Found, interface: str) -> Iterator[Finding]:
    speeds = {
        name: float(nic.speed_mbit) for name, found in hosts.items() if (nic := found.nic(interface)) and nic.speed_mbit
    }
    remedy = f"check the cable, transceiver and switch port, and run: ethtool {interface}"
    yield from _slower("link-rate", interface, speeds, "Mbit/s", remedy, Severity.ERROR)


def _hca_rate(hosts: Found, inventory: Inventory, fabric_name: str) -> Iterator[Finding]:
    fabric = inventory.fabrics[fabric_name]
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for name, found in hosts.items():
        for hca in found.hcas:
            for port in hca.ports:
                named = [split_name(entry) for entry in fabric.hcas]
                wanted = not named or (hca.name, port.number) in named or (hca.name, None) in named
                if wanted and port.active and port.link_layer == LINK_LAYER[fabric.kind] and port.rate_gbit:
                    rates.setdefault((hca.name, port.number), {})[name] = port.rate_gbit
    for (device, number), by_host in rates.items():
        remedy = f"check the cable, transceiver and switch port, and run: ibstat {device} {number}"
        yield from _slower("link-rate", f"{device} port {number}", by_host, "Gbit/s", remedy, Severity.ERROR)


def _gid_index(hosts: Found, inventory: Inventory, fabric_name: str) -> Iterator[Finding]:
    """Report different GID tables: gpurun sets the index for each host, but users who set the variable must know."""
    fabric = inventory.fabrics[fabric_name]
    if fabric.kind is not FabricKind.ROCE or fabric.gid_index is not None:
        return
    indices = {
        name: best[0].index
        for name, found in hosts.items()
        for hca in found.hcas[:1]
        for port in hca.ports[:1]
        if (best := candidates(port.gids, fabric.interface))
    }
    yield from _differing(
        "gid-table", Severity.NOTE, "the index of the RoCE v2 GID", indices,
        lambda _: "no action is needed: gpurun sets the index for each host. Never set NCCL_IB_GID_INDEX for a "
                  "whole job",
    )  # fmt: skip


def _gid_kind(hosts: Found, inventory: Inventory, fabric_name: str) -> Iterator[Finding]:
    """Check that hosts use RoCE addresses of one kind: a connection has the same kind at both ends.

    A host with only link-local addresses is the one that lost its own.
    """
    fabric = inventory.fabrics[fabric_name]
    if fabric.kind is not FabricKind.ROCE or fabric.gid_index is not None:
        return
    ports = {name: choose_ports(fabric, found) for name, found in hosts.items()}
    tables = {name: [port.probed.gids for port in chosen if port.probed] for name, chosen in ports.items()}
    kinds = {name: common_kind(found, fabric) for name, found in tables.items() if found}
    lost = tuple(name for name, kind in kinds.items() if kind == "link-local")
    remedy = f"sudo ip address add ADDRESS/LENGTH dev {fabric.interface}, or name the interface of the RoCE port"
    if lost and len(lost) < len(kinds):
        evidence = (
            "the RoCE ports have only link-local addresses, but RoCE ports of the other hosts have other addresses"
        )
        yield Finding("roce-gid", Severity.ERROR, lost, evidence, remedy)
        kinds = {name: kind for name, kind in kinds.items() if name not in lost}
    yield from _differing("roce-gid", Severity.ERROR, "the kind of RoCE addresses", kinds, lambda _: remedy)


def _same_address(hosts: Found, interface: str) -> Iterator[Finding]:
    if interface == LOOPBACK and len(hosts) > 1:
        evidence = f"on these hosts, the fabric's interface is {LOOPBACK}, which connects a host only to itself"
        remedy = "correct the interface of the fabric in the inventory"
        yield Finding("interface", Severity.ERROR, tuple(hosts), evidence, remedy)
    owners: dict[str, list[str]] = {}
    for name, found in hosts.items():
        nic = found.nic(interface)
        for address in plain_addresses(nic) if nic else ():
            owners.setdefault(address, []).append(name)
    for address, names in owners.items():
        if len(names) > 1:
            evidence = f"all of these hosts have the same address {address} on {interface}"
            remedy = "give each host an address of its own"
            yield Finding("address", Severity.ERROR, tuple(names), evidence, remedy)


def _drivers(hosts: Found) -> Iterator[Finding]:
    drivers = {name: found.driver for name, found in hosts.items() if found.driver}
    yield from _differing(
        "driver", Severity.WARNING, "the NVIDIA driver", drivers,
        lambda usual: f"install driver {usual} on these hosts" if usual else "install one version on all hosts",
    )  # fmt: skip


def check_clocks(found: Found) -> Iterator[Finding]:
    """Compare each clock with the median of all clocks, because the head's own clock may be wrong."""
    offsets = {name: each.clock_offset_s for name, each in found.items() if each.clock_offset_s is not None}
    if not offsets:
        return
    middle = _middle(offsets.values())
    for name, offset in offsets.items():
        off = offset - middle
        certain = abs(off) - (found[name].clock_error_s or 0.0)
        if certain > CLOCK_WARNING_S:
            severity = Severity.ERROR if certain > CLOCK_ERROR_S else Severity.WARNING
            evidence = f"the host's clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            remedy = "sudo timedatectl set-ntp true; check with: chronyc tracking"
            yield Finding("clock", severity, (name,), evidence, remedy)


def _middle(offsets: Iterable[float]) -> float:
    """Return the median. Compare a single host with the head; with two hosts, the head's clock decides."""
    known = list(offsets)
    return 0.0 if len(known) == 1 else median([*known, 0.0])


# Decide which hosts try to reach which, and interpret failures. Pure.


FULL_MESH_HOSTS = 32
"""Up to here everybody tries everybody; beyond, hosts at distances 1, 2, 4, 8, … in the list: n·log n tries."""

OPEN_PORTS = "open all TCP ports between the hosts of the fabric: sudo nft list ruleset, sudo iptables -L -n"


@dataclass(frozen=True)
class ReachAttempt:
    """One host's attempt to connect to another, over all tried ports.

    Attributes:
        failed: port → ``timeout``, ``refused`` or the system's error; empty if all ports could be reached.
        tried: how many ports were tried.
        answers: whether the target's sshd port answered or refused. Then packets get through, and a firewall blocks the
            other ports.
    """

    source: str
    target: str
    failed: Mapping[int, str]
    tried: int
    answers: bool = False

    @property
    def ok(self) -> bool:
        """Return whether every port could be reached."""
        return not self.failed


def pairs(hosts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return all pairs of hosts that should connect, each direction separately."""
    count = len(hosts)
    if count <= FULL_MESH_HOSTS:
        return tuple((a, b) for a in hosts for b in hosts if a != b)
    distances = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return tuple((hosts[at], hosts[(at + distance) % count]) for at in range(count) for distance in distances)


def judge(attempts: Iterable[ReachAttempt], interface: str, addresses: Mapping[str, str]) -> tuple[Finding, ...]:
    """Report hosts that cannot be reached or cannot reach others, and pairs that cannot connect.

    Args:
        interface: the fabric's interface, for the evidence.
        addresses: host → its address on the fabric.
    """
    left = list(attempts)
    found: list[Finding] = []
    for explain in (_isolated, _closed, _mute):
        while culprit := _worst(left, explain):
            found.append(_explained(culprit, explain, left, interface, addresses))
            left = [attempt for attempt in left if culprit not in _touched(attempt, explain)]
    found.extend(_rest([attempt for attempt in left if not attempt.ok], left, addresses))
    return tuple(found)


class _Pattern:
    """Whether all of a host's attempts in one direction, or in both, failed."""

    def __init__(self, incoming: bool, outgoing: bool) -> None:
        self.incoming = incoming
        self.outgoing = outgoing

    def concerns(self, attempt: ReachAttempt) -> Iterator[str]:
        if self.incoming:
            yield attempt.target
        if self.outgoing:
            yield attempt.source


_isolated = _Pattern(incoming=True, outgoing=True)
_closed = _Pattern(incoming=True, outgoing=False)
_mute = _Pattern(incoming=False, outgoing=True)


def _touched(attempt: ReachAttempt, pattern: _Pattern) -> tuple[str, ...]:
    return tuple(pattern.concerns(attempt))


def _worst(attempts: Sequence[ReachAttempt], pattern: _Pattern) -> str | None:
    """Return the host whose attempts of this pattern all failed, and which explains the most failures.

    Requires at least two failures in each direction: with one, either end may be the cause.
    """
    total: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for attempt in attempts:
        for host in pattern.concerns(attempt):
            total[host] += 1
            failed[host] += not attempt.ok
    least = 4 if pattern.incoming and pattern.outgoing else 2
    guilty = [host for host in total if failed[host] == total[host] >= least]
    return max(guilty, key=lambda host: failed[host], default=None)


def _explained(
    host: str, pattern: _Pattern, attempts: Sequence[ReachAttempt], interface: str, addresses: Mapping[str, str]
) -> Finding:
    mine = [attempt for attempt in attempts if host in _touched(attempt, pattern)]
    others = {other for attempt in mine for other in (attempt.source, attempt.target)} - {host}
    how = _how(mine)
    hosts = count(len(others), "host")
    address = addresses.get(host, interface)
    if pattern is _isolated:
        evidence = f"the host has no connection to or from {hosts} over {interface} ({address}): {how}"
        if any(attempt.answers for attempt in mine):
            return Finding("firewall", Severity.ERROR, (host,), f"{evidence}; other ports answer", OPEN_PORTS)
        remedy = f"check the cable, address and route: ip address show {interface}; ip route get {address}"
        return Finding("path", Severity.ERROR, (host,), evidence, remedy)
    if pattern is _closed:
        ports = sorted({port for attempt in mine for port in attempt.failed})
        whole = all(len(attempt.failed) == attempt.tried for attempt in mine)
        which = "any port" if whole else "port " + ", ".join(map(str, ports))
        evidence = f"{hosts} cannot connect to {which} of {address}: {how}"
        return Finding("firewall", Severity.ERROR, (host,), evidence, OPEN_PORTS)
    evidence = f"the host cannot connect to any of {hosts} over {interface}, but other hosts can: {how}"
    remedy = "check the host's outgoing firewall rules and routes: sudo nft list ruleset; ip route"
    return Finding("firewall", Severity.ERROR, (host,), evidence, remedy)


def _rest(
    failures: Sequence[ReachAttempt], attempts: Sequence[ReachAttempt], addresses: Mapping[str, str]
) -> Iterator[Finding]:
    """Report failures that no single host explains: a fabric in parts, or paths between pairs."""
    if not failures:
        return
    parts = _parts(attempts)
    part_of = {host: at for at, part in enumerate(parts) for host in part}
    if len(parts) > 1 and all(part_of[each.source] != part_of[each.target] for each in failures) and len(failures) > 2:
        evidence = f"the fabric is split into parts that cannot reach each other: {' | '.join(map(fold, parts))}"
        everyone = tuple(host for part in parts for host in part)
        remedy = "check the links between the switches of the parts, and the routes between the subnets"
        yield Finding("path", Severity.ERROR, everyone, f"{evidence}; {_how(failures)}", remedy)
        return
    by_pair: dict[tuple[str, ...], list[ReachAttempt]] = {}
    for each in failures:
        by_pair.setdefault(tuple(sorted((each.source, each.target))), []).append(each)
    for pair, mine in by_pair.items():
        first = mine[0]
        ports = ", ".join(map(str, sorted({port for each in mine for port in each.failed})))
        to = f"{first.target} ({addresses.get(first.target, '?')})"
        each_other = f"{pair[0]} and {pair[1]} cannot connect to each other"
        who = each_other if len(mine) > 1 else f"{first.source} cannot connect to {to}"
        remedy = f"check routes and firewalls between {pair[0]} and {pair[1]}"
        links = tuple((each.source, each.target) for each in mine)
        yield Finding("path", Severity.ERROR, pair, f"{who}, port {ports}: {_how(mine)}", remedy, links=links)


def _parts(attempts: Iterable[ReachAttempt]) -> tuple[tuple[str, ...], ...]:
    """Return groups of hosts that can reach each other in some direction, directly or through others."""
    group: dict[str, set[str]] = {}
    for attempt in attempts:
        for host in (attempt.source, attempt.target):
            group.setdefault(host, {host})
        if attempt.ok and group[attempt.source] is not group[attempt.target]:
            joined = group[attempt.source] | group[attempt.target]
            group.update(dict.fromkeys(joined, joined))
    return tuple({id(members): tuple(sorted(members)) for members in group.values()}.values())


def _how(attempts: Iterable[ReachAttempt]) -> str:
    """List the outcomes of the attempts, the most frequent first."""
    causes = Counter(cause for attempt in attempts for cause in attempt.failed.values())
    words = {"timeout": "no answer (dropped)", "refused": "refused"}
    return ", ".join(words.get(cause, cause) for cause, _ in causes.most_common(2))


# Test connections between hosts over their fabric, on ports that jobs use.


Ports = tuple[tuple[int, int], ...]

SYSTEM_PORTS: Ports = ((0, 0), (0, 0))
"""Ports as the system gives them to Gloo, NCCL, Open MPI and horovodrun's own services."""

CONNECT_TIMEOUT_S = 3.0
"""A lost SYN is sent again after 1 s (RFC 6298); a second loss in a row on a fabric is a fault."""

LISTEN_LIMIT_S = 60.0

SSH_PORT = 22
"""Tried as well: whether it answers or refuses, packets do get through."""


@dataclass(frozen=True)
class _Listening:
    stream: Iterator[Reply]
    ports: tuple[int, ...]


def spread(first: int, last: int, count: int = 3) -> Ports:
    """Split a range of ports into `count` parts, so that a firewall that blocks only some of the ports is found."""
    width = (last - first + 1) // count
    return tuple((first + at * width, first + (at + 1) * width - 1) for at in range(count))


def by_fabric(inventory: Inventory, hosts: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return fabric → those of the hosts that are on it."""
    groups: dict[str, tuple[str, ...]] = {}
    for host in hosts:
        fabric = inventory.by_name[host].fabric
        groups[fabric] = (*groups.get(fabric, ()), host)
    return groups


def fabric_addresses(inventory: Inventory, found: Mapping[str, Hardware]) -> Mapping[str, str]:
    """Return host → the address that ranks of other hosts use. Leaves out hosts without an address."""
    addresses = {}
    for name, hardware in found.items():
        host = inventory.by_name[name]
        nic = hardware.nic(inventory.fabric_of(host).interface)
        own = plain_addresses(nic) if nic else ()
        if own:
            addresses[name] = host.fabric_address if host.fabric_address in own else own[0]
    return addresses


def try_all(
    fleet: Fleet, inventory: Inventory, found: Mapping[str, Hardware], ports: Ports = SYSTEM_PORTS
) -> tuple[Mapping[str, tuple[ReachAttempt, ...]], Mapping[str, str]]:
    """Return (fabric → attempts, host → address). Leaves out hosts that cannot listen on their address."""
    addresses = fabric_addresses(inventory, found)
    attempts = {}
    for fabric, hosts in by_fabric(inventory, addresses).items():
        if len(hosts) > 1:
            attempts[fabric] = _try_group(fleet, hosts, addresses, ports)
    return attempts, addresses


def _try_group(
    fleet: Fleet, hosts: Sequence[str], addresses: Mapping[str, str], ports: Ports
) -> tuple[ReachAttempt, ...]:
    def start(agent: Agent) -> _Listening:
        stream = agent.stream(
            "probe.listen", address=addresses[agent.host], ports=[list(one) for one in ports], limit_s=LISTEN_LIMIT_S
        )
        found = tuple((next(stream).value or {}).get("ports", ()))
        if len(found) != len(ports):
            stream.close()
            raise bad_answer(
                agent.host, f"the host opened only {len(found)} of {len(ports)} ports for the connection test"
            )
        return _Listening(stream, found)

    with ExitStack() as stack:
        listening = fleet.map(start, hosts).ok
        for one in listening.values():
            stack.enter_context(closing(one.stream))  # type: ignore[type-var]
        targets = _targets([host for host in hosts if host in listening])

        def connect(agent: Agent) -> list[Any]:
            return _connect(agent, _wanted(agent.host, targets, listening, addresses), addresses[agent.host])

        outcomes = fleet.map(connect, [host for host in targets if targets[host]]).ok
    return tuple(_attempts(targets, listening, outcomes))


def _wanted(
    source: str,
    targets: Mapping[str, tuple[str, ...]],
    listening: Mapping[str, _Listening],
    addresses: Mapping[str, str],
) -> list[dict[str, Any]]:
    return [
        {"address": addresses[target], "port": port}
        for target in targets[source]
        for port in (*listening[target].ports, SSH_PORT)
    ]


def _connect(agent: Agent, wanted: list[dict[str, Any]], address: str) -> list[Any]:
    """Return outcomes in the order of `wanted`. Retries failures once, so one lost packet is no problem."""

    def call(some: list[dict[str, Any]]) -> list[Any]:
        limit_s = CONNECT_TIMEOUT_S + 20
        outcomes = list(agent.call("probe.connect", targets=some, source=address, timeout_s=limit_s).value)
        if len(outcomes) != len(some):
            raise bad_answer(
                agent.host, f"the host reports {len(outcomes)} of {len(some)} connections of the connection test"
            )
        return outcomes

    outcomes = call(wanted)
    failed = [at for at, one in enumerate(outcomes) if not one["ok"] and one["error"] != "refused"]
    for at, again in zip(failed, call([wanted[at] for at in failed]) if failed else [], strict=True):
        outcomes[at] = again
    return outcomes


def _targets(hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    targets: dict[str, tuple[str, ...]] = {}
    for source, target in pairs(hosts):
        targets[source] = (*targets.get(source, ()), target)
    return targets


def _attempts(
    targets: Mapping[str, tuple[str, ...]], listening: Mapping[str, _Listening], outcomes: Mapping[str, list[Any]]
) -> Iterator[ReachAttempt]:
    for source, results_of in outcomes.items():
        answer = iter(results_of)
        for target in targets[source]:
            ports = listening[target].ports
            results = [(port, next(answer)) for port in ports]
            failed = {port: str(one["error"]) for port, one in results if not one["ok"]}
            control = next(answer)
            answers = bool(control["ok"]) or control["error"] == "refused"
            yield ReachAttempt(source, target, failed, len(ports), answers)

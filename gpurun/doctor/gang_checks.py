"""Checks across hosts that may train together: find differences where hosts should be alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from statistics import median
from types import MappingProxyType

from gpurun.doctor.findings import Finding, Severity
from gpurun.doctor.host_checks import plain_addresses
from gpurun.facts.hardware import Hardware
from gpurun.inventory.hostset import fold
from gpurun.inventory.model import FabricKind, Inventory
from gpurun.launch.fabric import LOOPBACK
from gpurun.launch.fabric_hcas import LINK_LAYER, choose_ports, split_name
from gpurun.launch.fabric_roce import candidates, common_kind
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

"""Decide which hosts try to reach which, and interpret failures. Pure.

A firewall, a dead link or a wrong route causes a pattern of failed connections. gpurun reports a pattern once, for the
host that causes it, instead of once for each affected host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpurun.doctor.findings import Finding, Severity
from gpurun.inventory.hostset import fold
from gpurun.quantities.counts import count

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

"""Findings of checks: the problem, the hosts, the evidence and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from gpurun.inventory.hostset import quoted


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Jobs on this host fail, hang or run very slowly."""
    WARNING = "warning"
    """Jobs run, but too slowly or not safely, or the inventory is wrong."""
    NOTE = "note"
    """A remark, not a problem. Never makes a host unhealthy."""


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        check: the check's stable name, such as ``link-rate``.
        hosts: the hosts with this problem.
        evidence: what gpurun saw, with numbers.
        remedy: what to do, if possible a command; `merged` replaces ``{hosts}`` by the quoted hosts.
        gpus: host → GPU indices, if the problem concerns only some GPUs.
        links: (from, to), if the problem concerns only the path between two hosts.
    """

    check: str
    severity: Severity
    hosts: tuple[str, ...]
    evidence: str
    remedy: str = ""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()

    @property
    def is_fault(self) -> bool:
        """Return whether the finding makes its hosts unhealthy."""
        return self.severity is not Severity.NOTE


MOST_LETTERS = 1000


def one_line(said: str) -> str:
    """Return a host's words fit to be printed and stored: one line without control characters, a screen at most."""
    line = "".join(letter if letter.isprintable() else " " for letter in said[: 4 * MOST_LETTERS])
    return " ".join(line.split())[:MOST_LETTERS]


_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the worst first, and merge findings that differ only in their hosts."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.check, finding.evidence, finding.remedy), []).append(finding)
    found = [_union(group) for group in groups.values()]
    return tuple(sorted(found, key=lambda finding: (_ORDER[finding.severity], finding.check, finding.hosts)))


def unhealthy(findings: Iterable[Finding]) -> frozenset[str]:
    """Return hosts with at least one error or warning."""
    return frozenset(host for finding in findings if finding.is_fault for host in finding.hosts)


def _union(group: list[Finding]) -> Finding:
    first = group[0]
    hosts = tuple(dict.fromkeys(host for finding in group for host in finding.hosts))
    return Finding(
        first.check,
        first.severity,
        hosts,
        first.evidence,
        first.remedy.replace("{hosts}", quoted(hosts)),
        {host: gpus for finding in group for host, gpus in finding.gpus.items()},
        tuple(dict.fromkeys(link for finding in group for link in finding.links)),
    )

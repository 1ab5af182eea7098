"""What is wrong with which hosts, how one knows, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from gpurun.inventory.hostset import quoted


class Severity(str, Enum):
    """How much it matters."""

    ERROR = "error"
    """A job here fails, hangs or crawls."""
    WARNING = "warning"
    """Jobs run, but slower or less safely than they should, or the inventory is not right."""
    NOTE = "note"
    """Worth knowing; nothing to mend. Never makes a host unhealthy."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: the check's name, stable, such as ``link-rate``.
        hosts: who has it.
        evidence: what was seen, with numbers.
        remedy: what to do, a command where there is one; `merged` puts the quoted hosts for ``{hosts}``.
        gpus: host → GPU indices, where only some GPUs are concerned.
        links: (from, to), where only the path between two hosts is concerned.
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
        """Whether its hosts count as unhealthy."""
        return self.severity is not Severity.NOTE


_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first; findings that differ only in their hosts become one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.check, finding.evidence, finding.remedy), []).append(finding)
    found = [_union(group) for group in groups.values()]
    return tuple(sorted(found, key=lambda finding: (_ORDER[finding.severity], finding.check, finding.hosts)))


def unhealthy(findings: Iterable[Finding]) -> frozenset[str]:
    """Hosts with at least one error or warning."""
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

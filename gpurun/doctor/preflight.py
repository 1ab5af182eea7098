"""The checks before a gang starts: only its hosts, only its GPUs, only problems that would make it fail or hang."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gpurun.doctor import mesh
from gpurun.doctor.diagnosis import diagnose
from gpurun.doctor.findings import Finding, Severity
from gpurun.doctor.gpu_checks import strangers
from gpurun.doctor.survey import Survey, probe, signs_at
from gpurun.facts.hardware import Hardware
from gpurun.inventory.model import Inventory
from gpurun.launch.fabric import for_gang
from gpurun.quantities.counts import count
from gpurun.remote.fleet import Fleet

STRANGER = "gpu-stranger"
BLOCKING = frozenset(
    {"address", "clock", "docker", "docker-gpu", "docker-network", "docker-space", "firewall", "folder", "gpu-driver",
     "gpu-lost", "gpu-missing", STRANGER, "hca", "hca-link-layer", "hca-node", "hca-port", "health", "interface",
     "ipv6-only", "memlock", "mtu", "path", "roce-gid", "shared-folder", "ssh"}
)  # fmt: skip
"""Checks whose errors make a gang fail or hang. A slow link or old memory errors only deserve a word."""


@dataclass(frozen=True)
class Preflight:
    """The findings before a gang's start.

    Attributes:
        blocking: findings that would make this gang fail or hang.
        other: all other findings.
        hardware: each host's probe, for `gpurun.launch.fabric.settings`.
        survey: everything that the hosts answered.
    """

    blocking: tuple[Finding, ...]
    other: tuple[Finding, ...]
    hardware: Mapping[str, Hardware]
    survey: Survey

    @property
    def bad_hosts(self) -> Mapping[str, str]:
        """Return host → why gpurun should place the gang on other hosts."""
        return {host: f"{one.check}: {one.evidence}" for one in reversed(self.blocking) for host in one.hosts}

    @property
    def strangers(self) -> frozenset[str]:
        """Return the hosts where a process that no gpurun job started holds a granted GPU."""
        return frozenset(host for one in self.blocking if one.check == STRANGER for host in one.hosts)

    @property
    def without_strangers(self) -> Preflight:
        """Return the other findings: a process ends, but a bad host stays bad."""
        return replace(self, blocking=tuple(one for one in self.blocking if one.check != STRANGER))


def preflight(
    fleet: Fleet, inventory: Inventory, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool | None = None,
    ports: mesh.Ports = mesh.SYSTEM_PORTS, members: Collection[str] = (),
) -> Preflight:  # fmt: skip
    """Probe a gang's hosts and let them connect to each other. A failing host is a finding, never an exception.

    Args:
        fleet: open agents; a host that failed to open is a finding.
        grants: host → granted GPU indices.
        is_alone: the gang is on one host and will not grow; None = it has the hosts of `grants`.
        ports: ranges of ports that the job will use between hosts.
        members: hosts that the gang has had for longer: they have no folder in common with the new ones.
    """
    found = probe(fleet, inventory, list(grants))
    if members:
        found = replace(found, signs=signs_at(fleet, members))
    attempts, addresses = mesh.try_all(fleet, inventory, found.hardware, ports)
    return judge(inventory, replace(found, attempts=attempts, addresses=addresses), grants, is_alone=is_alone)


def judge(
    inventory: Inventory, survey: Survey, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool | None = None
) -> Preflight:
    """Split the findings about this gang into those that block it and the others. Pure."""
    alone = len(grants) == 1 if is_alone is None else is_alone
    fabrics = {name: for_gang(fabric, is_alone=alone) for name, fabric in inventory.fabrics.items()}
    found = diagnose(replace(inventory, fabrics=fabrics), survey)
    findings = [one for one in found if one.is_fault and _concerns(one, grants, is_alone=alone)]
    findings = [one for one in findings if one.check != STRANGER]
    for name, hardware in survey.hardware.items():
        findings += strangers(inventory.by_name[name], hardware, frozenset(grants[name]), Severity.ERROR)
        findings += _missing(name, hardware, grants[name])
    blocks = [one.severity is Severity.ERROR and one.check in BLOCKING for one in findings]
    return Preflight(
        tuple(one for one, blocking in zip(findings, blocks, strict=True) if blocking),
        tuple(one for one, blocking in zip(findings, blocks, strict=True) if not blocking),
        survey.hardware,
        survey,
    )


def _concerns(finding: Finding, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool) -> bool:
    """Return whether a finding concerns granted GPUs, or a network that the gang needs."""
    if finding.check == "docker-network":
        return not is_alone
    if not finding.gpus:
        return True
    return any(set(gpus) & set(grants.get(host, ())) for host, gpus in finding.gpus.items())


def _missing(host: str, found: Hardware, granted: tuple[int, ...]) -> list[Finding]:
    if found.gpu_problem:
        return []
    missing = tuple(sorted(set(granted) - {gpu.index for gpu in found.gpus}))
    if not missing:
        return []
    others = count(len(found.gpus), "other GPU answers", "other GPUs answer")
    evidence = f"GPU {', '.join(map(str, missing))} of the job does not answer; {others}"
    remedy = "look for a GPU that fell off the bus: sudo dmesg | grep -i xid"
    return [Finding("gpu-missing", Severity.ERROR, (host,), evidence, remedy, {host: missing})]

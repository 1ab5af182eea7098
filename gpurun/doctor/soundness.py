"""Decide which hosts are out: broken for every job, whatever it needs. Pure.

A finding makes a host out if every job would meet it there. Problems of an image, of a mount or of the fabric do not:
some jobs need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpurun.doctor.diagnosis import unreachable
from gpurun.doctor.findings import Finding, Severity, merged, one_line
from gpurun.doctor.gang_checks import check_clocks
from gpurun.doctor.gpu_checks import check_gpus
from gpurun.doctor.host_checks import check_docker, check_folder, check_health
from gpurun.doctor.survey import Survey
from gpurun.inventory.model import Inventory

CHECKS = (
    "ssh", "folder", "shared-folder", "docker", "docker-space", "docker-gpu", "gpu-driver", "gpu-count", "gpu-lost",
    "health", "clock",
)  # fmt: skip
"""Checks whose errors make a host out. The first of them is named: a host without Docker may lack much else."""


def soundness(inventory: Inventory, survey: Survey) -> Mapping[str, Finding]:
    """Return each host that is out, with the finding to name. A surveyed host without an entry is sound."""
    found: dict[str, list[Finding]] = {}
    for finding in _all(inventory, survey):
        for host in finding.hosts:
            if makes_out(finding):
                found.setdefault(host, []).append(finding)
    return {host: _worst(findings) for host, findings in found.items()}


def makes_out(finding: Finding) -> bool:
    """Return whether a finding makes its hosts out."""
    return finding.severity is Severity.ERROR and finding.check in CHECKS


def _all(inventory: Inventory, survey: Survey) -> Iterator[Finding]:
    for name, error in survey.failures.items():
        yield unreachable(name, error)
    known = {name: found for name, found in survey.hardware.items() if name in inventory.by_name}
    for name, found in known.items():
        host = inventory.by_name[name]
        yield from check_gpus(host, found)
        yield from check_folder(host, found)
        yield from check_docker(host, found)
        yield from check_health(host, survey.health.get(name))
    yield from check_clocks(known)


def _worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding whose check comes first, with its remedy complete, and words that are fit to be stored."""
    (worst,) = merged([min(findings, key=lambda finding: CHECKS.index(finding.check))])
    return replace(worst, evidence=one_line(worst.evidence), remedy=one_line(worst.remedy))

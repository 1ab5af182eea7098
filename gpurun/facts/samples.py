"""Samples of a host's GPUs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpurun.facts.documents import convert


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None = the GPU does not report this value."""

    index: int
    utilization_percent: int | None = None
    memory_used_mib: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class HostSample:
    """The samples of one host's GPUs.

    Attributes:
        problem: why the host sent no sample.
        heard_s: the head's monotonic clock when the sample arrived.
    """

    gpus: tuple[GpuSample, ...] = ()
    problem: str = ""
    heard_s: float = 0.0


def sample_from_document(host: str, document: object, heard_s: float) -> HostSample:
    """Convert what ``probe.sample`` yields. Raises HostNotReady if the document is not valid."""
    return replace(convert(host, HostSample, document), heard_s=heard_s)

"""Parse lines of the kernel's log that explain why a gang ended: Xid errors, lost GPUs, killed processes. Pure.

Users choose the process names and cgroup paths in these lines. So every pattern is anchored at a place that no user's
text can precede. Wordings are from NVIDIA's driver (open-gpu-kernel-modules, ``nv.c`` and ``osapi.c``), the kernel's
``mm/oom_kill.c`` since 5.0 and before (``Kill process … or sacrifice child``), and memcg.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID = re.compile(rf"NVRM: Xid \({_ADDRESS}(?:[. ][^)]{{0,40}})?\): (\d{{1,4}})\b")
_FELL_OFF = re.compile(rf"NVRM: GPU(?: at)? {_ADDRESS}\.[0-7]:? (?:GPU )?has fallen off the bus")
_OOM = re.compile(
    r"oom-kill:constraint=(CONSTRAINT_[A-Z_]+),.*?(?:oom_memcg=([^,]*),)?task_memcg=([^,]*),task=.*,pid=(\d+),uid=\d+"
    r"\s*\Z",
    re.DOTALL,
)
_KILLED = re.compile(r"(Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (\d+) \(")
_CONTAINER = re.compile(r"(?:docker-|/docker/)([0-9a-f]{64})(?:\.scope)?(?:/|\Z)")


@dataclass(frozen=True)
class XidLine:
    """The driver reports an error of the GPU at this PCI address: domain, bus, device, such as ``0000:3b:00``."""

    pci: str
    number: int


@dataclass(frozen=True)
class OomLine:
    """The kernel killed a process because memory ran out.

    Attributes:
        limit: the memory limit of the process's container was reached; otherwise the host had no memory left, or the
            group that contains all containers.
        container: the Docker container of the process; "" = the line does not say.
    """

    pid: int
    limit: bool
    container: str


def parse(text: str) -> XidLine | OomLine | None:
    """Return the meaning of a line of the kernel's log without its prefix; None if it is not relevant."""
    if found := _XID.match(text):
        return XidLine(_pci(found[1]), int(found[2]))
    if found := _FELL_OFF.match(text):
        return XidLine(_pci(found[1]), 79)
    if found := _OOM.match(text):
        container = _CONTAINER.search(found[3])
        has_own = found[2] is None or container is None or container[1] in found[2]
        limit = found[1] == "CONSTRAINT_MEMCG" and has_own
        return OomLine(int(found[4]), limit, container[1] if container else "")
    if found := _KILLED.match(text):
        return OomLine(int(found[2]), found[1].startswith("Memory cgroup"), "")
    return None


def same_gpu(pci: str, bus: str) -> bool:
    """Return whether the line's address is that of the GPU that inventory or NVML know as ``0000:3b:00.0``."""
    return bool(bus) and _pci(bus.rpartition(".")[0] or bus) == pci


def _pci(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"

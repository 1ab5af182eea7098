"""Which Xid errors of NVIDIA's driver are the hardware's fault, and which a program's. Data.

From NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors: the listing's causes, and the catalog's actions for
Ampere and newer); 13, 31, 43, 45, 68 and 109 leave the GPU healthy by NVIDIA's own device plugin too
(k8s-device-plugin, ``internal/rm/health.go``). The listing allows many causes for most numbers. Blame here is what an
operator acts on: a host is taken out of use for what a healthy GPU does not do, never for what a program can bring
about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Blame = Literal["hardware", "host", "program", "unclear"]


@dataclass(frozen=True)
class Xid:
    """What one number means.

    Attributes:
        blame: ``hardware`` takes the host out of use; after ``host`` a gang is started again without it, but others may
            use it; ``program`` and ``unclear`` lead to neither.
        fatal: the GPU computes no more for who used it: a gang is ended at once, before its other ranks time out.
    """

    meaning: str
    blame: Blame
    fatal: bool = False


XIDS: Mapping[int, Xid] = {
    8: Xid("GPU stopped processing", "unclear"),
    11: Xid("invalid or corrupted push buffer stream", "unclear"),
    13: Xid("graphics engine exception, such as an array index out of range in a kernel", "program"),
    31: Xid("GPU memory page fault: a program used an invalid address", "program"),
    32: Xid("invalid or corrupted push buffer stream", "unclear"),
    38: Xid("driver firmware error", "unclear"),
    43: Xid("GPU stopped processing for a program's fault", "program"),
    45: Xid("a program was ended, or cleaned up after an earlier error", "program"),
    46: Xid("GPU stopped processing", "hardware", fatal=True),
    48: Xid("uncorrectable double bit memory error", "hardware", fatal=True),
    61: Xid("internal micro-controller warning", "unclear"),
    62: Xid("internal micro-controller halt", "hardware", fatal=True),
    63: Xid("a memory page was retired or a row remapped; it takes effect at the next reset", "unclear"),
    64: Xid("a memory page could not be retired or a row not remapped", "hardware"),
    68: Xid("video processor exception", "program"),
    69: Xid("graphics engine class error", "unclear"),
    74: Xid("NVLink error", "hardware", fatal=True),
    79: Xid("GPU has fallen off the bus", "hardware", fatal=True),
    92: Xid("high rate of single bit memory errors", "unclear"),
    94: Xid("contained memory error: the programs that met it have to start again", "host", fatal=True),
    95: Xid("uncontained memory error", "hardware", fatal=True),
    109: Xid("context switch timeout", "program"),
    119: Xid("GSP firmware did not answer", "hardware", fatal=True),
    120: Xid("GSP firmware error", "hardware", fatal=True),
    140: Xid("unrecovered memory error", "hardware", fatal=True),
    143: Xid("GPU could not be initialised", "hardware", fatal=True),
}

UNKNOWN = Xid("not in NVIDIA's listing as gpurun knows it", "unclear")


def xid(number: int) -> Xid:
    """What a number means; one that is not listed blames nobody."""
    return XIDS.get(number, UNKNOWN)

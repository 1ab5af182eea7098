"""Xid errors of NVIDIA's driver: caused by the hardware or by the program, and NVIDIA's advice. Data.

From NVIDIA's document "Xid Errors", read in November 2026. Meaning and advice are the catalog's for Ampere and newer
("Analyzing Xid Errors with the Xid Catalog": description, trigger conditions, bucket of the immediate action). If the
catalog has no entry, as for 61, they are from the listing of causes for Volta and older. These rules assign the blame:

- RESET_GPU, RESTART_BM, WORKFLOW_XID_48, WORKFLOW_NVLINK_ERR, CHECK_MECHANICALS: the hardware. The GPU is unusable
  until an operator acts. Fatal if the GPU stops computing for its user.
- RESTART_APP: the program, if the trigger conditions name it or the next action is CHECK_APP/CUDA; the host, if
  they say that the program is not the cause (32: the quality of the PCI bus; 94: memory); else unclear.
- IGNORE, and errors that need further decoding (144 to 150): unclear, except errors whose text blames the program (43,
  137).

Exceptions: 155 and 156 ask for a reset, but the driver also reports them for links that an operator took down and for
repairs that wait for the next reset. 109 asks for a reset, too. But NVIDIA's own device plugin for Kubernetes counts
it, with 13, 31, 43, 45 and 68, as an application's error after which the GPU is healthy. So gpurun restarts the gang on
other hosts, and the host stays in use. gpurun cordons a host only for errors that a healthy GPU does not have, never
for errors that a program can cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Blame = Literal["hardware", "host", "program", "unclear"]


@dataclass(frozen=True)
class Xid:
    """The meaning of one number.

    Attributes:
        blame: ``hardware`` takes the host out of use. After ``host``, gpurun restarts the gang on other hosts, but
            other gangs may use the host. ``program`` and ``unclear`` do neither.
        fatal: the GPU stops computing for its user, so gpurun stops the gang immediately, before its other ranks time
            out.
        advice: NVIDIA's advice to the operator; "" = none, or more than a sentence.
    """

    meaning: str
    blame: Blame
    fatal: bool = False
    advice: str = ""


_RESET = "reset the GPU"
_CHECK = "check the program"
_SANITIZE = "run the program under compute-sanitizer"

XIDS: Mapping[int, Xid] = {
    8: Xid("GPU stopped processing", "unclear"),
    11: Xid("invalid or corrupted push buffer stream", "program", advice=_CHECK),
    13: Xid("graphics engine exception, such as an array index out of range in a kernel", "program", advice=_SANITIZE),
    25: Xid("invalid or illegal push buffer stream", "program", advice=_CHECK),
    31: Xid("GPU memory page fault: a program used an invalid address", "program", advice=_SANITIZE),
    32: Xid("invalid or corrupted push buffer stream, mostly because of a bad PCI bus", "host"),
    37: Xid("driver firmware error", "unclear"),
    38: Xid("driver firmware error", "unclear"),
    43: Xid("GPU stopped processing because of a fault in a program", "program"),
    44: Xid("graphics engine fault during a context switch", "unclear"),
    45: Xid("a program was ended, or cleaned up after an earlier error", "program"),
    46: Xid("GPU stopped processing", "hardware", fatal=True, advice=_RESET),
    48: Xid("uncorrectable double bit memory error", "hardware", fatal=True, advice=_RESET),
    54: Xid("auxiliary power is not connected to the GPU board", "hardware", advice="check the board's power cables"),
    61: Xid("internal micro-controller warning", "unclear"),
    62: Xid("internal micro-controller halt", "hardware", fatal=True, advice=_RESET),
    63: Xid("a memory page was retired or a row remapped, with effect at the next reset", "unclear"),
    64: Xid("the GPU could not retire a memory page or remap a row", "hardware", advice=_RESET),
    66: Xid("illegal access by the driver", "unclear"),
    67: Xid("illegal access by the driver", "unclear"),
    68: Xid("video decoder exception", "program"),
    69: Xid("graphics engine class error", "program", advice=_CHECK),
    74: Xid("NVLink error, of this GPU or the one at the other end", "hardware", fatal=True, advice=_RESET),
    79: Xid("GPU has fallen off the bus", "hardware", fatal=True, advice="reboot the host"),
    80: Xid("corrupted data sent to the GPU", "program", advice=_CHECK),
    92: Xid("high rate of single bit memory errors", "unclear"),
    94: Xid("contained memory error: the affected programs must start again", "host", fatal=True,
            advice=f"{_RESET} when convenient"),
    95: Xid("uncontained memory error", "hardware", fatal=True, advice=_RESET),
    109: Xid("context switch timeout", "host", advice=_RESET),
    110: Xid("security fault, which usually means failing hardware", "hardware", fatal=True, advice=_RESET),
    119: Xid("GSP firmware did not answer", "hardware", fatal=True, advice=_RESET),
    120: Xid("GSP firmware error", "hardware", fatal=True, advice=_RESET),
    121: Xid("corrected errors on the link to the CPU", "unclear"),
    136: Xid("NVLink training failed", "hardware", advice=_RESET),
    137: Xid("illegal access to another GPU over NVLink", "program", advice=_SANITIZE),
    140: Xid("unrecovered memory error", "hardware", fatal=True, advice=_RESET),
    141: Xid("CUDA fast path error", "unclear"),
    143: Xid("GPU could not be initialised", "hardware", fatal=True, advice=_RESET),
    154: Xid("the recovery action for another Xid changed", "unclear"),
    155: Xid("an NVLink was taken down by software", "unclear"),
    156: Xid("a resource was retired, with effect at the next reset", "unclear"),
    157: Xid("a resource could not be retired", "unclear"),
    158: Xid("fatal timeout of the GPU", "hardware", fatal=True, advice=_RESET),
    **dict.fromkeys((39, 40, 41, *range(70, 73), *range(75, 78), 85, *range(126, 136)),
                    Xid("copy engine error", "unclear")),
    **dict.fromkeys((60, *range(82, 85), 86, 88, 89, *range(96, 106), 139, 142),
                    Xid("video or image engine error", "unclear")),
    **dict.fromkeys(range(144, 151), Xid("NVLink error, with details in the NVLink registers", "unclear")),
    **dict.fromkeys((160, 161), Xid("a memory channel was retired, or could not be retired", "unclear")),
    **dict.fromkeys((171, 172), Xid("details of the memory error of an Xid 48", "unclear")),
}  # fmt: skip

UNKNOWN = Xid("gpurun does not know the meaning of this Xid", "unclear")


def xid(number: int) -> Xid:
    """Return the meaning of a number. An unlisted number blames nobody."""
    return XIDS.get(number, UNKNOWN)

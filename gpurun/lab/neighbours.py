"""Check the size of the kernel's neighbour table, which all hosts of all labs on the machine share.

If the table is full, hosts lose each other at random, and only the kernel's log reports the cause (arp(7), gc_thresh3).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpurun.lab.errors import LabFailed
from gpurun.lab.spec import LabSpec

SETTING = "net.ipv4.neigh.default.gc_thresh3"


def check(labs: Iterable[LabSpec], proc: Path = Path("/proc/sys")) -> None:
    """Refuse labs whose hosts could fill the table. Does nothing if the kernel does not report the table's size.

    Raises:
        LabFailed: the table is too small; the hint is the command that enlarges it.
    """
    try:
        most = int((proc / SETTING.replace(".", "/")).read_text())
    except (OSError, ValueError):
        return
    needed = sum(_entries(lab.racks * lab.hosts) for lab in labs)
    if needed > most:
        room = 1 << (2 * needed).bit_length()
        raise LabFailed(
            f"the kernel's neighbour table holds at most {most} entries, but this machine's labs may need {needed}",
            hint=f"run: sudo sysctl -w {SETTING}={room}",
        )


def _entries(hosts: int) -> int:
    """Return the entries: the head knows each host; each host knows the head and each other host."""
    return hosts * (hosts + 1)

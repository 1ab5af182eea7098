"""The handshake between a starter and its process 1: if one of them is killed, the other does not stay behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpurun.lab.process import ProcessId


def announce(record: Path, teller: int, gate: int) -> None:
    """Record this process's pid, as the machine numbers processes. Continue only after the starter has read the record.

    The starter reads the pipe `teller` and writes the pipe `gate`. If the starter dies first, this process ends too, so
    that no namespace without a record keeps running. Call this while ``/proc`` is the machine's.
    """
    myself = ProcessId.of(int(Path("/proc/self").readlink().name))
    assert myself is not None
    myself.save(record)
    os.write(teller, b"!")
    os.close(teller)
    if os.read(gate, 1) == b"":
        sys.exit("the command that started this process has ended")
    os.close(gate)

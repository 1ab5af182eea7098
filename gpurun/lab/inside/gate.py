"""The gate between a starter and the process 1 it starts: neither can be killed and leave the other astray."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpurun.lab.process import ProcessId


def announce(record: Path, teller: int, gate: int) -> None:
    """Write down who we are, as the machine numbers processes; go on only when the starter has read it.

    The starter reads the pipe `teller` and writes the pipe `gate`. If it dies first, this process ends too: a
    namespace that nobody has on record is never left running. Call it while ``/proc`` is the machine's.
    """
    myself = ProcessId.of(int(Path("/proc/self").readlink().name))
    assert myself is not None
    myself.save(record)
    os.write(teller, b"!")
    os.close(teller)
    if os.read(gate, 1) == b"":
        sys.exit("the command that was starting this has gone")
    os.close(gate)

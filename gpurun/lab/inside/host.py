"""Process 1 of a lab's host: ``python -m gpurun.lab.inside.host RECORD TELLER GATE BOOT_FILE``."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from gpurun.lab.inside.init import Boot, announce, build_root, hold_signals, supervise

_STOP_GRACE_S = 6.0


def main() -> None:
    """Wait until the starter has read the record, set up the host, and run its services until SIGTERM."""
    record, teller, gate, boot_file = sys.argv[1:]
    hold_signals()
    announce(Path(record), int(teller), int(gate))
    os.umask(0o022)  # not the umask of the user who ran gpurun lab up
    boot = Boot.load(Path(boot_file))
    socket.sethostname(boot.name)
    build_root(boot)
    supervise(boot.services, grace_s=_STOP_GRACE_S)


if __name__ == "__main__":
    main()

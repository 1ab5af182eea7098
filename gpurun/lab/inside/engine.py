"""Process 1 of the head's Docker engine: ``python -m gpurun.lab.inside.engine RECORD TELLER GATE SERVICE_JSON``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpurun.lab.inside.init import announce, hold_signals, service_from, supervise
from gpurun.lab.process import MountFlag, mount

_STOP_GRACE_S = 15.0


def main() -> None:
    """Wait until the starter has read the record, then run the engine until SIGTERM."""
    record, teller, gate, service = sys.argv[1:]
    hold_signals()
    announce(Path(record), int(teller), int(gate))
    mount("proc", "/proc", "proc", MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC)
    supervise([service_from(json.loads(service))], grace_s=_STOP_GRACE_S)


if __name__ == "__main__":
    main()

"""Process 1 of the head's Docker engine: ``python -m gpurun.lab.inside.engine RECORD SERVICE_JSON``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpurun.lab.inside.init import Service, supervise
from gpurun.lab.kernel import MountFlag, mount
from gpurun.lab.process import ProcessId

_STOP_GRACE_S = 15.0


def main() -> None:
    """Record who we are for the outside, then keep the engine running until SIGTERM."""
    record, service = sys.argv[1:]
    myself = ProcessId.of(
        int(Path("/proc/self").readlink().name)
    )  # /proc is still the machine's: the pid out there
    assert myself is not None
    myself.save(Path(record))
    mount("proc", "/proc", "proc", MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC)
    fields = json.loads(service)
    supervise(
        [
            Service(
                name=fields["name"],
                argv=tuple(fields["argv"]),
                log=fields["log"],
                env=fields["env"],
                stale=tuple(fields["stale"]),
            )
        ],
        grace_s=_STOP_GRACE_S,
    )


if __name__ == "__main__":
    main()

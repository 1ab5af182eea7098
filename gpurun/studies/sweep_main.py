"""``python -m gpurun.studies.sweep_main ID LOCK``: run a sweep, holding the inherited lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpurun import faults
from gpurun.errors import GpurunError
from gpurun.head import children
from gpurun.state.clock import Presence
from gpurun.studies.runner import conduct
from gpurun.studies.store import SweepStore

LATE = (
    "gpurun.remote.opening", "gpurun.content.data", "gpurun.inventory.validate",
    "gpurun.inventory.hostset", "cryptography.x509",
)  # fmt: skip
"""What functions import when they need it: `gpurun.head.loading` imports it at the start. `conduct` imports Optuna."""


def main(argv: list[str]) -> int:
    """Run the sweep to its end; return 1 if it cannot run at all."""
    faults.arm_fault("conductor")
    name, descriptor = argv[0], int(argv[1])
    os.set_inheritable(descriptor, False)
    children.live_on()
    home = Path(os.environ["GPURUN_HOME"])
    folder, here = SweepStore(home).get(name), Presence(home, lambda: descriptor)
    try:
        conduct(folder, os.environ, here)
    except GpurunError as error:  # no Optuna, a damaged plan, or an unsafe state directory
        folder.say(str(error))
        return 1
    except Exception as error:
        if here.is_gone():
            return 0
        # a defect of gpurun: `sweep status` must say that the sweep stands still
        folder.say(f"the sweep's conductor has failed: {type(error).__name__}: {error}; the log {folder.lock} has more")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

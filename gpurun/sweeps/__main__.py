"""``python -m gpurun.sweeps ID LOCK``: run a sweep, holding the inherited lock."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gpurun import faults
from gpurun.errors import GpurunError, StateUnavailable
from gpurun.head import children
from gpurun.state.shared import enter
from gpurun.sweeps.conductor import RETRY_S, Conductor
from gpurun.sweeps.store import SweepFolder, SweepStore


def main(argv: list[str]) -> int:
    """Run the sweep to its end; return 1 if it cannot run at all."""
    faults.arm("conductor")
    name, descriptor = argv[0], int(argv[1])
    os.set_inheritable(descriptor, False)
    children.live_on()
    home = Path(os.environ["GPURUN_HOME"])
    folder = SweepStore(home).get(name)
    try:
        begin(home, folder).run()
    except GpurunError as error:  # no Optuna, a damaged plan, or an unsafe state directory
        folder.say(str(error))
        return 1
    except Exception as error:  # a defect of gpurun: `sweep status` must say that the sweep stands still
        folder.say(f"its conductor has failed: {type(error).__name__}: {error}; {folder.log} has more")
        raise
    return 0


def begin(home: Path, folder: SweepFolder) -> Conductor:
    """Return the conductor of a sweep, as soon as the state directory can be used.

    Raises:
        BadInput, StateError: as `Conductor`.
    """
    while True:
        try:
            enter(home)
            return Conductor(home, folder, os.environ)
        except StateUnavailable as error:
            folder.say(str(error))
        time.sleep(RETRY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Starting the conductors of sweeps: detached processes that inherit their sweep's lock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpurun import faults
from gpurun.errors import StateError
from gpurun.head import children
from gpurun.sweeps.store import SweepFolder, SweepStore


def ensure_conductors(home: Path, environ: Mapping[str, str]) -> None:
    """Start the conductor of each sweep of this user that is not done and has none. Quick if there is nothing to do."""
    for folder in SweepStore(home).unfinished():
        with suppress(StateError, FileNotFoundError):
            if (descriptor := folder.take_lock()) is not None:
                _start(home, folder, descriptor, environ)


def _start(home: Path, folder: SweepFolder, descriptor: int, environ: Mapping[str, str]) -> None:
    """The lock passes to the conductor without a moment in between."""
    faults.point()
    try:
        log = folder.log.open_file(os.O_WRONLY | os.O_APPEND)  # opened anew: a child may keep it open
        try:
            children.start(
                "gpurun.sweeps", folder.id, str(descriptor), home=home, environ=environ, lock=descriptor, log=log
            )  # fmt: skip
        finally:
            os.close(log)
    finally:
        os.close(descriptor)
    faults.point()

"""Where gpurun keeps its state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SYSTEM_HOME = Path("/var/lib/gpurun")


def home(environ: Mapping[str, str], *, system_home: Path = SYSTEM_HOME) -> Path:
    """The state directory: ``$GPURUN_HOME``, else the system-wide one if it exists, else the user's own.

    The user's own follows the XDG base directory specification (``$XDG_STATE_HOME/gpurun``). The directory
    is not created here.
    """
    if explicit := environ.get("GPURUN_HOME"):
        return Path(explicit).absolute()
    if system_home.is_dir():
        return system_home
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local/state")
    return Path(state) / "gpurun"

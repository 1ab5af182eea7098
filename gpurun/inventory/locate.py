"""Which inventory file a command means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpurun.errors import BadInput


def find(explicit: str | None, environ: Mapping[str, str]) -> Path:
    """The inventory file, absolute.

    The first of: what ``--inventory`` says, ``$GPURUN_INVENTORY``, ``./inventory.yaml``,
    ``$XDG_CONFIG_HOME/gpurun/inventory.yaml``, ``/etc/gpurun/inventory.yaml``. The first two are never
    skipped: one that does not exist is an error.

    Raises BadInput: there is none; says where it was looked for.
    """
    named = explicit or environ.get("GPURUN_INVENTORY")
    if named:
        by = "--inventory" if explicit else "$GPURUN_INVENTORY"
        try:
            path = Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise BadInput(f"there is no inventory at {named}: no such user", hint=f"{by} says so") from error
        if not is_there(path):
            raise BadInput(f"there is no inventory at {path}", hint=f"{by} says so")
        return path
    places = candidates(environ)
    for place in places:
        if is_there(place):
            return place
    looked = "\n".join(f"  {place}" for place in places)
    raise BadInput(
        f"found no inventory; looked for\n{looked}",
        hint="name one with --inventory FILE, or make one with 'gpurun inventory import'",
    )


def is_there(path: Path) -> bool:
    """Whether something lies there; what cannot be looked at does: reading it says why it cannot be."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where an inventory is looked for when none is named, in order."""
    home = environ.get("HOME")
    config = Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else None
    if config is None and home:
        config = Path(home) / ".config"
    places = [Path.cwd() / "inventory.yaml"]
    if config is not None:
        places.append(config / "gpurun" / "inventory.yaml")
    places.append(Path("/etc/gpurun/inventory.yaml"))
    return tuple(places)

"""Find the inventory file of a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpurun.errors import BadInput


def find(explicit: str | None, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the inventory file.

    The first of: the value of ``--inventory``, ``$GPURUN_INVENTORY``, ``./inventory.yaml``,
    ``$XDG_CONFIG_HOME/gpurun/inventory.yaml``, ``/etc/gpurun/inventory.yaml``. gpurun never skips the first two: if the
    named file does not exist, that is an error.

    Raises BadInput: no inventory exists; the message lists the searched places.
    """
    if explicit == "":
        raise BadInput(
            "the inventory's path is empty",
            hint="name a file; without --inventory, gpurun looks for inventory.yaml",
        )
    named = explicit or environ.get("GPURUN_INVENTORY")
    if named:
        hint = None if explicit else "the variable GPURUN_INVENTORY names the file: change or unset the variable"
        try:
            path = Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise BadInput(f"there is no inventory at {named}: no such user", hint=hint) from error
        if "\0" in named or not is_there(path):  # no command line has such a byte; a program may
            raise BadInput(f"there is no inventory at {path}", hint=hint)
        return path
    places = candidates(environ)
    for place in places:
        if is_there(place):
            return place
    looked = "\n".join(f"  {place}" for place in places)
    raise BadInput(
        f"gpurun found no inventory; it looked for\n{looked}",
        hint="make an inventory with `gpurun init 'gpu-[01-16]'`, or name an inventory with --inventory FILE. For "
        "the lab, run `export GPURUN_INVENTORY=$(gpurun lab up)/inventory.yaml` in each terminal",
    )


def is_there(path: Path) -> bool:
    """Return True if the path exists, or cannot be inspected: reading it then reports the reason."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the default places of the inventory, in the order of the search."""
    home = environ.get("HOME")
    config = Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else None
    if config is None and home:
        config = Path(home) / ".config"
    places = [Path.cwd() / "inventory.yaml"]
    if config is not None:
        places.append(config / "gpurun" / "inventory.yaml")
    places.append(Path("/etc/gpurun/inventory.yaml"))
    return tuple(places)

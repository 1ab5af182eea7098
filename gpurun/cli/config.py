"""``gpurun version`` and ``gpurun config``: show installed versions and the files that commands use."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import typer

from gpurun import __version__
from gpurun.cli.lazy import Place, lazy_group
from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, printable

SHOWN = ("paramiko", "ClusterShell", "typer", "rich", "nvidia-ml-py", "msgspec", "optuna", "textual", "tensorboard")
VARIABLES: Mapping[str, str] = {
    "GPURUN_HOME": "The state directory: jobs, leases and history.",
    "GPURUN_INVENTORY": "The inventory file, if you do not give `--inventory`.",
    "XDG_STATE_HOME": "Without GPURUN_HOME, the state directory is `$XDG_STATE_HOME/gpurun`.",
    "XDG_CONFIG_HOME": "Without GPURUN_INVENTORY, gpurun looks for `$XDG_CONFIG_HOME/gpurun/inventory.yaml`.",
    "XDG_CACHE_HOME": "gpurun's caches are in `$XDG_CACHE_HOME/gpurun`. You can delete this folder of caches.",
    "NO_COLOR": "If set, gpurun prints without colours.",
}

COMMANDS = {"view": Place("gpurun.cli.config:view", "Show which files and variables gpurun uses, and why")}
app = typer.Typer(cls=lazy_group(COMMANDS, default="view"), add_completion=False, rich_markup_mode=None)


@app.callback()
def _config() -> None:
    """Show which files and environment variables gpurun uses."""


class Used(NamedTuple):
    """A file, folder or variable that commands use: its value, and why gpurun uses that value."""

    name: str
    value: str
    why: str


def version(as_json: JsonOption = False) -> None:
    """Print the versions of gpurun, Python and the packages that gpurun uses."""
    packages = {name: _installed(name) for name in SHOWN}
    if as_json:
        python = {"version": platform.python_version(), "implementation": platform.python_implementation()}
        print_json({"version": __version__, "python": python, "packages": packages})
        return
    typer.echo(f"gpurun {__version__}, Python {platform.python_version()}")
    for name, found in packages.items():
        typer.echo(f"  {name} {found or 'is not installed'}")


def view(as_json: JsonOption = False) -> None:
    """Show which state directory, inventory and environment variables gpurun uses, and why."""
    settings = [_home(), _inventory(), *_variables()]
    if as_json:
        print_json({"settings": [setting._asdict() for setting in settings]})
        return
    for setting in settings:
        typer.echo(printable(f"{setting.name:>16}  {setting.value or 'none'}  ({setting.why})"))


def _home() -> Used:
    from gpurun.state.home import SYSTEM_HOME, home
    from gpurun.state.shared import is_shared

    found = home(os.environ)
    if os.environ.get("GPURUN_HOME"):
        why = "$GPURUN_HOME"
    else:
        why = (
            f"{SYSTEM_HOME} exists"
            if found == SYSTEM_HOME
            else "your own state directory; set $GPURUN_HOME to use another one"
        )
    return Used("state directory", str(found), f"{why}; {'shared' if is_shared(found) else 'one user'}")


def _inventory() -> Used:
    from gpurun.errors import BadInput
    from gpurun.inventory.locate import find

    try:
        found: Path | None = find(None, os.environ)
    except BadInput as error:
        return Used("inventory", "", error.message.split("\n")[0])
    why = "$GPURUN_INVENTORY" if os.environ.get("GPURUN_INVENTORY") else "the first inventory that gpurun finds"
    return Used("inventory", str(found), why)


def _variables() -> list[Used]:
    return [Used(name, os.environ[name], "environment") for name in VARIABLES if name in os.environ]


def _installed(name: str) -> Any:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

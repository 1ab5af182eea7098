"""Install systemd units that run ``gpurun recover`` at boot and every minute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from gpurun.cli.printing import say
from gpurun.errors import HostNotReady, StateError
from gpurun.head.timer import NAME, Recovery, kept

BOOTED = Path("/run/systemd/system")
"""Exists if systemd is the machine's service manager: sd_booted(3)."""


def recovery() -> Recovery:
    """Return the units' content for the current user."""
    from gpurun.state.home import home

    argv = (sys.executable, "-m", "gpurun", "recover", "--by-timer")
    return Recovery(argv, kept(os.environ, str(home(os.environ))), everybody=os.getuid() == 0)


def unit_folder() -> Path:
    """Return the folder for the units: for root the system's, otherwise the user's (systemd.unit(5))."""
    if os.getuid() == 0:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def install(*, dry_run: bool) -> None:
    """Write and enable the units; with `dry_run`, print them.

    Raises:
        HostNotReady: systemd does not run here. gpurun has printed equivalent crontab lines.
        StateError: systemd refused the units.
    """
    wanted = recovery()
    if dry_run:
        for name, text in wanted.units().items():
            typer.echo(f"# {unit_folder() / name}\n{text}")
        return
    if not BOOTED.is_dir():
        typer.echo(wanted.crontab(), nl=False)
        raise HostNotReady(
            "systemd does not run here, so gpurun installed no timer",
            hint="add the printed lines to your crontab: `crontab -e`",
        )
    folder = unit_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.units().items():
        (folder / name).write_text(text)
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", f"{NAME}.timer")
    say(f"{folder / NAME}.timer runs `gpurun recover` at boot and every minute")
    if os.getuid() != 0 and subprocess.run(["loginctl", "enable-linger"], check=False).returncode != 0:
        say(
            "  → the timer runs only while you are logged in; to let the timer always run, run as root: "
            f"loginctl enable-linger {os.getuid()}"
        )


def uninstall(*, dry_run: bool) -> None:
    """Disable and remove the units; with `dry_run`, print their paths. What they started continues."""
    folder = unit_folder()
    units = [folder / f"{NAME}.{kind}" for kind in ("timer", "service")]
    if not any(unit.exists() for unit in units):
        say("no timer is installed")
        return
    if dry_run:
        for unit in units:
            typer.echo(f"would remove {unit}")
        return
    if BOOTED.is_dir():
        _systemctl("disable", "--now", f"{NAME}.timer")
    for unit in units:
        unit.unlink(missing_ok=True)
    if BOOTED.is_dir():
        _systemctl("daemon-reload")
    say(f"{NAME} is removed; jobs continue")


def _systemctl(*words: str) -> None:
    argv = ["systemctl", *([] if os.getuid() == 0 else ["--user"]), *words]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise StateError(
            f"`{' '.join(argv)}` failed: {done.stderr.strip()}", hint="`gpurun timer remove` removes the units again"
        )

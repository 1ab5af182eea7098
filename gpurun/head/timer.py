"""Write systemd units, or crontab lines, that run ``gpurun recover`` at boot and every minute.

This module only makes texts; `gpurun.cli.recover_timer` installs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from gpurun.errors import BadInput

NAME = "gpurun-recover"
KEPT_VARIABLES = ("GPURUN_HOME", "GPURUN_INVENTORY", "XDG_STATE_HOME", "DOCKER_HOST", "PATH")
"""What `gpurun recover`, and the supervisors that it starts, must find as in the shell that installed it."""


@dataclass(frozen=True)
class Recovery:
    """The command to run, and its environment.

    Attributes:
        everybody: use the system's manager for all users, instead of the user's own.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    everybody: bool

    def units(self) -> Mapping[str, str]:
        """Return file name → text, for systemd.unit(5).

        ``KillMode=process``: the supervisors that the unit starts must outlive it. ``Persistent`` makes up for minutes
        in which the machine slept or was off (systemd.timer(5)).

        Raises:
            BadInput: a value cannot be written in a unit.
        """
        environment = "".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in self.environ.items())
        command = " ".join(_quoted(word, dollar="$$") for word in self.argv)
        online = "After=network-online.target docker.service\nWants=network-online.target\n" if self.everybody else ""
        service = (
            f"[Unit]\nDescription=gpurun: recover jobs after a crash\n{online}\n"
            f"[Service]\nType=oneshot\nKillMode=process\n{environment}ExecStart={command}\n"
        )
        timer = (
            "[Unit]\nDescription=gpurun: recover jobs after a crash, every minute\n\n"
            "[Timer]\nOnBootSec=15s\nOnCalendar=minutely\nAccuracySec=5s\nPersistent=true\n\n"
            "[Install]\nWantedBy=timers.target\n"
        )
        return {f"{NAME}.service": service, f"{NAME}.timer": timer}

    def crontab(self) -> str:
        """Return the same as lines of crontab(5), in which a percent sign ends the command."""
        _refuse_controls(*self.environ.values(), *self.argv)
        words = [*(f"{key}={shlex.quote(value)}" for key, value in self.environ.items()), shlex.join(self.argv)]
        command = " ".join(words).replace("%", r"\%") + " >/dev/null 2>&1"
        return f"@reboot {command}\n* * * * * {command}\n"


def kept(environ: Mapping[str, str], home: str) -> Mapping[str, str]:
    """Return the relevant part of an environment, with the current state directory."""
    return {key: value for key, value in {**environ, "GPURUN_HOME": home}.items() if key in KEPT_VARIABLES and value}


def _quoted(text: str, *, dollar: str = "$") -> str:
    """Return one word in the syntax of systemd.syntax(7) and systemd.service(5)."""
    _refuse_controls(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    return f'"{escaped}"'


def _refuse_controls(*texts: str) -> None:
    for text in texts:
        if not text.isprintable():
            raise BadInput(
                f"a systemd unit or crontab cannot contain {text!r}",
                hint="use a path that has only printable characters",
            )

"""systemd units, or crontab lines, that run ``gpurun recover`` at boot and every minute.

Only texts are made here; `gpurun.cli.recover_timer` puts them in place.
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
    """What is to be run, and with which environment.

    Attributes:
        everybody: by the system's manager, for all users, instead of by the user's own.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    everybody: bool

    def units(self) -> Mapping[str, str]:
        """File name → text, for systemd.unit(5).

        ``KillMode=process``: the supervisors that it starts must outlive it. ``Persistent`` makes up for minutes that a
        machine slept or was off (systemd.timer(5)).

        Raises:
            BadInput: a value cannot be written in a unit.
        """
        environment = "".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in self.environ.items())
        command = " ".join(_quoted(word, dollar="$$") for word in self.argv)
        online = "After=network-online.target docker.service\nWants=network-online.target\n" if self.everybody else ""
        service = (
            f"[Unit]\nDescription=gpurun: pick up what a crash left\n{online}\n"
            f"[Service]\nType=oneshot\nKillMode=process\n{environment}ExecStart={command}\n"
        )
        timer = (
            "[Unit]\nDescription=gpurun: pick up what a crash left, every minute\n\n"
            "[Timer]\nOnBootSec=15s\nOnCalendar=minutely\nAccuracySec=5s\nPersistent=true\n\n"
            "[Install]\nWantedBy=timers.target\n"
        )
        return {f"{NAME}.service": service, f"{NAME}.timer": timer}

    def crontab(self) -> str:
        """The same as lines of crontab(5), where a percent sign would end the command."""
        _refuse_controls(*self.environ.values(), *self.argv)
        words = [*(f"{key}={shlex.quote(value)}" for key, value in self.environ.items()), shlex.join(self.argv)]
        command = " ".join(words).replace("%", r"\%") + " >/dev/null 2>&1"
        return f"@reboot {command}\n* * * * * {command}\n"


def kept(environ: Mapping[str, str], home: str) -> Mapping[str, str]:
    """The part of an environment that matters, with the state directory as it is found now."""
    return {key: value for key, value in {**environ, "GPURUN_HOME": home}.items() if key in KEPT_VARIABLES and value}


def _quoted(text: str, *, dollar: str = "$") -> str:
    """One word as systemd.syntax(7) and systemd.service(5) read it."""
    _refuse_controls(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    return f'"{escaped}"'


def _refuse_controls(*texts: str) -> None:
    for text in texts:
        if not text.isprintable():
            raise BadInput(
                f"{text!r} cannot be written in a unit or crontab", hint="use a path of printable characters"
            )

"""How to reach one host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["paramiko", "system"]
"""Who speaks SSH: the library inside gpurun, or the ``ssh`` program of this machine."""


@dataclass(frozen=True)
class Target:
    """How to reach one host, as arguments of ``ssh``; everything else comes from the OpenSSH configuration.

    Attributes:
        name: the inventory's name of the host; what ``Host`` patterns of the configuration are matched with.
        address: what to connect to; wins over the configuration's ``HostName``. None = that, else `name`.
        port: wins over the configuration's ``Port``.
        user: wins over the configuration's ``User``.
        ssh_config: the OpenSSH client configuration, ``ssh -F``; None = ``~/.ssh/config`` and the system's.
        jumps: the hosts to go through, as ``ssh -J`` takes them; None = what the configuration says.
        python, docker_host, folder: of the host, as `gpurun.inventory.model.Host` has them: how its agent runs.
        ssh: the transport; None = gpurun chooses (`gpurun.remote.transport`).
    """

    name: str
    address: str | None = None
    port: int | None = None
    user: str | None = None
    ssh_config: str | None = None
    jumps: str | None = None
    python: str | None = None
    docker_host: str | None = None
    folder: str | None = None
    ssh: TransportName | None = None

    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``ssh``."""
        given = {"-F": self.ssh_config, "-p": self.port, "-l": self.user, "-J": self.jumps}
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        if self.address is not None:
            words += ["-o", "HostName=" + self.address.replace("%", "%%")]
        return (*words, "--", self.name)


@dataclass(frozen=True)
class Contact:
    """The time-out for a connection to a host, and what records the result. Any thread may report.

    Attributes:
        connect_s: how long a host may take to accept one. A kernel accepts connections though its host is busy.
        asks: called with a host's name before it is asked. Not for a host behind another one, or behind a program:
            from here nobody sees whether it answers.
        answered: the same, when the host has accepted or refused.
    """

    connect_s: float = math.inf
    asks: Callable[[str], object] = lambda _: None
    answered: Callable[[str], object] = lambda _: None

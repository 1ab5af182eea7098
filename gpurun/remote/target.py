"""The inventory's connection settings of one host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpurun.inventory.model import Host, Inventory

TransportName = Literal["paramiko", "system"]
"""The SSH implementation: the library inside gpurun, or the ``ssh`` program of this machine."""


@dataclass(frozen=True)
class Target:
    """Connection settings of one host, as arguments of ``ssh``; all others come from the OpenSSH configuration.

    Attributes:
        name: the inventory's name of the host; ``Host`` patterns of the configuration match it.
        address: the address to connect to; overrides the configuration's ``HostName``. None = that, else `name`.
        port: overrides the configuration's ``Port``.
        user: overrides the configuration's ``User``.
        ssh_config: the OpenSSH client configuration, ``ssh -F``; None = ``~/.ssh/config`` and the system's.
        jumps: the jump hosts in the format of ``ssh -J``; None = those of the configuration.
        python, docker_host, folder: settings for the agent, as in `gpurun.inventory.model.Host`.
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


def target_of(host: Host, inventory: Inventory) -> Target:
    """Return how to reach an inventory's host."""
    return Target(
        name=host.name, address=host.address, port=host.port, user=host.user, ssh_config=inventory.ssh_config,
        python=host.python, docker_host=host.docker_host, folder=host.folder, ssh=host.ssh,
    )  # fmt: skip


@dataclass(frozen=True)
class Contact:
    """The time-out for a connection to a host, and callbacks that record the result. Any thread may call them.

    Attributes:
        connect_s: how long a host may take to accept a connection. A kernel accepts connections even on a busy host.
        asks: called with a host's name before gpurun asks it for a connection. Not called for a host behind a jump host
            or a program, because the head cannot see whether that host answers.
        answered: called with a host's name when the host has accepted or refused. Not called for such hosts either.
    """

    connect_s: float = math.inf
    asks: Callable[[str], object] = lambda _: None
    answered: Callable[[str], object] = lambda _: None

"""How to reach one host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """How to reach one host; everything else comes from the OpenSSH configuration.

    Attributes:
        name: the inventory's name of the host; what ``Host`` patterns of the configuration are matched with.
        address: what to connect to; wins over the configuration's ``HostName``. None = that, else `name`.
        port: wins over the configuration's ``Port``.
        user: wins over the configuration's ``User``.
        ssh_config: the OpenSSH client configuration to read; None = ``~/.ssh/config`` and ``/etc/ssh/ssh_config``.
    """

    name: str
    address: str | None = None
    port: int | None = None
    user: str | None = None
    ssh_config: str | None = None

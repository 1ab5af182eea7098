"""The command lines of the machine's own ``ssh``. Pure: lists of arguments, quoted once where a shell reads them.

The configuration of the user holds, as `ssh -G` was asked about it, but for what would make ``ssh`` less strict than
gpurun, ask a person, or do more than run one command. Options of the command line win over the configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from gpurun.remote.ssh_config import Route

_STRICT = {
    "StrictHostKeyChecking": "yes",
    "NoHostAuthenticationForLocalhost": "no",
    "VerifyHostKeyDNS": "no",
    "UpdateHostKeys": "no",
}
_PLAIN = {
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "GSSAPIDelegateCredentials": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "Tunnel": "no",
    "AddKeysToAgent": "no",
    "VisualHostKey": "no",
}
_ALIVE = {"ServerAliveInterval": "10", "ServerAliveCountMax": "3"}
"""A connection whose host is silent ends after 30 s, also if gpurun itself was killed."""

Masters = Mapping[Route, str]
"""Hops with an open connection to share, and its socket."""


def session(route: Route, masters: Masters, command: str) -> list[str]:
    """Run a command with pipes; nobody is asked anything. ``ssh`` says on stderr how far it has come."""
    once = {"RequestTTY": "no", "EscapeChar": "none", "BatchMode": "yes", "LogLevel": "DEBUG1"}
    return ["ssh", *_options(once), *_way(route, masters, batch=True), *_asked(route), command]


def terminal(route: Route, masters: Masters, command: str, *, tty: bool) -> list[str]:
    """Run a command for a person, who may be asked."""
    once = {"RequestTTY": "yes" if tty else "no"}
    return ["ssh", *_options(once), *_way(route, masters, batch=False), *_asked(route), command]


def master(route: Route, masters: Masters, socket: str, keep_s: int) -> list[str]:
    """Open a connection, for which a person may be asked, and leave it open for others to share.

    The way to the host asks nothing: who opens it has opened that before. It must live on when the terminal is closed,
    as the shared connection itself does, so it has a session of its own (setsid(1)).

    Args:
        socket: where it is shared.
        keep_s: it ends after so many seconds without use.
    """
    shared = {"ControlMaster": "auto", "ControlPersist": str(keep_s), "ControlPath": _quoted(socket)}
    once = {"RequestTTY": "no", "LogLevel": "ERROR", **shared}
    others = {hop: path for hop, path in masters.items() if hop != route}
    if route.jump is not None:
        once["ProxyCommand"] = "setsid " + through(route.jump, route, masters, batch=True)
    return ["ssh", *_options(once), *_way(route, others, batch=False), *_asked(route), "true"]


def leave(route: Route, socket: str) -> list[str]:
    """End a shared connection."""
    return ["ssh", "-O", "exit", *_options({"ControlPath": _quoted(socket)}), *_asked(route)]


def _way(route: Route, masters: Masters, *, batch: bool) -> list[str]:
    """The options that every connection has, and the way through jump hosts.

    Of the ciphers that the configuration allows, those that processors compute come first (docs/decisions/0025).
    """
    options = {**_STRICT, **_PLAIN, **_ALIVE, "ControlMaster": "no"}
    options["ControlPath"] = _quoted(masters[route]) if route in masters else "none"
    if route.ciphers:
        options["Ciphers"] = ",".join(sorted(route.ciphers, key=lambda cipher: "-gcm@" not in cipher))
    words = [*_options(options), *(word for reset in route.resets for word in ("-o", reset))]
    if route.jump is not None:
        words += _options({"ProxyCommand": through(route.jump, route, masters, batch=batch)})
    return words


def through(jump: Route, route: Route, masters: Masters, *, batch: bool) -> str:
    """A ProxyCommand that goes through a jump host. `ssh -J` would not hand it the options that check host keys."""
    once = {"BatchMode": "yes" if batch else "no", "LogLevel": "ERROR"}
    host = f"[{route.hostname}]" if ":" in route.hostname else route.hostname
    way = ["-W", f"{host}:{route.port}", *_options(once), *_way(jump, masters, batch=batch)]
    return shlex.join(["ssh", *way, *_asked(jump)]).replace("%", "%%")


def _asked(route: Route) -> tuple[str, ...]:
    """The arguments that `ssh -G` had, but for the jump hosts: `_way` has them."""
    return replace(route.target, jumps=None).arguments()


def _options(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("-o", f"{key}={value}")]


def _quoted(path: str) -> str:
    """A path as ``ssh`` reads one: it may hold spaces; a percent sign stands for itself."""
    return '"' + path.replace("%", "%%") + '"'

"""The command lines of the machine's own ``ssh``. Pure: lists of arguments, quoted once for the shell that reads them.

The user's configuration applies, as `ssh -G` reported it. Options on the command line override it only where it would
make ``ssh`` less strict than gpurun, make it ask the user, or make it do more than run one command.
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
"""A connection to a silent host ends after 30 s, even if gpurun itself was killed."""

Masters = Mapping[Route, str]
"""Hops with an open shared connection, and its socket."""


def session(route: Route, masters: Masters, command: str, family: str | None = None) -> list[str]:
    """Return the command line for a command without questions. ``ssh`` reports its progress on stderr.

    Args:
        family: use only addresses of this kind, ``inet`` or ``inet6``; None = as the configuration says.
    """
    once = {"RequestTTY": "no", "EscapeChar": "none", "BatchMode": "yes", "LogLevel": "DEBUG1"}
    if family is not None:
        once["AddressFamily"] = family
    return ["ssh", *_options(once), *_way(route, masters, batch=True), *_asked(route), command]


def terminal(route: Route, masters: Masters, command: str, *, tty: bool) -> list[str]:
    """Return the command line for a command of a user, whom ``ssh`` may ask."""
    once = {"RequestTTY": "yes" if tty else "no"}
    return ["ssh", *_options(once), *_way(route, masters, batch=False), *_asked(route), command]


def master(route: Route, masters: Masters, socket: str, keep_s: int) -> list[str]:
    """Return the command line that opens a shared connection, possibly with questions to the user.

    The jump hosts ask no questions: the caller has opened their connections before. The connection through them must
    survive the end of the terminal, like the shared connection itself. So it gets its own session (setsid(1)).

    Args:
        socket: the socket of the shared connection.
        keep_s: the connection ends after so many seconds without use.
    """
    shared = {"ControlMaster": "auto", "ControlPersist": str(keep_s), "ControlPath": _quoted(socket)}
    once = {"RequestTTY": "no", "LogLevel": "ERROR", **shared}
    others = {hop: path for hop, path in masters.items() if hop != route}
    if route.jump is not None:
        once["ProxyCommand"] = "setsid " + through(route.jump, route, masters, batch=True)
    return ["ssh", *_options(once), *_way(route, others, batch=False), *_asked(route), "true"]


def leave(route: Route, socket: str) -> list[str]:
    """Return the command line that ends a shared connection."""
    return ["ssh", "-O", "exit", *_options({"ControlPath": _quoted(socket)}), *_asked(route)]


def first_login(route: Route, masters: Masters) -> Route:
    """Return the first host on the way to which ``ssh`` itself logs in: `route`, or a jump host."""
    first = route
    while first not in masters and first.jump is not None and first.jump not in masters:
        first = first.jump
    return first


def _way(route: Route, masters: Masters, *, batch: bool) -> list[str]:
    """Return the options of every connection, and the options for the way through jump hosts.

    Of the ciphers that the configuration allows, ciphers with hardware support come first (docs/decisions/0025).
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
    """Return a ProxyCommand through a jump host. `ssh -J` would not pass on the options that check host keys."""
    once = {"BatchMode": "yes" if batch else "no", "LogLevel": "ERROR"}
    host = f"[{route.hostname}]" if ":" in route.hostname else route.hostname
    way = ["-W", f"{host}:{route.port}", *_options(once), *_way(jump, masters, batch=batch)]
    return shlex.join(["ssh", *way, *_asked(jump)]).replace("%", "%%")


def _asked(route: Route) -> tuple[str, ...]:
    """Return the arguments of `ssh -G`, without the jump hosts, which `_way` adds."""
    return replace(route.target, jumps=None).arguments()


def _options(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("-o", f"{key}={value}")]


def _quoted(path: str) -> str:
    """Quote a path for ``ssh``: it may contain spaces; a percent sign is literal."""
    return '"' + path.replace("%", "%%") + '"'

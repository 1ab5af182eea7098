"""Open connections of ``ssh`` that gpurun can share (ssh_config(5), ``ControlPath``).

A user opens such a connection if a host asks for something that only the user can type. Its socket is in a folder that
no other user can enter. gpurun also uses a socket of the user's own configuration, if only this user can have created
it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.remote import ssh_argv
from gpurun.remote.ssh_config import Route

_ANSWER_S = 1.0
_CLOSE_S = 10.0
_MOST_PATH = 90
"""sockaddr_un has 108 bytes; ``ssh`` needs 17 of them while it creates the socket (mux.c)."""
_NOT_QUOTABLE = ('"', "\\", "$", "\n")


def live(route: Route) -> Mapping[Route, str]:
    """Return the hops of a route that have an open shared connection, with its socket."""
    return {hop: path for hop in route.hops if (path := _live_one(hop))}


def _live_one(hop: Route) -> str | None:
    paths = (own_path(hop), hop.control_path)
    return next((path for path in paths if path and is_usable(path) and _answers(path)), None)


def own_path(route: Route) -> str | None:
    """Return the socket path of gpurun's shared connection to a hop; None if the environment names no usable folder.

    The name is a digest of the machine, the user, the way to the host and the known_hosts files, so that no other route
    uses the socket.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or (f"{os.environ['HOME']}/.config" if os.environ.get("HOME") else "")
    ways = [(hop.hostname, hop.port, hop.user, hop.host_key_alias, hop.known_hosts) for hop in route.hops]
    meant = repr((socket.gethostname(), ways, route.hops[0].proxy_command))
    path = f"{base}/gpurun/ssh/{hashlib.sha256(meant.encode(errors='surrogateescape')).hexdigest()[:20]}"
    return path if path.startswith("/") and is_quotable(path) else None


def is_quotable(path: str) -> bool:
    """Return True if every version of ``ssh`` reads the quoted path unchanged, and it is short enough."""
    return len(os.fsencode(path)) <= _MOST_PATH and not any(letter in path for letter in _NOT_QUOTABLE)


def is_usable(path: str) -> bool:
    """Return True if only this user can have created the socket, and no other user can replace it."""
    if not is_quotable(path):
        return False
    with suppress(OSError):
        found, folder = os.lstat(path), Path(path).parent.stat()
        sticky = folder.st_mode & stat.S_ISVTX
        shared = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() and not shared and (
            folder.st_uid in (0, os.geteuid())
        )  # fmt: skip
    return False


def _answers(path: str) -> bool:
    """Return True if a process listens on the socket."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.settimeout(_ANSWER_S)
        probe.connect(path)
        return True
    return False


def open_for_a_person(route: Route, keep_s: int) -> bool:
    """Let ``ssh`` ask on the terminal, and share the connection. Returns True if the login succeeded. Main thread only.

    Args:
        keep_s: the connection ends after so many seconds without use.

    Raises:
        BadInput: there is no usable path for the socket, or no ``ssh``.
    """
    path = own_path(route)
    if path is None:
        hint = (
            f"set XDG_CONFIG_HOME to a folder with a shorter path: the path of a socket has at most {_MOST_PATH} bytes"
        )
        raise BadInput(
            "gpurun has no usable folder for the socket of a shared ssh connection", host=route.name, hint=hint
        )
    folder = Path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    argv = ssh_argv.master(route, live(route), path, keep_s)
    # The shared connection leaves the terminal's session, but a ProxyCommand of it does not.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode == 0
    except OSError as error:
        raise BadInput(f"cannot run ssh: {error}", host=route.name, hint="install the OpenSSH client") from None
    finally:
        signal.signal(signal.SIGHUP, before)


def close_own(route: Route) -> int:
    """End the connections that gpurun shares on the way to a host. Returns their number."""
    count = 0
    for hop in reversed(route.hops):
        path = own_path(hop)
        if path and is_usable(path) and _answers(path):
            with suppress(OSError, subprocess.TimeoutExpired):
                argv = ssh_argv.leave(hop, path)
                count += not subprocess.run(argv, capture_output=True, timeout=_CLOSE_S, check=False).returncode
    return count

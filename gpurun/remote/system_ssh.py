"""A command on a host, over the machine's own ``ssh``: one process per command, which ends with it."""

from __future__ import annotations

import hashlib
import os
import random
import select
import shlex
import signal
import socket
import stat
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from gpurun.errors import BadInput, HostKeyMismatch, HostUnreachable
from gpurun.remote import known_hosts
from gpurun.remote.program import CommandEnd, Heard, Program, TooManyLogins, failure
from gpurun.remote.route import Route
from gpurun.remote.session import addresses_of, dial, head_short, no_connection

if TYPE_CHECKING:
    from gpurun.remote.session import Attempt


# The command lines of the machine's own ``ssh``. Pure: lists of arguments, quoted once for the shell that reads them.


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


# Open connections of ``ssh`` that gpurun can share (ssh_config(5), ``ControlPath``).


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
    argv = master(route, live(route), path, keep_s)
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
                argv = leave(hop, path)
                count += not subprocess.run(argv, capture_output=True, timeout=_CLOSE_S, check=False).returncode
    return count


_TICK_S = 1.0
_BETWEEN_S = 0.005

MOST_LOGINS = 8
"""So many connections at once log in to one jump host: sshd drops some of more than ten (``MaxStartups``)."""
_LOGIN_S = 3.0
"""A turn is over after this long: the jump host has accepted the login, and the host behind it may be dead."""
_AGAIN_S = 1.0

_TURNS: defaultdict[Route, BoundedSemaphore] = defaultdict(lambda: BoundedSemaphore(MOST_LOGINS))
"""Jump host → the turns of this process to log in there."""


class Turn:
    """One of a jump host's turns to log in. `over` is idempotent."""

    def __init__(self, jump: Route, attempt: Attempt) -> None:
        self._turns: BoundedSemaphore | None = _TURNS[jump]
        attempt.stage = f"waiting for its turn to log in to {jump.name}"
        while not self._turns.acquire(timeout=_TICK_S):
            attempt.deadline_s += _TICK_S  # the host itself has not been asked yet
        self._until_s = time.monotonic() + _LOGIN_S

    @property
    def left_s(self) -> float:
        """Return the seconds that the turn may still last."""
        return self._until_s - time.monotonic()

    def over(self) -> None:
        """Let another connection log in."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


def run_over_ssh(route: Route, attempt: Attempt, masters: Masters, command: str) -> SystemSsh:
    """Connect and run a command. Tries once more if an sshd on the way has too many logins at the moment.

    Raises:
        HostUnreachable: no connection in time, or ``ssh`` cannot be started.
        HostKeyMismatch: the host's key is unknown, different, or revoked.
        AuthenticationFailed: the login needs a user who answers questions, or the host refused it.
    """
    try:
        return _run(route, attempt, masters, command)
    except TooManyLogins:
        time.sleep(_AGAIN_S * random.uniform(0.5, 1.5))  # noqa: S311 - not all at the same moment
        return _run(route, attempt, masters, command)


def _run(route: Route, attempt: Attempt, masters: Masters, command: str) -> SystemSsh:
    jump = first_login(route, masters)
    turn = Turn(jump, attempt) if jump != route else None
    try:
        return _logged_in(route, attempt, masters, command, turn)
    finally:
        if turn is not None:
            turn.over()


def _logged_in(route: Route, attempt: Attempt, masters: Masters, command: str, turn: Turn | None) -> SystemSsh:
    attempt.stage = f"connecting to {route.hostname} port {route.port} with ssh"
    direct = route not in masters and route.jump is None and route.proxy_command is None
    family = _family(route, attempt) if direct else None
    try:
        program = SystemSsh(session(route, masters, command, family))
    except (OSError, ValueError) as error:
        raise head_short(error, route.name) or HostUnreachable(f"cannot run ssh: {error}", host=route.name) from error
    attempt.opened(program.close)
    try:
        program.await_login(route, attempt, direct=direct, turn=turn)
    except BaseException:
        program.close()
        raise
    attempt.stage = "starting the agent"
    return program


def _family(route: Route, attempt: Attempt) -> str | None:
    """Return the kind of address that answers, if the host has several kinds.

    ``ssh`` tries one address after the other, and spends all its time on a first one that drops packets.

    Raises:
        HostUnreachable: none answers.
    """
    try:
        addresses = addresses_of(route)
    except HostUnreachable:
        return None  # ssh says why
    if len({each.family for each in addresses}) < 2:
        return None
    try:
        with dial(addresses, attempt, route.bind_address) as connection:
            return "inet6" if connection.family == socket.AF_INET6 else "inet"
    except OSError as error:
        raise no_connection(route, error) from None


class SystemSsh(Program):
    """See `gpurun.remote.program.RemoteCommand`."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self._patience_s: float | None = None
        self._heard = Heard()

    def await_login(self, route: Route, attempt: Attempt, *, direct: bool, turn: Turn | None = None) -> None:
        """Wait until the host has accepted the login.

        Args:
            direct: ``ssh`` connects to the host directly, so that gpurun sees whether the host accepts the connection.
            turn: to log in to a jump host; over once the host behind it answers.
        """
        connect_until_s = time.monotonic() + attempt.connect_left_s
        asked = told = False
        while not self._heard.logged_in:
            until_s = attempt.deadline_s if self._heard.connected or not direct else connect_until_s
            if time.monotonic() >= until_s:
                where = f"{route.hostname} port {route.port}"
                late = (
                    f"the login at {where} timed out"
                    if self._heard.connected
                    else f"no connection to {where}: timed out"
                )
                raise HostUnreachable(late, host=route.name)
            if turn is not None and (self._heard.connected or turn.left_s <= 0):
                turn.over()
                turn = None
            left_s = until_s - time.monotonic()
            output, ended = self._wait_for_words(left_s if turn is None else min(left_s, turn.left_s))
            if direct and self._heard.connecting and not asked:
                asked = True
                attempt.asks()
            if self._heard.connected and not told:
                told, attempt.stage = True, "authenticating with ssh"
                if direct:
                    attempt.answered()
            if output:
                return
            if ended:
                self._give_up(route, attempt, direct=direct)

    def _give_up(self, route: Route, attempt: Attempt, *, direct: bool) -> None:
        if direct and any("Connection refused" in line for line in self._heard.lines):
            attempt.answered()
        error = failure(route.name, route.user, self._heard, route.jump.name if route.jump else None)
        if isinstance(error, HostKeyMismatch) and self._heard.host_key:
            known_hosts.check_host_key(route, *self._heard.host_key, known_hosts.known_keys(route))
        raise error

    def _wait_for_words(self, timeout_s: float) -> tuple[bool, bool]:
        """Read stderr. Returns whether there is output, and whether ``ssh`` has ended and all its stderr is read."""
        with self._reading:
            if self._closed:
                return False, True
            ready = dict(self._readable.poll(max(0.0, timeout_s) * 1000))
            if self._stderr in ready:
                self._listen()
        ended = self._exited() is not None
        if not ended and ready.get(self._stdout) == select.POLLHUP:
            time.sleep(_BETWEEN_S)  # it is about to end
        return bool(ready.get(self._stdout, 0) & select.POLLIN), ended and self._stderr not in ready

    def _hear(self, text: bytes) -> None:
        self._heard.feed(text)

    def settimeout(self, timeout: float | None) -> None:
        """See RemoteCommand."""
        self._patience_s = timeout

    def recv(self, size: int) -> bytes:
        """See RemoteCommand."""
        end_s = None if self._patience_s is None else time.monotonic() + self._patience_s
        with self._reading:
            while not self._closed:
                left_s = _TICK_S if end_s is None else end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                ready = dict(self._readable.poll(left_s * 1000))
                if self._stderr in ready:
                    self._listen()
                if self._stdout in ready:
                    return os.read(self._stdout, size)
        return b""

    def sendall(self, data: bytes) -> None:
        """See RemoteCommand. Has no time-out: the caller gives up a host that does not answer."""
        left = memoryview(data)
        with self._writing:
            while left:
                if self._closed:
                    raise BrokenPipeError
                if self._writable.poll(_TICK_S * 1000):
                    with suppress(BlockingIOError):
                        left = left[os.write(self._stdin, left) :]

    def ending(self, within_s: float) -> CommandEnd:
        """See RemoteCommand. ``ssh`` itself exits with code 255 if the connection fails."""
        end_s = time.monotonic() + within_s
        ended = False
        while not ended and time.monotonic() < end_s:
            _, ended = self._wait_for_words(min(0.05, end_s - time.monotonic()))
        found = self._exited()
        code = found.si_status if found is not None and found.si_code == os.CLD_EXITED else None
        return CommandEnd(None if code == 255 else code, "\n".join(self._heard.lines))

    def discard_stderr(self) -> None:
        """Do nothing: `recv` also reads stderr, and keeps only its last lines."""

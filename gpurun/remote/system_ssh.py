"""A command on a host, over the machine's own ``ssh``: one process per command, which ends with it."""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections import defaultdict
from contextlib import suppress
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from gpurun.errors import HostKeyMismatch, HostUnreachable
from gpurun.remote import host_key, ssh_argv
from gpurun.remote.dial import addresses_of, dial
from gpurun.remote.program import Program
from gpurun.remote.remote_command import CommandEnd
from gpurun.remote.session import head_short, no_connection
from gpurun.remote.ssh_said import Heard, TooManyLogins, failure

if TYPE_CHECKING:
    from gpurun.remote.session import Attempt
    from gpurun.remote.ssh_config import Route

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


def run(route: Route, attempt: Attempt, masters: ssh_argv.Masters, command: str) -> SystemSsh:
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


def _run(route: Route, attempt: Attempt, masters: ssh_argv.Masters, command: str) -> SystemSsh:
    jump = ssh_argv.first_login(route, masters)
    turn = Turn(jump, attempt) if jump != route else None
    try:
        return _logged_in(route, attempt, masters, command, turn)
    finally:
        if turn is not None:
            turn.over()


def _logged_in(route: Route, attempt: Attempt, masters: ssh_argv.Masters, command: str, turn: Turn | None) -> SystemSsh:
    attempt.stage = f"connecting to {route.hostname} port {route.port} with ssh"
    direct = route not in masters and route.jump is None and route.proxy_command is None
    family = _family(route, attempt) if direct else None
    try:
        program = SystemSsh(ssh_argv.session(route, masters, command, family))
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
    """See `gpurun.remote.remote_command.RemoteCommand`."""

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
            host_key.check(route, *self._heard.host_key, host_key.known(route))
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

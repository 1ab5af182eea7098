"""One authenticated SSH transport to one host. gpurun verifies the host key before it sends anything else."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from gpurun.errors import AuthenticationFailed, HeadShort, HostFailure, HostUnreachable, is_short, words_of
from gpurun.remote import host_key, known_hosts, ssh_said
from gpurun.remote.dial import addresses_of, dial
from gpurun.remote.keys import ClientKey, KeyProblem, identities
from gpurun.remote.paramiko_quietly import paramiko
from gpurun.remote.proxy import ProxyProgram

if TYPE_CHECKING:
    from paramiko import Transport

    from gpurun.remote.jumps import Jumps
    from gpurun.remote.ssh_config import Route

# Paramiko's own order begins with aes128-ctr + HMAC, at half the speed. AES-GCM is about as fast as an OpenSSH pipe.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
# The X25519 exchange costs less than a tenth of the CPU of the hybrid exchange that Paramiko prefers.
KEX = (
    "curve25519-sha256@libssh.org",
    "ecdh-sha2-nistp256",
    "ecdh-sha2-nistp384",
    "diffie-hellman-group16-sha512",
    "diffie-hellman-group14-sha256",
)
# Paramiko starts a new key exchange every 512 MiB and can lose data if it starts under load (paramiko #822).
# AES-GCM allows far more; sshd itself renews the keys at its own limit (64 GiB for AES).
REKEY_BYTES = 1 << 38

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass
class Attempt:
    """A connection attempt: its deadline, and everything to close after the deadline.

    The connecting thread registers everything that it opens; any thread may call `abort`.

    Attributes:
        connect_s: how long the host may take to accept a connection.
        asks: called before gpurun asks the host for a connection.
        answered: called when the host answers.
    """

    deadline_s: float
    stage: str = "waiting for its turn"
    connect_s: float = math.inf
    asks: Callable[[], object] = lambda: None
    answered: Callable[[], object] = lambda: None
    _closers: list[Callable[[], object]] = field(default_factory=list)
    _aborted: bool = False
    _lock: Lock = field(default_factory=Lock)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.05."""
        return max(0.05, self.deadline_s - time.monotonic())

    @property
    def connect_left_s(self) -> float:
        """Seconds that the host may take from now to accept a connection."""
        return min(self.left_s, self.connect_s)

    def opened(self, close: Callable[[], object]) -> None:
        """Register something to close on abort; closes it immediately if the attempt is already aborted."""
        with self._lock:
            if not self._aborted:
                self._closers.append(close)
                return
        close()

    def abort(self) -> None:
        """Close everything that this attempt has opened."""
        with self._lock:
            self._aborted = True
            closers, self._closers = self._closers, []
        for close in reversed(closers):
            close()


def connect(route: Route, attempt: Attempt, jumps: Jumps) -> Transport:
    """Open, verify and authenticate a transport.

    Args:
        jumps: the shared connections to jump hosts.

    Raises:
        HostUnreachable: no connection, or the peer has no SSH algorithms in common with gpurun.
        HostKeyMismatch: the host's key is unknown, different, or revoked.
        AuthenticationFailed: the host accepted no key.
    """
    entries = host_key.known(route)
    transport = _negotiate(route, attempt, _open_socket(route, attempt, jumps), entries)
    try:
        key = transport.get_remote_server_key()
        # Read again: a ProxyCommand may fetch the host's keys as it connects, such as sss_ssh_knownhostsproxy.
        host_key.check(route, key.get_name(), known_hosts.fingerprint(key.asbytes()), host_key.known(route))
        _authenticate(route, transport, attempt)
    except BaseException:
        transport.close()
        raise
    return transport


def _open_socket(route: Route, attempt: Attempt, jumps: Jumps) -> Any:
    """Return the connection to the host's sshd: a socket, a channel of the jump host, or a program's pipes."""
    attempt.stage = f"connecting to {route.hostname} port {route.port}"
    if route.jump is not None:
        attempt.stage += f" through {route.jump.name}"
        passage = jumps.through(route.jump, route, attempt)
        attempt.opened(passage.close)
        return passage
    if route.proxy_command is not None:
        try:
            program = ProxyProgram(route.proxy_command)
        except (OSError, ValueError) as error:
            raise head_short(error, route.name) or HostUnreachable(
                f"the ProxyCommand cannot be run: {error}", host=route.name
            ) from error
        attempt.opened(program.close)
        return program
    return _connect_tcp(route, attempt)


def _connect_tcp(route: Route, attempt: Attempt) -> socket.socket:
    addresses = addresses_of(route)
    try:
        return dial(addresses, attempt, route.bind_address)
    except OSError as error:
        raise no_connection(route, error) from None


def no_connection(route: Route, error: OSError) -> HostFailure:
    """Return the failure of a host that accepted no connection."""
    return head_short(error, route.name) or HostUnreachable(
        f"no connection to {route.hostname} port {route.port}: {reason(error)}",
        host=route.name,
        hint="check that the host is up and its sshd runs",
    )


def _negotiate(route: Route, attempt: Attempt, sock: Any, entries: Sequence[known_hosts.KnownHost]) -> Transport:
    attempt.stage = "negotiating keys"
    transport = paramiko.Transport(sock)
    attempt.opened(transport.close)
    transport.daemon = True
    options = transport.get_security_options()
    options.ciphers = CIPHERS
    options.kex = KEX
    options.key_types = _key_types(options.key_types, entries)
    packetizer: Any = transport.packetizer
    packetizer.REKEY_BYTES = REKEY_BYTES
    lines = _listen(packetizer)
    transport.banner_timeout = transport.handshake_timeout = attempt.left_s
    try:
        transport.start_client(timeout=attempt.left_s)
        if transport.get_remote_server_key() is None:
            raise EOFError
    except Exception as error:  # Paramiko raises anything if a host speaks SSH wrongly
        transport.close()
        sock.close()
        if short := head_short(error, route.name):
            raise short from error
        why = f"the host says {lines[-1][:200]!r}" if lines and not lines[-1].startswith("SSH-") else reason(error)
        if isinstance(sock, ProxyProgram) and (said := sock.last_words()):
            why += f"; the ProxyCommand says {said!r}"
        raise HostUnreachable(
            f"{route.hostname} port {route.port} does not complete an SSH handshake: {why}", host=route.name
        ) from error
    return transport


def _listen(packetizer: Any) -> list[str]:
    """Return the list that gets the host's lines up to its banner, such as ``Exceeded MaxStartups``."""
    lines: list[str] = []
    readline = packetizer.readline

    def heard(timeout: float) -> str:
        line: str = readline(timeout)
        if line.strip():
            lines.append("".join(letter if letter.isprintable() else "?" for letter in line.strip()))
        return line

    packetizer.readline = heard
    return lines


def _key_types(offered: Sequence[str], entries: Sequence[known_hosts.KnownHost]) -> tuple[str, ...]:
    """Return the host key algorithms, known ones first, so that a host with several keys presents a known key."""
    known: list[str] = []
    for entry in entries:
        if entry.marker == "":
            known += _RSA_SIGNATURES if entry.kind == "ssh-rsa" else (entry.kind,)
    return tuple(sorted(offered, key=lambda kind: kind not in known))


def _authenticate(route: Route, transport: Transport, attempt: Attempt) -> None:
    attempt.stage = "authenticating"
    tried: list[str] = []
    wanted: set[str] = set()
    for identity in identities(route):
        if isinstance(identity, KeyProblem):
            tried.append(f"{identity.file}: {identity.reason}")
            continue
        if _accepts(route, transport, identity, attempt, tried, wanted):
            return
        if not transport.is_active():
            tried.append("the host closed the connection")
            break
    hint = f"check with: ssh {route.user}@{route.hostname}" + (f" -p {route.port}" if route.port != 22 else "")
    if ssh_said.needs_a_person(wanted):
        hint = ssh_said.connect_hint(route.name)
    why = "; ".join(tried) or "there is no key to offer"
    wanted |= _offered(route, transport)
    raise KeysRefused(f"the host refuses the login of {route.user}: {why}", wanted=wanted, host=route.name, hint=hint)


def _offered(route: Route, transport: Transport) -> set[str]:
    """Return the authentication methods that a host offers after it has refused all keys."""
    if transport.is_active():
        try:
            transport.auth_none(route.user)
        except paramiko.BadAuthenticationType as error:
            return set(error.allowed_types)
        except (paramiko.SSHException, EOFError, OSError):
            pass
    return set()


class KeysRefused(AuthenticationFailed):
    """The keys were not sufficient.

    Attributes:
        wanted: the authentication methods that the host offered instead, if it listed any.
    """

    def __init__(self, message: str, *, wanted: Collection[str] = (), **places: str | None) -> None:
        super().__init__(message, **places)
        self.wanted = frozenset(wanted)


def _accepts(
    route: Route, transport: Transport, identity: ClientKey, attempt: Attempt, tried: list[str], wanted: set[str]
) -> bool:
    transport.auth_timeout = attempt.left_s
    try:
        more = transport.auth_publickey(route.user, identity.key)
    except paramiko.BadAuthenticationType as error:
        kinds = ", ".join(kind for kind in error.allowed_types if kind)
        wanted |= set(error.allowed_types)
        tried.append(f"the host wants {kinds}, not a key" if kinds else "the host accepts no keys")
        return False
    except paramiko.AuthenticationException as error:
        tried.append(f"{identity.source}: {'refused' if 'failed' in str(error).lower() else reason(error)}")
        return False
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostUnreachable(f"the connection broke during the login: {reason(error)}", host=route.name) from error
    wanted |= set(more)
    if more:
        tried.append(f"{identity.source}: accepted, but the host also wants {', '.join(more)}")
    return not more


def reason(error: BaseException | None) -> str:
    """Return an exception's text; the name of its type if it has none."""
    if isinstance(error, TimeoutError | socket.timeout):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, EOFError):
        return "the connection was closed"
    if error is not None and (is_short(error) or isinstance(error, paramiko.SSHException | OSError)):
        return words_of(error)
    return f"{type(error).__name__}: {error}"


def head_short(error: BaseException | None, host: str) -> HeadShort | None:
    """Return the failure to connect to a host that is this machine's own; None if the error says something else."""
    if error is not None and is_short(error):
        return HeadShort(
            f"this machine cannot connect to the host now: {reason(error)}",
            host=host,
            hint="check this machine's limits and memory: ulimit -a; free -m",
        )
    return None


def as_host_failure(error: BaseException, host: str) -> HostFailure:
    """Convert an exception of the SSH library to a typed error."""
    if isinstance(error, HostFailure):
        return error
    return head_short(error, host) or HostUnreachable(f"SSH failed: {reason(error)}", host=host)

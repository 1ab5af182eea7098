"""Paramiko: keys, proxies, jump hosts, one authenticated transport to one host. It verifies the host key first."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import sys
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurun.errors import AuthenticationFailed, HeadShort, HostFailure, HostUnreachable, is_short, words_of
from gpurun.remote import known_hosts
from gpurun.remote.known_hosts import check_host_key, known_keys
from gpurun.remote.program import CommandEnd, Program, connect_hint, needs_a_person

if TYPE_CHECKING:
    from paramiko import Channel, PKey, Transport

    from gpurun.remote.route import Route


# Import Paramiko once, without unneeded modules and without its log output.


if "paramiko" not in sys.modules and "invoke" not in sys.modules:
    sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        import paramiko
    finally:
        del sys.modules["invoke"]
else:
    import paramiko

_logger = logging.getLogger("paramiko")
_logger.addHandler(logging.NullHandler())
_logger.propagate = False
# Each log call formats its message even without a handler; with thousands of packets, this takes measurable time.
_logger.setLevel(logging.CRITICAL + 1)

__all__ = ["paramiko"]


# The user's SSH keys, in the ssh-agent and in private key files. gpurun asks for no passphrase and stores no key.


_load_lock = Lock()
_HARDWARE = (b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com")
_MOST_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class ClientKey:
    """One key to offer, and its source."""

    source: str
    key: PKey


@dataclass(frozen=True)
class KeyProblem:
    """A key file that exists but is not usable, and the reason."""

    file: str
    reason: str


def identities(route: Route) -> Iterator[ClientKey | KeyProblem]:
    """Return the keys in OpenSSH's order: agent keys with a key file, other agent keys, key files.

    Contacts the ssh-agent only when the caller takes the first key.
    """
    files = [file for file in route.identity_files if Path(file).exists() or Path(file + ".pub").exists()]
    named = {blob: file for file in files if (blob := _public_blob(file)) is not None}
    agent_keys = list(_agent_keys(route.identity_agent))
    offered: set[bytes] = set()
    for first in (True, False):
        for key in agent_keys:
            blob = key.asbytes()
            if (blob in named) is first and (first or not route.identities_only):
                offered.add(blob)
                yield ClientKey("ssh-agent", key)
    for file in files:
        if _public_blob(file) in offered:
            continue
        if Path(file).exists():
            yield from _from_file(file, route.certificate_files)


def has_plain(route: Route) -> bool:
    """Return True if Paramiko may have a key to offer; does not contact the ssh-agent."""
    if not route.identities_only and route.identity_agent and Path(route.identity_agent).exists():
        return True
    return any(Path(file).exists() and not _is_hardware(file) for file in route.identity_files)


def has_hardware(route: Route) -> bool:
    """Return True if a key file stands for a FIDO key, even if only its public half is a file."""
    return any(_is_hardware(file) or _public_text(file).startswith("sk-") for file in route.identity_files)


def _is_hardware(file: str) -> bool:
    """Return True if the key has a type ``sk-…``, whose private part is on a token (OpenSSH, PROTOCOL.u2f)."""
    with suppress(OSError, ValueError):
        return any(kind in _unarmoured(file) for kind in _HARDWARE)
    return False


def _unarmoured(file: str) -> bytes:
    """Return a private key file's bytes. The type is in clear text, even with a passphrase (OpenSSH, PROTOCOL.key)."""
    lines = Path(file).read_bytes()[:_MOST_KEY_BYTES].splitlines()
    return b64decode(b"".join(line for line in lines if not line.startswith(b"-----")))


def _from_file(file: str, certificates: tuple[str, ...]) -> Iterator[ClientKey | KeyProblem]:
    try:
        status = Path(file).stat()
        with _load_lock:
            key, reason = _load_key(file, status.st_mtime_ns)
    except OSError as error:
        if is_short(error):
            raise
        yield KeyProblem(file, str(error.strerror))
        return
    if key is None:
        yield KeyProblem(file, reason)
        return
    for certificate in (f"{file}-cert.pub", *certificates):
        certified = _certified(file, certificate)
        if certified is not None:
            yield ClientKey(certificate, certified)
    yield ClientKey(file, key)


@lru_cache(maxsize=64)
def _load_key(file: str, _mtime_ns: int) -> tuple[PKey | None, str]:
    try:
        return paramiko.PKey.from_path(file), ""
    except (paramiko.PasswordRequiredException, TypeError):
        return None, "the key has a passphrase: add the key to an ssh-agent with ssh-add"
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError) as error:
        return None, f"the key cannot be read: {error}"


def _certified(file: str, certificate: str) -> PKey | None:
    """Return the key with its certificate, if the certificate exists and belongs to this key."""
    if not Path(certificate).exists():
        return None
    try:
        key = paramiko.PKey.from_path(file)
        key.load_certificate(certificate)
    except (paramiko.SSHException, ValueError, OSError):
        return None
    return key


def _public_blob(file: str) -> bytes | None:
    fields = _public_text(file).split()
    try:
        return paramiko.pkey.PublicBlob.from_string(" ".join(fields[:2])).key_blob if len(fields) > 1 else None
    except ValueError:
        return None


def _public_text(file: str) -> str:
    """Return the public half of a key; an empty text if there is none."""
    try:
        return Path(file + ".pub").read_text(errors="replace")
    except OSError:
        return ""


def _agent_keys(socket_path: str | None) -> tuple[PKey, ...]:
    """Return the agent's keys. Each connection has its own agent socket, because Paramiko's is not thread-safe."""
    if not socket_path or not Path(socket_path).exists():
        return ()
    try:
        return tuple(_AgentAt(socket_path).get_keys())
    except (paramiko.SSHException, OSError) as error:
        if is_short(error):
            raise  # else the host would seem to refuse the login
        return ()


class _AgentAt(paramiko.agent.AgentSSH):
    """The ssh-agent at a given socket, not only at ``SSH_AUTH_SOCK``."""

    def __init__(self, path: str) -> None:
        import socket  # noqa: PLC0415

        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(path)
        self._connect(connection)  # type: ignore[attr-defined]


# A ProxyCommand, run in OpenSSH's way: ``exec COMMAND`` in the user's shell, with pipes at stdin and stdout.


_TICK_MS = 100


class ProxyProgram(Program):
    """The running program, as a socket for Paramiko."""

    def __init__(self, command: str) -> None:
        super().__init__([os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"])

    def settimeout(self, timeout_s: float | None) -> None:
        """Do nothing: `recv` and `send` never wait for long, and Paramiko calls them again."""

    def recv(self, count: int) -> bytes:
        """Return bytes from the host; empty at the end. Raises TimeoutError."""
        with self._reading:
            if self._closed:
                return b""
            ready = {descriptor for descriptor, _ in self._readable.poll(_TICK_MS)}
            if self._stderr in ready:
                self._listen()
            if self._stdout in ready:
                return os.read(self._stdout, count)
        raise TimeoutError

    def send(self, data: bytes) -> int:
        """Return the number of bytes that the program took. Raises TimeoutError; another OSError if it has ended."""
        with self._writing:
            if self._closed:
                raise BrokenPipeError
            if self._writable.poll(_TICK_MS):
                with suppress(BlockingIOError):
                    return os.write(self._stdin, data)
        raise TimeoutError

    def last_words(self) -> str:
        """End the program, and return the last line that it printed to stderr."""
        self._close_and_wait()
        lines = self._said.decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


# Connect to the first address of a host that answers.


NEXT_ADDRESS_S = 1.0
"""TCP repeats its first packet after 1 s, so an address that has not answered by then has probably dropped it."""


class Address(NamedTuple):
    """One result of getaddrinfo(3)."""

    family: int
    kind: int
    protocol: int
    name: str
    address: Any


def addresses_of(route: Route) -> list[Address]:
    """Return the addresses of a route's host, families in turn, in the resolver's order otherwise.

    Raises:
        HostUnreachable: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(route.hostname, route.port, route.family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        hint = "correct DNS, /etc/hosts, or the address in the inventory or in ssh_config"
        raise HostUnreachable(
            f"the name {route.hostname!r} cannot be resolved: {error}", host=route.name, hint=hint
        ) from None
    return in_turn(Address(*each) for each in found)


def in_turn(addresses: Iterable[Address]) -> list[Address]:
    """Return addresses with their families in turn, the first address first."""
    by_family: dict[int, list[Address]] = {}
    for each in addresses:
        by_family.setdefault(each.family, []).append(each)
    return [each for each in chain(*zip_longest(*by_family.values())) if each is not None]


def dial(addresses: Sequence[Address], attempt: Attempt, bind_address: str | None = None) -> socket.socket:
    """Return a connection to the first address that accepts one within `attempt.connect_left_s`.

    Raises:
        OSError: the last failure; TimeoutError if an address did not answer at all.
    """
    waiting = deque(addresses)
    trying: list[socket.socket] = []
    failure: OSError = TimeoutError()
    until_s = time.monotonic() + attempt.connect_left_s
    next_s = 0.0
    try:
        while (waiting or trying) and (now_s := time.monotonic()) < until_s:
            if waiting and (not trying or now_s >= next_s):
                next_s = now_s + NEXT_ADDRESS_S
                try:
                    trying.append(_begun(waiting.popleft(), attempt, bind_address))
                except OSError as error:
                    failure = error
                continue
            for sock in _settled(trying, min(until_s, next_s if waiting else until_s) - now_s):
                trying.remove(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                failure = OSError(number, os.strerror(number))
                if not number or isinstance(failure, ConnectionError):
                    attempt.answered()
                if not number:
                    sock.setblocking(True)
                    return sock
                sock.close()
    finally:
        for sock in trying:
            sock.close()
    raise TimeoutError if trying else failure


def _begun(address: Address, attempt: Attempt, bind_address: str | None) -> socket.socket:
    """Return a socket that connects to an address. Raises OSError: it cannot."""
    sock = socket.socket(address.family, address.kind, address.protocol)
    attempt.opened(sock.close)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if bind_address:
            sock.bind((bind_address, 0))
        sock.setblocking(False)
        attempt.asks()
        with suppress(BlockingIOError):
            sock.connect(address.address)
    except OSError as error:
        if isinstance(error, ConnectionError):
            attempt.answered()
        sock.close()
        raise
    return sock


def _settled(trying: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Return the sockets that are connected or have failed; wait for the first for a limited time."""
    by_number = {sock.fileno(): sock for sock in trying}
    poller = select.poll()
    for number in by_number:
        if number < 0:
            raise OSError("gpurun gave up this connection attempt")
        poller.register(number, select.POLLOUT)
    return [by_number[number] for number, _ in poller.poll(max(0.0, timeout_s) * 1000 + 1)]


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
    entries = known_keys(route)
    transport = _negotiate(route, attempt, _open_socket(route, attempt, jumps), entries)
    try:
        key = transport.get_remote_server_key()
        # Read again: a ProxyCommand may fetch the host's keys as it connects, such as sss_ssh_knownhostsproxy.
        check_host_key(route, key.get_name(), known_hosts.fingerprint(key.asbytes()), known_keys(route))
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
    if needs_a_person(wanted):
        hint = connect_hint(route.name)
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


# Connections to jump hosts. All sessions through a jump host share one connection, and the last one closes it.


@dataclass(eq=False)
class _Shared:
    """The connection to one jump host, and the number of its users."""

    users: int = 0
    transport: Transport | None = None
    connecting: Lock = field(default_factory=Lock)


class Passage:
    """A channel through a jump host, as a socket for Paramiko. Closing it releases the jump host."""

    def __init__(self, channel: Channel, leave: Callable[[], None]) -> None:
        self._channel, self._leave = channel, leave
        self._lock, self._closed = Lock(), False  # Paramiko reads `_closed`, so the name must stay
        self.send, self.recv, self.settimeout = channel.send, channel.recv, channel.settimeout

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._channel.close()
        finally:
            self._leave()


class Jumps:
    """The jump hosts to which this process is connected. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared: dict[Route, _Shared] = {}

    def through(self, jump: Route, route: Route, attempt: Attempt) -> Passage:
        """Open a channel to `route` through `jump`.

        Raises:
            HostFailure: the jump host is not usable, or cannot reach the host.
        """
        with self._lock:
            shared = self._shared.setdefault(jump, _Shared())
            shared.users += 1
        try:
            channel = self._transport(jump, shared, attempt).open_channel(
                "direct-tcpip", (route.hostname, route.port), ("127.0.0.1", 0), timeout=attempt.connect_left_s
            )
        except BaseException as error:
            self._leave(jump, shared)
            if not isinstance(error, paramiko.SSHException | EOFError | OSError):
                raise
            raise HostUnreachable(
                f"{jump.name} cannot reach {route.hostname} port {route.port}: {reason(error)}", host=route.name
            ) from error
        return Passage(channel, lambda: self._leave(jump, shared))

    def _transport(self, jump: Route, shared: _Shared, attempt: Attempt) -> Transport:
        # Other sessions through the same jump host wait for its one connection and do not open their own.
        if not shared.connecting.acquire(timeout=attempt.left_s):
            raise HostUnreachable(f"the jump host {jump.name} does not answer", host=jump.name)
        try:
            if shared.transport is None or not shared.transport.is_active():
                # A separate attempt: giving up one host must not close the connection of others, and gpurun
                # cannot see from here whether the host behind it answers.
                own = Attempt(attempt.deadline_s, connect_s=attempt.connect_s)
                shared.transport = connect(jump, own, self)
            return shared.transport
        finally:
            shared.connecting.release()

    def _leave(self, jump: Route, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            last = shared.users == 0
            if last:
                del self._shared[jump]
        if last and shared.transport is not None:
            shared.transport.close()


# A command on a host, over Paramiko.


def run_over_paramiko(route: Route, attempt: Attempt, jumps: Jumps, command: str) -> ParamikoChannel:
    """Connect and run a command. Raises HostFailure, or what Paramiko raises."""
    transport = connect(route, attempt, jumps)
    try:
        attempt.stage = "starting the agent"
        channel = transport.open_session(timeout=attempt.left_s)
        channel.settimeout(attempt.left_s)
        channel.exec_command(command)
    except BaseException:
        transport.close()
        raise
    return ParamikoChannel(route.name, transport, channel)


class ParamikoChannel:
    """See `gpurun.remote.program.RemoteCommand`."""

    def __init__(self, host: str, transport: Transport, channel: Channel) -> None:
        self._host, self._transport, self._channel = host, transport, channel
        self.recv, self.settimeout = channel.recv, channel.settimeout

    def sendall(self, data: bytes) -> None:
        """See RemoteCommand. Has no time-out: the caller gives up a host that does not answer.

        Paramiko's time-out counts for both directions. It ends a `send` only before the first byte.
        """
        while data:
            with suppress(TimeoutError):
                sent = self._channel.send(data)
                if not sent:
                    raise BrokenPipeError
                data = data[sent:]

    def ending(self, within_s: float) -> CommandEnd:
        """Wait for stderr, then for the exit code, which comes after the end of the output."""
        self._channel.settimeout(within_s)
        try:
            said = self._channel.recv_stderr(1 << 14).decode(errors="replace").strip()
        except TimeoutError:
            said = ""
        self._channel.status_event.wait(within_s)
        return CommandEnd(self._channel.recv_exit_status() if self._channel.exit_status_ready() else None, said)

    def discard_stderr(self) -> None:
        """Read and discard stderr: a full window would block the agent's messages, and so the agent."""
        Thread(target=self._drain, name=f"stderr {self._host}", daemon=True).start()

    def _drain(self) -> None:
        with suppress(OSError), self._channel.makefile_stderr("rb") as stderr:
            while stderr.read(1 << 12):
                pass

    def close(self) -> None:
        """Close the channel, then its connection."""
        try:
            with suppress(OSError, EOFError):  # it was already closed
                self._channel.close()
        finally:
            self._transport.close()

"""The user's SSH keys, in the ssh-agent and in private key files. gpurun asks for no passphrase and stores no key."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from gpurun.errors import is_short
from gpurun.remote.paramiko_quietly import paramiko

if TYPE_CHECKING:
    from paramiko import PKey

    from gpurun.remote.ssh_config import Route

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

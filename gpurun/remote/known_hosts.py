"""Read OpenSSH's known_hosts files: line numbers, patterns, hashed names; and compare a host's key with them.

Format: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT". The key of an authority (``@cert-authority``) is not a host key, and
Paramiko cannot verify host certificates: the machine's ``ssh`` does. gpurun never accepts ``@revoked`` keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.errors import HostKeyMismatch, is_short

if TYPE_CHECKING:
    from gpurun.remote.route import Route


DEFAULT_PORT = 22


@dataclass(frozen=True)
class KnownHost:
    """One line of a known_hosts file.

    Attributes:
        names: the first field: patterns separated by commas, or one hashed name.
        kind: the key's type, such as ``ssh-ed25519``.
        blob: the key itself.
        marker: ``""``, ``@revoked`` or ``@cert-authority``.
    """

    names: str
    kind: str
    blob: bytes
    marker: str
    file: str
    line: int

    @property
    def where(self) -> str:
        """``FILE:LINE``."""
        return f"{self.file}:{self.line}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ``ssh-keygen -lf``."""
        return fingerprint(self.blob)

    def matches(self, name: str) -> bool:
        """Return True if this line applies to `name`, which is a host name or ``[host]:port``."""
        if self.names.startswith("|1|"):
            return _hash_matches(self.names, name)
        patterns = self.names.lower().split(",")
        if any(pattern.startswith("!") and _glob(pattern[1:], name) for pattern in patterns):
            return False
        return any(_glob(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def fingerprint(blob: bytes) -> str:
    """Return a public key's fingerprint in OpenSSH's format, ``SHA256:…``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _glob(pattern: str, name: str) -> bool:
    # Only * and ? are special in known_hosts; the brackets of "[host]:port" are literal.
    return pattern == name or (("*" in pattern or "?" in pattern) and fnmatchcase(name, pattern.replace("[", "[[]")))


def _hash_matches(names: str, name: str) -> bool:
    try:
        _, _, salt, digest = names.split("|")
        expected = base64.b64decode(digest)
        actual = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(actual, expected)


def parse_known_hosts(text: str, file: str) -> tuple[KnownHost, ...]:
    """Return every line with a key; skips comments and invalid lines, as OpenSSH does."""
    return tuple(entry for number, line in enumerate(text.splitlines(), 1) if (entry := _entry(line, file, number)))


def _entry(line: str, file: str, number: int) -> KnownHost | None:
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#"):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (ValueError, binascii.Error):
        return None
    return KnownHost(fields[0], fields[1], blob, marker, file, number)


@lru_cache(maxsize=64)
def _load(path: str, _mtime_ns: int, _size: int) -> tuple[KnownHost, ...]:
    return parse_known_hosts(Path(path).read_text(errors="replace"), path)


def load_known_hosts(files: Iterable[str]) -> tuple[KnownHost, ...]:
    """Return the entries of several files, in order; skips files that are missing, unreadable or not regular.

    Raises:
        OSError: this machine has no descriptor or memory left.
    """
    entries: list[KnownHost] = []
    for file in files:
        try:
            status = Path(file).stat()
            if not stat.S_ISREG(status.st_mode):
                continue
            entries += _load(file, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError) as error:
            if is_short(error):
                raise  # else a known host would seem unknown
    return tuple(entries)


def lookup_name(host: str, port: int) -> str:
    """Return the name of a host with this port in known_hosts."""
    return host.lower() if port == DEFAULT_PORT else f"[{host.lower()}]:{port}"


def find_entries(entries: Sequence[KnownHost], host: str, port: int, alias: str | None = None) -> tuple[KnownHost, ...]:
    """Return the entries of a host: by its alias, else by host and port, else (as OpenSSH does) by host alone."""
    names = _lookup_names(host, port, alias)
    for name in names:
        found = tuple(entry for entry in entries if entry.marker != "@cert-authority" and entry.matches(name))
        if any(entry.marker == "" for entry in found):
            return found
    return tuple(entry for entry in entries if entry.marker == "@revoked" and entry.matches(names[0]))


def is_certified(entries: Sequence[KnownHost], host: str, port: int, alias: str | None = None) -> bool:
    """Return True if only certificate authorities vouch for a host: no line has its own key."""
    if any(entry.marker == "" for entry in find_entries(entries, host, port, alias)):
        return False
    names = _lookup_names(host, port, alias)
    return any(entry.marker == "@cert-authority" and any(map(entry.matches, names)) for entry in entries)


def _lookup_names(host: str, port: int, alias: str | None) -> list[str]:
    return [alias.lower()] if alias else list(dict.fromkeys((lookup_name(host, port), host.lower())))


# Compare the key that a host presents with known_hosts.


def known_keys(route: Route) -> tuple[KnownHost, ...]:
    """Return the entries of a host in known_hosts."""
    return find_entries(load_known_hosts(route.known_hosts), route.hostname, route.port, route.host_key_alias)


def needs_certificate(route: Route) -> bool:
    """Return True if known_hosts has no key of a host, but an authority that may have signed its certificate."""
    return is_certified(load_known_hosts(route.known_hosts), route.hostname, route.port, route.host_key_alias)


def check_host_key(route: Route, kind: str, fingerprint: str, entries: Sequence[KnownHost]) -> None:
    """Compare the host's key with known_hosts.

    Raises:
        HostKeyMismatch: the key is unknown, different (with both fingerprints and the file's line), or revoked.
    """
    shown = f"{kind} {fingerprint}"
    hint = f"compare the fingerprint with the key on the host's console, then run: gpurun inventory trust {route.name}"
    for entry in entries:
        if entry.marker == "@revoked" and entry.fingerprint == fingerprint:
            raise HostKeyMismatch(f"the host's key {shown} is revoked", host=route.name, where=entry.where)
    ours = [entry for entry in entries if entry.marker == ""]
    if any(entry.fingerprint == fingerprint for entry in ours):
        return
    if not ours:
        file = route.known_hosts[0] if route.known_hosts else "known_hosts"
        raise HostKeyMismatch(f"the host's key {shown} is not in {file}", host=route.name, hint=hint)
    expected = next((entry for entry in ours if entry.kind == kind), ours[0])
    raise HostKeyMismatch(
        f"the host's key has changed: the host shows {shown}, but {expected.where} says {expected.kind} "
        f"{expected.fingerprint}",
        host=route.name,
        where=expected.where,
        hint=hint + " (somebody may be between you and the host)",
    )

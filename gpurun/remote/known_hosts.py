"""Which key a host must have: OpenSSH's known_hosts files, with lines, patterns and hashed names.

Format: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT". ``@cert-authority`` lines are skipped: Paramiko cannot verify host
certificates, and a certificate's authority is no host key. ``@revoked`` keys are never accepted.
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
        """As ``ssh-keygen -lf`` prints it."""
        return fingerprint(self.blob)

    def matches(self, name: str) -> bool:
        """Whether this line is about `name`, which is a host name or ``[host]:port``."""
        if self.names.startswith("|1|"):
            return _hash_matches(self.names, name)
        patterns = self.names.lower().split(",")
        if any(pattern.startswith("!") and _glob(pattern[1:], name) for pattern in patterns):
            return False
        return any(_glob(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def fingerprint(blob: bytes) -> str:
    """A public key's fingerprint, ``SHA256:…`` as OpenSSH writes it."""
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


def parse(text: str, file: str) -> tuple[KnownHost, ...]:
    """Every line that holds a key; comments and lines that cannot be read are skipped, as OpenSSH does."""
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
    return parse(Path(path).read_text(errors="replace"), path)


def load(files: Iterable[str]) -> tuple[KnownHost, ...]:
    """The entries of several files, in order; one that is not there, not readable or no regular file has none."""
    entries: list[KnownHost] = []
    for file in files:
        try:
            status = Path(file).stat()
            if not stat.S_ISREG(status.st_mode):
                continue
            entries += _load(file, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError):
            continue
    return tuple(entries)


def lookup_name(host: str, port: int) -> str:
    """How known_hosts writes a host on that port."""
    return host.lower() if port == DEFAULT_PORT else f"[{host.lower()}]:{port}"


def find(entries: Sequence[KnownHost], host: str, port: int, alias: str | None = None) -> tuple[KnownHost, ...]:
    """The entries about a host: by its alias, else by host and port, else (as OpenSSH does) by host alone."""
    names = [alias.lower()] if alias else list(dict.fromkeys((lookup_name(host, port), host.lower())))
    for name in names:
        found = tuple(entry for entry in entries if entry.marker != "@cert-authority" and entry.matches(name))
        if any(entry.marker == "" for entry in found):
            return found
    return tuple(entry for entry in entries if entry.marker == "@revoked" and entry.matches(names[0]))

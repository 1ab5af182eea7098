"""SSHFP records: host key fingerprints that a zone's owner put into DNS (RFC 4255, RFC 6594, RFC 7479).

A small stub resolver, because the standard library asks DNS for addresses only. Its answers are shown to a
person beside what the host offers. They are never taken for proof: whether DNSSEC holds, only the name server
that was asked knows (`secure`).
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SSHFP = 44
_ALGORITHMS = {1: "ssh-rsa", 3: "ecdsa-sha2-nistp256", 4: "ssh-ed25519"}
_HASHES = {1: "sha1", 2: "sha256"}
_MAX_POINTERS = 64


@dataclass(frozen=True)
class SshfpRecord:
    """One SSHFP record. `kind` as known_hosts names key types; `secure` if the name server vouches with DNSSEC."""

    kind: str
    hash_name: str
    digest: bytes
    secure: bool

    def is_about(self, kind: str) -> bool:
        """Whether it speaks of a key of this type. All ECDSA curves are one algorithm there."""
        return kind == self.kind or (kind.startswith("ecdsa-") and self.kind.startswith("ecdsa-"))

    def matches(self, blob: bytes) -> bool:
        """Whether it is this key's."""
        return hashlib.new(self.hash_name, blob, usedforsecurity=False).digest() == self.digest


def lookup(
    name: str, *, timeout_s: float = 2.0, servers: tuple[tuple[str, int], ...] | None = None
) -> tuple[SshfpRecord, ...]:
    """The SSHFP records of a host name; none if there are none, or nobody answers.

    Args:
        servers: (address, port) of name servers; those of ``/etc/resolv.conf`` unless given.
    """
    try:
        query, identity = _query(name)
    except UnicodeError:
        return ()
    for address, port in servers if servers is not None else tuple((server, 53) for server in _name_servers()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as channel:
                channel.settimeout(timeout_s)
                channel.connect((address, port))
                channel.send(query)
                return tuple(_records(channel.recv(4096), identity))
        except (OSError, struct.error, IndexError, ValueError):
            continue
    return ()


def _name_servers(path: Path = Path("/etc/resolv.conf")) -> Iterator[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            yield words[1].partition("%")[0]


def _query(name: str) -> tuple[bytes, int]:
    identity = secrets.randbelow(1 << 16)
    labels = b"".join(
        bytes([len(label)]) + label for label in (part.encode("idna") for part in name.strip(".").split("."))
    )
    recursion_and_authentic = 0x0120
    header = struct.pack("!6H", identity, recursion_and_authentic, 1, 0, 0, 0)
    return header + labels + b"\0" + struct.pack("!2H", SSHFP, 1), identity


def _records(answer: bytes, identity: int) -> Iterator[SshfpRecord]:
    got, flags, questions, answers, _, _ = struct.unpack_from("!6H", answer)
    if got != identity or not flags & 0x8000 or flags & 0x000F:
        return
    at = 12
    for _ in range(questions):
        at = _skip_name(answer, at) + 4
    for _ in range(answers):
        at = _skip_name(answer, at)
        kind, _, _, length = struct.unpack_from("!2HIH", answer, at)
        data = answer[at + 10 : at + 10 + length]
        at += 10 + length
        if kind == SSHFP and len(data) > 2 and data[0] in _ALGORITHMS and data[1] in _HASHES:
            yield SshfpRecord(_ALGORITHMS[data[0]], _HASHES[data[1]], data[2:], secure=bool(flags & 0x0020))


def _skip_name(answer: bytes, at: int) -> int:
    for _ in range(_MAX_POINTERS):
        length = answer[at]
        if length & 0xC0:
            return at + 2
        at += 1 + length
        if length == 0:
            return at
    raise ValueError("name without end")

"""Compare the key that a host presents with known_hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpurun.errors import HostKeyMismatch
from gpurun.remote.known_hosts import KnownHost, find, is_certified, load

if TYPE_CHECKING:
    from gpurun.remote.ssh_config import Route


def known(route: Route) -> tuple[KnownHost, ...]:
    """Return the entries of a host in known_hosts."""
    return find(load(route.known_hosts), route.hostname, route.port, route.host_key_alias)


def needs_certificate(route: Route) -> bool:
    """Return True if known_hosts has no key of a host, but an authority that may have signed its certificate."""
    return is_certified(load(route.known_hosts), route.hostname, route.port, route.host_key_alias)


def check(route: Route, kind: str, fingerprint: str, entries: Sequence[KnownHost]) -> None:
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

"""Which hosts had which data sets when they were last asked: advice, in the user's own cache.

Hosts remove sets that nobody uses. So whoever needs a set asks the host, and what the host says replaces what is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpurun.state import lock, own_cache

MOST_SETS = 1000

Known = dict[str, dict[str, float]]
"""Digest → host → when the host said that it has the set, in seconds since the epoch."""


def hosts_of(digest: str) -> frozenset[str]:
    """The hosts that had a set when they were last asked."""
    return frozenset(known().get(digest, ()))


def known() -> Known:
    """All that is known."""
    place = _place()
    try:
        return msgspec.json.decode((place and own_cache.read(place)) or b"{}", type=Known)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def note(digest: str, *, has: Iterable[str] = (), lacks: Iterable[str] = ()) -> None:
    """Note what hosts have said of a set."""
    place = _place()
    if place is None:
        return
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.alone(place.with_suffix(".lock")):
        found = known()
        hosts = found.pop(digest, {}) | dict.fromkeys(has, time.time())
        for host in lacks:
            hosts.pop(host, None)
        if hosts:
            found[digest] = hosts
        own_cache.keep(place, msgspec.json.encode(dict(list(found.items())[-MOST_SETS:])))


def _place() -> Path | None:
    kept = own_cache.folder(os.environ, "data")
    return None if kept is None else own_cache.place(kept, "sites")

"""The user's cache of which hosts had which data sets when they were last asked.

Hosts remove unused sets. So code that needs a set asks the host, and the answer replaces the cached one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gpurun.msgspec_types import ready
from gpurun.state import lock, own_cache

MOST_SETS = 1000


class Site(msgspec.Struct):
    """What is known of a set.

    Attributes:
        source: where it came from when it was last pinned.
        hosts: host → when the host said that it has the set, in seconds since the epoch.
    """

    source: str = ""
    hosts: dict[str, float] = {}


Known = dict[str, Site]


def hosts_of(digest: str) -> frozenset[str]:
    """The hosts that had a set when they were last asked."""
    return frozenset(known().get(digest, Site()).hosts)


def holders() -> dict[str, frozenset[str]]:
    """Digest → the hosts that had the set when they were last asked."""
    return {digest: frozenset(site.hosts) for digest, site in known().items()}


def known() -> Known:
    """All that is known."""
    place = _place()
    try:
        return msgspec.json.decode((place and own_cache.read(place)) or b"{}", type=ready(Known))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def note(digest: str, *, has: Iterable[str] = (), lacks: Iterable[str] = (), source: str = "") -> None:
    """Note what hosts have said of a set, and where it comes from."""
    note_all({digest: (has, lacks)}, source=source)


def note_all(heard: Mapping[str, tuple[Iterable[str], Iterable[str]]], *, source: str = "") -> None:
    """Note, at once, which hosts have said that they have each of these sets, and which that they lack it.

    Never fails: everything works without the cache. If it is full, it forgets new sets of many before those it knew.
    """
    place = _place()
    if place is None or not heard:
        return
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock.alone(place.with_suffix(".lock")):
            found = known()
            now_s = time.time()
            new: Known = {}
            for digest, (has, lacks) in heard.items():
                site = found.pop(digest, None)
                among = new if site is None else found
                site = site or Site()
                site.hosts |= dict.fromkeys(has, now_s)
                for host in lacks:
                    site.hosts.pop(host, None)
                site.source = source or site.source
                among[digest] = site
            kept = [*new.items(), *found.items()] if len(new) > 1 else [*found.items(), *new.items()]
            own_cache.keep(place, msgspec.json.encode(dict(kept[-MOST_SETS:])))


def _place() -> Path | None:
    kept = own_cache.folder(os.environ, "data")
    return None if kept is None else own_cache.place(kept, "sites")

"""Builds that are broken on purpose: each changes exactly one thing. The state machine must notice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpurun.inventory.model import Host
from gpurun.leases import look
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.node.job import claims


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Checks(Occupancy):
    """Checks a grant and forgets it."""

    def grant(self, lease: Any) -> None:
        before = {machine: dict(held) for machine, held in self._machines.items()}
        super().grant(lease)
        self._machines = before
        self._leases.pop(lease.name, None)


def _put_unchecked(self: Occupancy, lease: Any) -> None:
    self.free(lease.name)
    self._put(lease)


def _without_lost(leases: Any = ()) -> Occupancy:
    return Occupancy([lease for lease in leases if not lease.lost])


BUILDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "occupancy not updated by a grant": lambda: _replaced(look, "Occupancy", _Checks),
    "claim not checked": lambda: _replaced(claims, "take", lambda *_: []),
    "overlap check removed": lambda: _replaced(Occupancy, "grant", _put_unchecked),
    "lost leases not counted": lambda: _replaced(look, "Occupancy", _without_lost),
    "removed leases not counted": lambda: _replaced(LeaseStore, "removed", lambda *_: iter(())),
    "promise ignored": lambda: _replaced(Occupancy, "promise", lambda *_, **__: None),
    "second name not dropped at a release": lambda: _replaced(LeaseStore, "_drop_second_name", lambda *_: None),
    "machines told apart by name alone": lambda: _replaced(Host, "machine", property(lambda host: f"{host.name}:22")),
    "paths not canonical": lambda: _replaced(os.path, "realpath", lambda path, **_: os.path.normpath(path)),
}  # fmt: skip
"""What is broken → a context in which it is."""
SEEN_AT_THE_END: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "adopter missing": lambda: _replaced(LeaseStore, "take_orphans", lambda *_, **__: iter(())),
}
"""Builds in which nothing is held twice, and some jobs never end."""
NAMED_IN_THE_ISSUE = ("occupancy not updated by a grant", "claim not checked", "overlap check removed")

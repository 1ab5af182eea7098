"""List the images that gpurun has put on hosts, and remove those that no job uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.remote import Agent, Fleet, Results

LIMIT_S = 300.0


@dataclass(frozen=True)
class Placed:
    """One image that gpurun put on one host.

    Attributes:
        id: the image's ID on the head.
        names: tags that gpurun gave it there and that still point to it.
        present: it is still there.
        temporary: it only holds layers of an interrupted ship.
        shipped_s: when, in seconds since the epoch, by the host's clock.
        used_by: containers, running or not.
        needed: a ship or a job that runs counts on it.
        freed: after pruning: whether the image itself is gone, not only gpurun's tags.
    """

    id: str
    names: tuple[str, ...]
    present: bool
    temporary: bool
    shipped_s: float | None
    size_bytes: int
    used_by: tuple[str, ...]
    needed: bool = False
    freed: bool = False

    def as_json(self) -> dict[str, Any]:
        """As ``gpurun images --json`` shows it."""
        return {
            "id": self.id,
            "names": list(self.names),
            "present": self.present,
            "temporary": self.temporary,
            "shipped_s": self.shipped_s,
            "size_bytes": self.size_bytes,
            "used_by": list(self.used_by),
        }


def placed(fleet: Fleet, hosts: Iterable[str]) -> Results[tuple[Placed, ...]]:
    """Return the images that gpurun has put on each host."""
    return fleet.map(lambda agent: _all(agent.call("images.listing", timeout_s=LIMIT_S).value), hosts)


def prune(fleet: Fleet, hosts: Iterable[str], keep: Iterable[str]) -> Results[tuple[Placed, ...]]:
    """Remove unused images that gpurun has put on hosts; return the removed images. Idempotent.

    Keeps images that others put there, that have a tag from others, that a container uses, or that a ship counts on.

    Args:
        keep: the head's IDs of images that jobs need.
    """
    kept = list(keep)

    def ask(agent: Agent) -> tuple[Placed, ...]:
        return _all(agent.call("images.prune", keep=kept, timeout_s=LIMIT_S).value)

    return fleet.map(ask, hosts)


def _all(found: Iterable[Mapping[str, Any]]) -> tuple[Placed, ...]:
    return tuple(
        Placed(
            id=said["id"],
            names=tuple(said["names"]),
            present=said["present"],
            temporary=said["temporary"],
            shipped_s=said["shipped_s"],
            size_bytes=said["size_bytes"],
            used_by=tuple(said["used_by"]),
            needed=bool(said.get("needed")),
            freed=bool(said.get("freed")),
        )
        for said in found
    )

"""What gpurun has put into hosts' Docker, and taking back what no job uses."""

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
        id: the head's ID of it.
        names: those gpurun gave it there and that are still its.
        present: it is still there.
        temporary: it only held layers of a ship that was cut off.
        shipped_s: when, in seconds since the epoch, by the host's clock.
        used_by: containers, running or not.
        freed: after pruning: whether the image itself is gone, not only gpurun's names for it.
    """

    id: str
    names: tuple[str, ...]
    present: bool
    temporary: bool
    shipped_s: float | None
    size_bytes: int
    used_by: tuple[str, ...]
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
    """What gpurun has put on each host."""
    return fleet.map(lambda agent: _all(agent.call("images.listing", timeout_s=LIMIT_S).value), hosts)


def prune(fleet: Fleet, hosts: Iterable[str], keep: Iterable[str]) -> Results[tuple[Placed, ...]]:
    """Remove what gpurun has put on hosts and nothing uses; what was removed. Idempotent.

    What gpurun did not put there, what has got a name from somebody else, and what a container uses stays.

    Args:
        keep: the head's IDs of images that jobs will want.
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
            freed=bool(said.get("freed")),
        )
        for said in found
    )

"""A user's caches of models and kernels on hosts: how large they are, and how they become smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpurun.errors import GpurunError
from gpurun.remote import Agent, Fleet

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class HostCaches:
    """A user's caches on one host.

    Attributes:
        bytes: what they take.
        jobs: the jobs that use them there.
        freed: what a prune removed.
        stuck: what it could not remove, and why.
    """

    host: str
    bytes: int
    jobs: Sequence[str] = ()
    freed: int = 0
    stuck: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the caches as `gpurun du` and `gpurun prune` show them."""
        return {
            "host": self.host, "bytes": self.bytes, "jobs": list(self.jobs), "freed_bytes": self.freed,
            "stuck": list(self.stuck),
        }  # fmt: skip


Found = tuple[list[HostCaches], Mapping[str, GpurunError]]


def measure(fleet: Fleet, hosts: Sequence[str], owner: str) -> Found:
    """Return a user's caches on hosts, and the hosts that failed."""

    def one(agent: Agent) -> HostCaches:
        told = agent.call("caches.list", owner=owner, timeout_s=_TIMEOUT_S).value
        return HostCaches(agent.host, told["bytes"], told["jobs"])

    return _sorted(fleet, hosts, one)


def trim(fleet: Fleet, limits: Mapping[str, int], owner: str) -> Found:
    """Remove what was used least recently until each host's limit, in bytes, holds; not while a job uses it."""

    def one(agent: Agent) -> HostCaches:
        told = agent.call("caches.trim", owner=owner, most_bytes=limits[agent.host], timeout_s=_TIMEOUT_S).value
        return HostCaches(agent.host, told["bytes"], told["jobs"], told["freed_bytes"], told["stuck"])

    return _sorted(fleet, list(limits), one)


def _sorted(fleet: Fleet, hosts: Sequence[str], ask: Any) -> Found:
    done = fleet.map(ask, hosts)
    return [done.ok[host] for host in hosts if host in done.ok], done.failed

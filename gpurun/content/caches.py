"""A user's caches of models and kernels on hosts: how large they are, and how they become smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from gpurun.errors import GpurunError
from gpurun.remote import Agent, Fleet
from gpurun.remote.agent import bad_answer
from gpurun.state import caches

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class HostCaches:
    """A user's caches on one host.

    Attributes:
        jobs: jobs that use the caches on the host.
        freed_bytes: how many bytes a prune removed.
        stuck: some entries that could not be removed, and why.
    """

    host: str
    bytes: int
    jobs: Sequence[str] = ()
    freed_bytes: int = 0
    stuck: Sequence[str] = ()


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


# List the data sets that hosts have, and remove some.


class DataSetShape(TypedDict):
    """A data set.

    Attributes:
        source: where the data set came from; empty: unknown.
        used_s: when a job last used the data set; seconds since 1970.
        jobs: jobs that need the data set and have not ended.
    """

    digest: str
    bytes: int
    files: int
    source: str
    hosts: list[str]
    used_s: float
    jobs: list[str]


@dataclass(frozen=True)
class HostedSet:
    """A set that hosts have.

    Attributes:
        source: where the set came from, if this user has pinned it; else "".
        hosts: the hosts that have the set, each with the jobs that use it there.
        used_s: the last use on any of these hosts, by the host's clock, in seconds since the epoch.
        waiting: jobs of this head that need the set and have not ended.
    """

    digest: str
    bytes: int
    files: int
    source: str
    hosts: Mapping[str, Sequence[str]]
    used_s: float
    waiting: Sequence[str]

    @property
    def all_jobs(self) -> list[str]:
        """Return all jobs that need the set."""
        return sorted({*self.waiting, *(job for jobs in self.hosts.values() for job in jobs)})

    def as_json(self) -> DataSetShape:
        """Return the set as ``gpurun data list --json`` shows it."""
        return {
            "digest": self.digest, "bytes": self.bytes, "files": self.files, "source": self.source,
            "hosts": sorted(self.hosts), "used_s": self.used_s, "jobs": self.all_jobs,
        }  # fmt: skip


@dataclass(frozen=True)
class Evicted:
    """The result of a removal.

    Attributes:
        evicted: digest → the hosts that no longer have the set.
        kept: digest → host → why the set stays there.
    """

    evicted: Mapping[str, Sequence[str]]
    kept: Mapping[str, Mapping[str, str]]
    failed: Mapping[str, GpurunError]


def census(
    fleet: Fleet, hosts: Sequence[str], waiting: Mapping[str, Sequence[str]]
) -> tuple[list[HostedSet], Mapping[str, GpurunError]]:
    """Return all sets on these hosts, by digest, and the hosts that failed. The hosts' answers replace earlier
    knowledge.

    Args:
        waiting: digest → jobs of this head that need the set.
    """
    listed = fleet.map(_sets_of, hosts)
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, sets in listed.ok.items():
        for one in sets:
            found.setdefault(one["digest"], {})[host] = one
    heard = {digest: found.get(digest, {}) for digest in found.keys() | caches.known().keys()}
    caches.note_all({digest: (has, listed.ok.keys() - has.keys()) for digest, has in heard.items()})
    known = caches.known()
    made = [
        HostedSet(
            digest, max(one["bytes"] for one in by_host.values()), max(one["files"] for one in by_host.values()),
            known[digest].source if digest in known else "", {host: one["jobs"] for host, one in by_host.items()},
            max(one["used_s"] for one in by_host.values()), waiting.get(digest, ()),
        )
        for digest, by_host in sorted(found.items())
    ]  # fmt: skip
    return made, listed.failed


def _sets_of(agent: Agent) -> Sequence[Mapping[str, Any]]:
    sets: Sequence[Mapping[str, Any]] = agent.call("data.list", timeout_s=600.0).value["sets"]
    if len({one["digest"] for one in sets}) != len(sets):
        raise bad_answer(agent.host, "the host's answer to data.list names a data set twice")
    return sets


def evict(fleet: Fleet, hosts: Sequence[str], digests: Sequence[str]) -> Evicted:
    """Remove sets from each host that has them, unless a job uses them there."""

    def remove(agent: Agent) -> Mapping[str, str]:
        kept: Mapping[str, str] = agent.call("data.evict", digests=list(digests), timeout_s=600.0).value
        if not kept.keys() <= set(digests):
            raise bad_answer(agent.host, "the host's answer to data.evict names a data set that gpurun did not ask for")
        return kept

    done = fleet.map(remove, hosts)
    had = {digest: caches.hosts_of(digest) for digest in digests}
    gone = {digest: [host for host, kept in done.ok.items() if digest not in kept] for digest in digests}
    for digest, names in gone.items():
        caches.note_sites(digest, lacks=names)
    return Evicted(
        {digest: [host for host in names if host in had[digest]] for digest, names in gone.items()},
        {
            digest: by
            for digest in digests
            if (by := {h: kept[digest] for h, kept in done.ok.items() if digest in kept})
        },
        done.failed,
    )

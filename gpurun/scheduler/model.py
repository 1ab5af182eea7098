"""What the scheduler reads and what it answers, as frozen values.

Everything under `gpurun.scheduler` is pure: a `Snapshot` goes in, `Decisions` come out. No clock, no file, no
randomness; times are seconds on whatever clock the caller uses, all on the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.record import JobRecord, Kept
from gpurun.jobs.spec import FENCE_S, PREPARE_S, Grant, JobSpec, Placement, Wants, limit_ends_s

ENDLESS = float("inf")
"""An unknown time."""

ANYTHING = Wants()
"""GPUs, whichever they are."""


class Gang(msgspec.Struct, frozen=True, gc=False):
    """A request for GPUs, all of them or none. Not a dataclass, because a pass makes ten thousand of them.

    Attributes:
        id: the job's id.
        gpus: how many GPUs; granted in full, unless it is elastic.
        submitted_s: when it was first submitted. A requeued gang keeps it, so it stands before its peers.
        wants: what its job's spec says. Elastic: where `gpus` do not fit, it starts with the most that do.
        start_allowance_s: estimated seconds from the grant to RUNNING.
        stop_allowance_s: estimated seconds from the end of RUNNING until its GPUs are free: grace, then the fence.
        attempts: starts so far.
        requeued: it was preempted or lost a host: it stands in front of its peers of the same priority.
        avoid: hosts it failed on before, the last one last. Left out as far as the rest of the inventory could hold the
            gang; the first ones are used again first.
        kept: the GPUs kept for it until it starts. The caller stores `Decisions.kept` and hands it back here.
        near: hosts that have its data: preferred where nothing else tells two placements apart.
    """

    id: str
    gpus: int
    submitted_s: float = 0.0
    wants: Wants = ANYTHING
    start_allowance_s: float = 0.0
    stop_allowance_s: float = 0.0
    attempts: int = 0
    requeued: bool = False
    avoid: tuple[str, ...] = ()
    kept: Kept | None = None
    near: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """The size of an elastic gang is a multiple of this."""
        return self.wants.constraints.gpus_per_host or 1

    @property
    def least(self) -> int:
        """The fewest GPUs it starts with: what it needs, and all that is reserved or kept for it."""
        min_gpus = self.wants.min_gpus
        return self.gpus if min_gpus is None else -(-min_gpus // self.step) * self.step

    @property
    def smallest(self) -> Gang:
        """The gang with the fewest GPUs it can start with."""
        return self.sized(self.least)

    @property
    def near_until_s(self) -> float:
        """Until when it waits for one rack or host rather than start on more; -inf if it never does."""
        asked = self.wants.constraints
        waits = asked.locality_wait_s > 0 and asked.prefer != "any" and asked.locality == "any"
        return self.submitted_s + asked.locality_wait_s if waits else -ENDLESS

    @property
    def longest_s(self) -> float:
        """How long it is expected to hold its GPUs at most if it is granted now; ENDLESS without a time limit."""
        limit_s = self.wants.time_limit_s
        return ENDLESS if limit_s is None else self.start_allowance_s + limit_s + self.stop_allowance_s

    @property
    def age(self) -> tuple[float, str]:
        """Smaller is older."""
        return (self.submitted_s, self.id)

    @property
    def rank(self) -> tuple[int, bool, float, str]:
        """Its place among the gangs of its pool; smaller goes first."""
        return (-self.wants.priority, not self.requeued, self.submitted_s, self.id)

    def but(self, **changes: Any) -> Gang:
        """The gang with some attributes changed."""
        return msgspec.structs.replace(self, **changes)

    def wanting(self, **changes: Any) -> Gang:
        """The gang with some attributes of what it wants changed."""
        return self.but(wants=replace(self.wants, **changes))

    def sized(self, gpus: int) -> Gang:
        """The gang with another number of GPUs."""
        return self if gpus == self.gpus else self.but(gpus=gpus)


def by_rank(gangs: Iterable[Gang]) -> list[Gang]:
    """Gangs sorted by `Gang.rank`; ten thousand of them without a rank for each."""
    groups: dict[tuple[int, bool], list[Gang]] = {}
    for gang in sorted(gangs, key=attrgetter("submitted_s", "id")):
        groups.setdefault((-gang.wants.priority, not gang.requeued), []).append(gang)
    return [gang for group in sorted(groups) for gang in groups[group]]


@dataclass(frozen=True)
class Running:
    """A gang that holds GPUs, from its lease until every host is fenced.

    Attributes:
        granted_s: when it was granted.
        running_s: when it entered RUNNING, from which its time limit counts; None = it has not yet.
        checkpoint_s: when it last saved its work; None = never, so all since the grant would be lost.
        stopping: it has been told to stop (preempted, cancelled, ended); its GPUs become free by themselves.
        told_s: when it was told to stop; None = unknown, so its grace counts from now.
    """

    gang: Gang
    placement: Placement
    granted_s: float
    running_s: float | None = None
    checkpoint_s: float | None = None
    stopping: bool = False
    told_s: float | None = None

    def free_s(self, now_s: float) -> float:
        """When its GPUs are expected to be free if it uses its whole time limit; ENDLESS if it has none.

        Before RUNNING the start is an estimate. The end of the grace and of the fence always is.
        """
        gang = self.gang
        if self.stopping:
            told_s = now_s if self.told_s is None else min(self.told_s, now_s)  # the clock may have been set back
            return max(now_s, told_s + gang.stop_allowance_s)
        running_s = max(now_s, self.granted_s + gang.start_allowance_s) if self.running_s is None else self.running_s
        ends_s = limit_ends_s(running_s, gang.wants.time_limit_s)
        return ENDLESS if ends_s is None else max(now_s, ends_s + gang.stop_allowance_s)


@dataclass(frozen=True)
class Snapshot:
    """All that one pass knows.

    Attributes:
        running: every lease of ours, also those that are stopping or whose host is out of reach.
        queue: every gang that waits, in any order.
        unusable: host → why nothing new may start there (``cordoned: fan``, ``lost``).
        taken: host → GPUs that are neither ours nor free (an unreadable lease, a foreign process).
        now_s: the time of the pass.
    """

    inventory: Inventory
    running: tuple[Running, ...] = ()
    queue: tuple[Gang, ...] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    now_s: float = 0.0


class Reason(str, Enum):
    """Why a gang does not run."""

    IMPOSSIBLE = "impossible"  # the inventory could never hold it
    NO_ROOM = "no room"  # it does not fit into what is free
    HOSTS = "hosts"  # it would not fit if every GPU of the usable hosts were free
    RESERVED = "reserved"  # it would delay the expected start of the first blocked gang
    POOL = "pool"  # its pool has used what it may use
    LOCALITY = "locality"  # it would fit, but over more racks or hosts than it prefers
    KEPT = "kept"  # GPUs are kept for it and become free one after the other


@dataclass(frozen=True)
class HostGroup:
    """Hosts that are alike for one gang: all of them fail it, or all could serve it, for the same reason.

    Attributes:
        why: what keeps the gang off these hosts, or what it finds there; one phrase.
        free: GPUs of the group that are free now.
        largest_host: most GPUs free on one of its hosts.
        largest_rack: most GPUs free on its hosts of one rack.
    """

    why: str
    hosts: tuple[str, ...]
    gpus: int
    free: int = 0
    largest_host: int = 0
    largest_rack: int = 0


@dataclass(frozen=True)
class Refusal:
    """No placement, and why.

    Attributes:
        never: the inventory could never hold this gang, even empty and with every host usable (exit 3).
        message: one sentence.
        groups: the hosts, grouped by what is wrong with them for this gang.
    """

    never: bool
    reason: Reason
    message: str
    groups: tuple[HostGroup, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Why one gang of the queue was not started by a pass. Gangs that wait for the same reason may share one object.

    Attributes:
        behind: the gang in the way (RESERVED), or the pool (POOL).
        expected_start_s: when it starts if every running gang uses its whole time limit; None = unknown.
        until_s: time alone changes the decision then (LOCALITY, a minimum run time).
        refusal: the placement's answer, where the gang was tried.
        starts_before: how many of `Decisions.starts` came before it was looked at: the state it met.
    """

    reason: Reason
    message: str
    behind: str | None = None
    expected_start_s: float | None = None
    until_s: float | None = None
    refusal: Refusal | None = None
    starts_before: int = 0


@dataclass(frozen=True)
class Preemption:
    """Stop `victim` (SIGTERM, grace, the ladder) and requeue it; `taker` gets its GPUs."""

    victim: str
    taker: str
    message: str


@dataclass(frozen=True)
class Decisions:
    """One pass's answer. Commit all of it or none of it.

    Attributes:
        starts: gangs to start now, in the order decided; an elastic one with the `gpus` that it got.
        preempts: gangs to stop now.
        kept: queued gang → the GPUs kept for it. Store them and hand them back as `Gang.kept`; for a gang that is
            not in here nothing is kept.
        reserved: the first gang that waits for room → the GPUs it is expected to start on; kept for this pass only,
            from gangs that could outlast its expected start. Empty if that start is unknown.
        waits: every queued gang that neither starts nor is refused.
        entitlements: pool → GPUs it may use now, as this pass divided them; empty where there are no pools.
        never: queued gangs that the inventory could never hold.
        order: ids of the queue in the order of the pass.
        wake_s: the earliest time at which time alone would change a decision; None = only an event would.
    """

    starts: tuple[tuple[Gang, Placement], ...] = ()
    preempts: tuple[Preemption, ...] = ()
    kept: Mapping[str, Kept] = field(default_factory=dict)
    reserved: Mapping[str, Placement] = field(default_factory=dict)
    waits: Mapping[str, Wait] = field(default_factory=dict)
    never: Mapping[str, Refusal] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    entitlements: Mapping[str, float] = field(default_factory=dict)
    wake_s: float | None = None


# The few numbers of a pass.


HOUR_S = 3600.0


@dataclass(frozen=True)
class Policy:
    """What a pass may do for a gang that does not fit.

    Attributes:
        patience_s: the dial between a short average wait (large) and a short wait of large gangs (small). A gang
            that needs half of the cluster or more, or fits on one host, is overtaken for this long before hosts
            are kept for it; one that needs the share s of the cluster for ``patience_s · (2s)⁴``, since keeping
            hosts for it costs the others so much less. docs/scheduler-evidence.md says what was measured.
        min_run_s: how long a gang runs before it may be preempted.
    """

    name: str = "default"
    patience_s: float = 240 * HOUR_S
    min_run_s: float = 0.25 * HOUR_S


DEFAULT = Policy()
"""What `gpurun submit` uses."""


# Jobs as the scheduler sees them: one place that turns what a job wants and its record into a gang.


def new_gang(spec: JobSpec, *, job: str, submitted_s: float) -> Gang:
    """The gang of a job that has never been started."""
    return Gang(job, spec.gpus, submitted_s, spec.wants, PREPARE_S, spec.grace_s + FENCE_S)


Holders = Mapping[str, frozenset[str]]
"""Digest of a data set → the hosts that have it, as far as is known."""
NOBODY: Holders = MappingProxyType({})
NOWHERE: frozenset[str] = frozenset()


def gang_of(record: JobRecord, wants: Wants, holders: Holders = NOBODY) -> Gang:
    """The gang of a job, as its record stands."""
    return next(gangs_of([(record, wants)], holders))


def gangs_of(jobs: Iterable[tuple[JobRecord, Wants]], holders: Holders = NOBODY) -> Iterator[Gang]:
    """The gangs of many jobs, as their records stand."""
    for record, whole in jobs:
        gpus, wants = (1, whole.for_one) if record.rehearsal else (record.gpus, whole)
        # By position, in the order of `Gang`: a pass makes ten thousand of them.
        yield Gang(
            record.id, gpus, record.submitted_s, wants, PREPARE_S, wants.grace_s + FENCE_S, record.attempt,
            record.attempt > 0, record.avoid, record.kept, _near(wants, holders) if wants.data else NOWHERE,
        )  # fmt: skip


def _near(wants: Wants, holders: Holders) -> frozenset[str]:
    """The hosts that have all data sets of a job."""
    found = [holders.get(digest, NOWHERE) for digest in wants.data_digests]
    return frozenset.intersection(*found) if found else NOWHERE


# Hosts without GPUs that run gangs' servers. Gangs share these hosts; a lease only names them.


def refuse(gang: Gang, snapshot: Snapshot) -> Refusal | None:
    """Why the servers of a gang have no host; None if they have one."""
    inventory = snapshot.inventory
    number, hosts = gang.wants.servers
    if not number:
        return None
    for name in (name for name in hosts if "=" not in name):
        host = inventory.by_name.get(name)
        if host is None:
            return Refusal(True, Reason.IMPOSSIBLE, f"the host {name!r} for parameter servers is not in the inventory")
        if host.gpus:
            return Refusal(True, Reason.IMPOSSIBLE, f"the host {name!r} for parameter servers has GPUs")
    able, asked = _able(hosts, snapshot), " or ".join(hosts)
    if not able:
        return Refusal(True, Reason.IMPOSSIBLE, f"no host without GPUs has the label {asked} for parameter servers")
    why = sorted({snapshot.unusable[host.name] for host in able if host.name in snapshot.unusable})
    if all(host.name in snapshot.unusable for host in able):
        words = f"parameter servers need a host without GPUs ({asked}), and none can be used: {', '.join(why)}"
        return Refusal(False, Reason.HOSTS, words)
    return None


def with_servers(gang: Gang, placement: Placement, snapshot: Snapshot, running: Iterable[Running]) -> Placement:
    """A placement of a gang's GPUs, and behind them the hosts of its servers, if it has some there.

    Hosts it failed on come last; before them those that carry fewest gangs' servers, in a rack of the gang if there is
    one, in the inventory's order.

    Args:
        running: all gangs that hold GPUs.
    """
    number, hosts = gang.wants.servers
    if not number:
        return placement
    busy = Counter(grant.host for run in running for grant in run.placement.grants if not grant.gpus)
    able = [host for host in _able(hosts, snapshot) if host.name not in snapshot.unusable]
    able.sort(key=lambda host: (host.name in gang.avoid, busy[host.name], host.rack not in placement.racks))
    chosen = tuple(Grant(host.name, ()) for host in able[:number])
    return replace(placement, grants=(*placement.grants, *chosen))


def _able(asked: tuple[str, ...], snapshot: Snapshot) -> list[Host]:
    return [host for host in snapshot.inventory.hosts if not host.gpus and _is_asked(host, asked)]


def _is_asked(host: Host, asked: tuple[str, ...]) -> bool:
    return host.name in asked or any(f"{key}={value}" in asked for key, value in host.labels.items())

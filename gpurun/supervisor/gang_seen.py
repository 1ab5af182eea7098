"""Everything that is known about a running gang at one moment. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpurun.jobs.record import CancelRequest, FirstFailure
from gpurun.jobs.spec import Grant, Roles
from gpurun.launch.launchers.direct import UNTOLD
from gpurun.launch.seats import RankSeat, seats_of
from gpurun.supervisor.causes import Cause
from gpurun.supervisor.exit_codes import code_words
from gpurun.supervisor.ranks import BROKEN_OFF, TOGETHER_S, Rank, hosts_that_are_done

NO_TOOLS = "the host's disk is full, or no folder in PATH has mkdir and mkfifo"
"""Why a rank's script may have no words about its end."""


@dataclass(frozen=True)
class ContainerEnd:
    """How the job's container on a host ended.

    Attributes:
        seen_s: when the supervisor learned it, on the head's monotonic clock.
        code: its exit code, if known.
        engine_out: the engine's last error, if the engine stopped answering and ended the container.
        ended_ago_s: how long before `seen_s` it ended, by its host's clock.
        memory_bytes: the limit of its memory, if it had one.
        unwritable: why nothing can be written to the job's folder on its host, if so.
    """

    seen_s: float
    code: int | None = None
    is_oom: bool = False
    is_removed: bool = False
    engine_out: str = ""
    ended_ago_s: float | None = None
    memory_bytes: int | None = None
    unwritable: str = ""

    @property
    def is_own_memory(self) -> bool:
        """Return whether it ran out of its own memory, not of its host's."""
        return self.is_oom and bool(self.memory_bytes)

    @property
    def at_s(self) -> float:
        """Return when it ended, as far as that is known."""
        return self.seen_s - (self.ended_ago_s or 0.0)

    @property
    def was_ended(self) -> bool:
        """Return whether something outside is known to have ended it. Its exit code then means nothing."""
        return bool(self.engine_out) or self.is_removed or self.is_oom

    @property
    def was_killed(self) -> bool:
        """Return whether it certainly did not end by itself."""
        return self.was_ended or self.code in (None, *BROKEN_OFF)

    def failure(self, host: str) -> FirstFailure:
        """Return its end as the reason for the gang's end."""
        kind = "engine" if self.engine_out else "oom" if self.is_oom else "container"
        return FirstFailure(reason=self._reason, host=host, exit_code=self.code, kind=kind, evidence=self.engine_out)

    @property
    def _reason(self) -> str:
        if self.engine_out:
            return "the host's Docker engine has stopped, and has stopped the job's container"
        if self.is_removed:
            return "somebody removed the job's container"
        if self.is_own_memory:
            had_mib = (self.memory_bytes or 0) >> 20
            more = f"ask for more memory with --memory {2 * had_mib}MiB"
            return (
                f"out of memory: the job had {had_mib} MiB on this host and used all, so the kernel killed "
                f"the job; {more}"
            )
        if self.is_oom:
            return "the job's container ran out of memory and was killed"
        if self.code == UNTOLD:
            why = self.unwritable or NO_TOOLS
            return f"a rank ended, but could not report its exit code: {why}"
        return "the job's container ended" + (f" with {code_words(self.code)}" if self.code is not None else "")


@dataclass(frozen=True)
class GangSeen:
    """Everything that is known about a running gang at one moment. Times are on the head's monotonic clock.

    Attributes:
        members: the hosts on which ranks should run, in rank order, the launcher's first.
        roles: the roles of the ranks; None if they are all alike, one for each GPU.
        one_per_host: the ranks are one for each host.
        least: how many ranks an elastic gang needs; None for any other gang.
        has_launcher: a process on the first host starts the ranks and ends after them; otherwise gpurun has started
            them.
        drained: hosts of an elastic gang that a person drains.
        exits: containers that have ended, by host, as Docker reported.
        heard_since_s: since when this supervisor has continuously heard some host of the gang or another. Hosts
            reported earlier events one after the other.
        cut_off_s: when the head last heard no host, if ever.
        down_since: unreachable hosts, and since when the supervisor has not heard them.
        returned_s: when an unreachable host was last heard again: it may have more to report.
        mute_since: hosts that have not even accepted a connection of this supervisor, and since when it tries.
        others_answer: whether hosts outside the gang can be reached; None = not tried.
        has_launchers_log: the launcher's output is completely on the head.
        launcher_line_s: when the last of it arrived.
        limit_s: the time limit, if the gang has run for longer.
        hung: why the gang counts as hung.
        rehearsed: why a rehearsal has been long enough; "" if it has not, or if this is no rehearsal.
    """

    now_s: float
    members: Sequence[Grant]
    least: int | None = None
    has_launcher: bool = True
    heard_since_s: float = 0.0
    cut_off_s: float = -math.inf
    drained: Sequence[str] = ()
    ranks: Sequence[Rank] = ()
    exits: Mapping[str, ContainerEnd] = field(default_factory=dict)
    down_since: Mapping[str, float] = field(default_factory=dict)
    returned_s: float = -math.inf
    mute_since: Mapping[str, float] = field(default_factory=dict)
    others_answer: bool | None = None
    fatal: Cause | None = None
    has_launchers_log: bool = False
    launcher_line_s: float = 0.0
    request: CancelRequest | None = None
    limit_s: float | None = None
    hung: str | None = None
    rehearsed: str = ""
    roles: Roles | None = None
    one_per_host: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts on which ranks should run."""
        return tuple(grant.host for grant in self.members)

    @property
    def first(self) -> str:
        """Return the host of rank 0, and of the launcher if there is one."""
        return self.members[0].host

    @property
    def launcher(self) -> ContainerEnd | None:
        """Return how the launcher's container ended; None if it has not, or there is no launcher."""
        return self.exits.get(self.first) if self.has_launcher else None

    def is_launchers(self, host: str) -> bool:
        """Return whether the container on a host is the launcher's, which ends by itself."""
        return self.has_launcher and host == self.first

    @property
    def world(self) -> int:
        """Return the expected number of ranks."""
        return len(self.seats)

    @cached_property
    def seats(self) -> tuple[RankSeat, ...]:
        """Return the expected ranks, by number."""
        return seats_of(self.members, self.roles, one_per_host=self.one_per_host)

    @property
    def awaited(self) -> frozenset[int]:
        """Return the ranks that must return 0 for success."""
        return frozenset(seat.rank for seat in self.seats if seat.is_awaited)

    @property
    def have_all_ended(self) -> bool:
        """Return whether every expected rank has reported its end."""
        return {seat.rank for seat in self.seats} <= {rank.rank for rank in self.ranks if rank.ended_s is not None}

    @cached_property
    def finished(self) -> frozenset[str]:
        """Return the hosts whose containers no longer matter: all their ranks have returned 0. None once the launcher
        has ended, which may have missed such a container.
        """
        return frozenset(hosts_that_are_done(self.ranks)) if self.launcher is None else frozenset()

    def title_of(self, rank: int | None) -> str:
        """Return a rank's name in messages for people."""
        if rank is None:
            return "a rank"
        return self.seats[rank].title if rank < len(self.seats) else f"rank {rank}"

    def fell_with_others(self, failed: Rank) -> bool:
        """Return whether something else may be the cause: the rank was killed, or a container ended before it.

        Includes a worker's container that ended together with the rank, because no rank and no launcher ends it.
        """
        return failed.was_broken_off or any(
            end.at_s <= (failed.ended_s or 0.0) + (-TOGETHER_S if self.is_launchers(host) else TOGETHER_S)
            for host, end in self.ends.items()
            if host not in self.finished and (not self.is_launchers(host) or end.was_killed)
        )

    @property
    def ends(self) -> Mapping[str, ContainerEnd]:
        """Return containers that have ended, by host: Docker reported their end, or all their processes are gone.

        Docker may report an end much later than the launcher, and without its time. Then the end of the container's
        ranks gives the time.
        """
        ends = {rank.host: ContainerEnd(rank.ended_s or 0.0) for rank in self.ranks if rank.with_container}
        for host, end in self.exits.items():
            is_late = end.ended_ago_s is None and host in ends and ends[host].seen_s < end.seen_s
            ends[host] = replace(end, ended_ago_s=end.seen_s - ends[host].seen_s) if is_late else end
        return ends

    def of_members(self) -> GangSeen:
        """Return the same without hosts that have left."""
        return replace(
            self,
            ranks=[rank for rank in self.ranks if rank.host in self.hosts],
            exits={host: end for host, end in self.exits.items() if host in self.hosts},
            down_since={host: since_s for host, since_s in self.down_since.items() if host in self.hosts},
            drained=[host for host in self.drained if host in self.hosts],
            fatal=self.fatal if self.fatal and self.fatal.host in self.hosts else None,
        )

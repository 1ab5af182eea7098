"""The log of a simulated attempt, as far as its supervisor has it."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gang_ranks import Rank

from gpurun.supervisor.verdict import ends

if TYPE_CHECKING:
    from gang_head import Head


class LogCopy:
    """Stands for `gpurun.supervisor.log_copy.LogCopy`, and for `gpurun.supervisor.ranks.RankReports`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._ranks: dict[tuple[str, str], ends.Rank] = {}
        self._asked_s: dict[tuple[str, int], float] = {}
        self._has_launcher = False
        self._line_s = self.launcher_line_s = head.world.now_s

    @property
    def all(self) -> tuple[ends.Rank, ...]:
        return tuple(self._ranks.values())

    @property
    def has_launchers_log(self) -> bool:
        return self._has_launcher

    @property
    def last_line_s(self) -> float:
        self.hear_lines()
        return self._line_s

    def hear_lines(self) -> None:
        """Ranks that train print all the time."""
        head = self._head
        running = [rank.host for rank in head.world.ranks if rank.ended_s is None and not rank.is_stalled]
        if any(head.links.of(host).state == "up" for host in running):
            self._line_s = head.world.now_s

    @property
    def lines(self) -> list[Any]:
        return [SimpleNamespace(line=line) for line in self._head.world.launcher_lines if self._has_launcher]

    def launcher_done(self) -> None:
        if not self._has_launcher:
            self._has_launcher = True
            self._line_s = self.launcher_line_s = self._head.world.now_s
            self._head.world.change()

    def take(self, host: str, kind: str, rank: Rank, sent_s: float) -> None:
        """An event of ``ranks.follow``, through the real `told`."""
        if not self._head.world.plan.tells:
            return
        event: dict[str, object] = {"id": f"{rank.number}.7.{self._head.lease.attempt}", "rank": rank.number}
        if kind == "start":
            event |= {"kind": "start", "age_s": sent_s - self._head.world.began_s}
            self._asked_s[host, rank.number] = sent_s
        else:
            assert rank.ended_s is not None
            # What was killed together with its script has no time: it counts from when the agent misses it.
            age_s = 0.0 if rank.is_cut_off else sent_s - rank.ended_s
            event |= {"kind": "end", "age_s": age_s, "code": rank.code, "killed": rank.is_cut_off}
            # An agent that has not seen it run does not know what it went with.
            has_seen_it = self._asked_s.get((host, rank.number), sent_s) < rank.ended_s
            box_s = self._head.world.hosts[host].box.ended_s
            event["container"] = box_s is not None and box_s <= sent_s and has_seen_it
        if known := ends.rank_in_event(self._ranks, host, event, self._head.world.now_s):
            self._ranks[host, known.id] = known

    def take_rest(self, hosts: Collection[str], most_s: float) -> None:
        self._head.world.sleep(0.1)

    def wait_for_launcher(self, silent_s: float) -> bool:
        """The launcher's container was killed, or has ended before."""
        if self._head.world.launcher_lives:
            self._head.world.sleep(silent_s)
        return not self._head.world.launcher_lives

    def close(self) -> None:
        """Nothing is open."""

    def forget(self, hosts: Collection[str]) -> None:
        self._ranks = {key: rank for key, rank in self._ranks.items() if key[0] not in hosts}

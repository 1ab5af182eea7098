"""Follows a cluster from pass to pass: what must never happen over time; `never` looks at one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from never import Broken, Seen, Taken, check_pass, check_words, gpus_of, has_servers

from gpurun.jobs.record import Kept
from gpurun.scheduler.model import Decisions, Gang, Policy, Reason, Snapshot


def _holders(seen: Seen, kept: Kept | None) -> set[str]:
    """The running gangs that use what is kept."""
    mine = set() if kept is None else gpus_of([kept.placement])
    return {run.gang.id for run in seen.running if mine & gpus_of([run.placement])}


@dataclass
class Turn:
    """The oldest gang whose patience is over, since when it is, and whom it may wait for.

    Attributes:
        blockers: gangs that ran then, those for which gangs had been stopped, and those that used what was kept for it
            because their time limits ended before it was expected to start.
        given_up: endless gangs of other pools beside which nothing is kept for it any more: from then on it waits for
            the gangs on other hosts.
        expected_s: when it was last expected to start.
        soonest_s: the soonest that it was expected to start.
    """

    gang: str
    blockers: set[str]
    waits_for_pool: bool
    given_up: set[str]
    expected_s: float | None = None
    soonest_s: float = math.inf


@dataclass
class Watch:
    """Follows one history.

    Attributes:
        turn: of the gang that may have waited for too long.
        promised: GPUs for which gangs were stopped.
        held: for whom the last pass kept GPUs, and why.
    """

    policy: Policy
    turn: Turn | None = None
    usable: object = None
    promised: dict[str, Kept] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    speaks_every: int = 7
    _passes: int = 0

    def passed(self, snapshot: Snapshot, taken: Taken, decisions: Decisions) -> None:
        """Raises Broken if this pass broke a promise, or one that an earlier pass made."""
        seen = Seen(snapshot, taken, decisions, self.policy)
        check_pass(seen)
        self._no_kill_in_vain(seen)
        self._nobody_starves(seen)
        self.held = {name: kept.why for name, kept in decisions.kept.items()}
        self._passes += 1
        if self._passes % self.speaks_every == 0:
            check_words(seen)

    def end(self, snapshot: Snapshot, taken: Taken, decisions: Decisions) -> None:
        """Raises Broken if a gang waits for ever for nothing, now that nothing happens any more."""
        seen = Seen(snapshot, taken, decisions, self.policy)
        check_pass(seen, all_waiting=True)
        if not seen.running:
            for gang in seen.waiting:
                if seen.starts_alone(gang):
                    raise Broken(f"stuck: nothing runs, nothing will happen, and {gang.id} waits")

    def clock_was_set(self, by_s: float) -> None:
        """What counted by the clock counts anew."""
        self.turn = None

    def _no_kill_in_vain(self, seen: Seen) -> None:
        queue = {gang.id: gang for gang in seen.snapshot.queue}
        found = seen.decisions
        for taker in [name for name in self.promised if name not in queue]:
            del self.promised[taker]  # it starts no more, or no pass may start it
        for taker, kept in list(self.promised.items()):
            if taker in found.kept and found.kept[taker].why == "preemption":
                continue
            del self.promised[taker]
            hosts_left = set(kept.placement.hosts) & set(seen.snapshot.unusable) or not has_servers(seen, queue[taker])
            if taker in found.waits and not hosts_left and not set(seen.snapshot.taken) & set(kept.placement.hosts):
                raise Broken(f"gangs were stopped for {taker}, and it declines their GPUs")
        for preemption in found.preempts:
            self.promised[preemption.taker] = found.kept[preemption.taker]

    def _nobody_starves(self, seen: Seen) -> None:
        """The oldest gang whose patience is over waits for no gang that has started since."""
        gang = self._oldest(seen)
        usable = (seen.snapshot.unusable, seen.taken)
        if gang is None:
            self.turn = None
            return
        waits_for_pool = seen.decisions.waits[gang.id].reason is Reason.POOL
        now, running = self.turn, {run.gang.id for run in seen.snapshot.running}
        had = {name: why for name, why in self.held.items() if name != gang.id}
        has = {name: kept.why for name, kept in seen.decisions.kept.items() if name != gang.id}
        runs = (*seen.snapshot.running, *seen.running)  # also those that this pass stops: it gave them up before
        given_up = {run.gang.id for run in runs if seen.blocks_for_good(run, gang)}
        if (
            now is None or now.gang != gang.id or usable != self.usable or given_up - now.given_up
            or (now.waits_for_pool and not waits_for_pool)
        ):  # fmt: skip
            self.turn = Turn(gang.id, {run.gang.id for run in seen.running} | {*has}, waits_for_pool, given_up)
        elif any(had[name] == "patience" for name in now.blockers & {*had}):
            # hosts were kept for a younger one when its turn began, so none could be kept for it until now
            now.blockers |= {run.gang.id for run in seen.running} | {*has}
        else:
            now.blockers &= {*running, *had, *has}
            ends = {started.id: seen.now_s + started.longest_s for started, _ in seen.decisions.starts}
            known_s = max(now.expected_s or 0.0, seen.decisions.waits[gang.id].expected_start_s or 0.0)
            now.blockers.update(job for job, end_s in ends.items() if end_s <= known_s)
            now.blockers.update(started.id for started, _ in seen.decisions.starts if started.age < gang.age)
            now.blockers.update(name for name, why in has.items() if why == "preemption")
            if (seen.decisions.waits[gang.id].expected_start_s or math.inf) < now.soonest_s:
                # hosts that will be free sooner are kept for it; this happens for ever sooner times only
                now.blockers.update(_holders(seen, seen.decisions.kept.get(gang.id)))
            if not now.blockers:
                raise Broken(f"starved: {gang.id} waits for gangs that started after its patience was over")
        self.usable = usable
        if self.turn is not None:
            self.turn.expected_s = expected_s = seen.decisions.waits[gang.id].expected_start_s
            self.turn.soonest_s = min(self.turn.soonest_s, math.inf if expected_s is None else expected_s)

    def _oldest(self, seen: Seen) -> Gang | None:
        """The oldest gang that waits though its patience is over, and that could run though some gangs never end.

        None while it waits for GPUs that others than gangs hold: nothing that a pass does would help it.
        """
        overdue = (gang for gang in seen.waiting if seen.overdue_s(gang) <= seen.now_s)
        for gang in sorted(overdue, key=lambda gang: (gang.submitted_s, gang.id)):
            if seen.could_start_if_others_ended(gang):
                return gang if seen.could_start_if_others_ended(gang, taken=seen.taken) else None
        return None

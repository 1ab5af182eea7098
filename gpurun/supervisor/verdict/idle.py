"""Count what the ranks of an attempt do, and how long its GPUs are idle; decide when a pool's idle rules apply. Pure.

All of it is seconds that were seen, not moments: a new supervisor continues the count, and time that no host reported
is no idle time. What a host says may be anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gpurun.inventory.model import IdleAction, Pool
from gpurun.jobs.record import Activity, FirstFailure, Restart, State
from gpurun.quantities import duration
from gpurun.supervisor.verdict.ends import End

BUSY_PERCENT = 5
"""A GPU that is less busy in each second is idle."""
FRESH_S = 90.0
"""A host reports each half minute. A GPU without a report for so long may be busy."""
GAP_S = 300.0
"""A longer time without reports, such as without a supervisor, ends a row: nobody knows what the GPUs did."""
MOST_GAPS = 1000
"""With more gaps in a row, all of them and what lies between count as one."""
MOST_SAMPLED_S = 60.0
"""No report is about a longer time."""
SLACK = 1.5
"""A sample of "about one second" may take so much longer."""
LONG_SAVE_S = 30.0
"""A save of so long looks like idle GPUs in a report; it counts as a checkpoint only."""
MOST_STEP = 1 << 62

Gpu = tuple[str, int]
"""A host and the index of its GPU."""


class IdleSpan(NamedTuple):
    """The time in which no report showed a GPU busy, by the head's clock."""

    since_s: float
    until_s: float


class IdleRow:
    """How long all GPUs of a gang have been idle in a row.

    Args:
        before_s: what an earlier supervisor has counted.

    Attributes:
        breaks: how many rows have ended.
    """

    def __init__(self, before_s: float = 0.0) -> None:
        self.breaks = 0
        self._before_s = before_s
        self._rows: dict[Gpu, IdleSpan] = {}
        self._gaps: list[IdleSpan] = []

    def add(self, gpu: Gpu, percent: float | None, sampled_s: float, at_s: float) -> None:
        """Add a host's report about a GPU.

        Args:
            percent: how busy it was in its busiest second; None = the report does not say.
            sampled_s: how long the report is about.
        """
        before = self._rows.get(gpu)
        if percent is None or (before is not None and at_s <= before.until_s):
            return
        if percent >= BUSY_PERCENT:
            self._end()
            self._rows[gpu] = IdleSpan(at_s, at_s)
            return
        sampled_s = min(max(sampled_s, 0.0), MOST_SAMPLED_S)
        if before is None:
            self._rows[gpu] = IdleSpan(at_s - sampled_s, at_s)
            return
        gap_s = max(0.0, at_s - SLACK * sampled_s - before.until_s)
        if gap_s > GAP_S:
            self._end()
            self._rows[gpu] = IdleSpan(at_s - sampled_s, at_s)
        else:
            self._leave_out(IdleSpan(before.until_s, before.until_s + gap_s))
            self._rows[gpu] = IdleSpan(before.since_s, at_s)

    def change(self, before: Set[Gpu], gpus: Set[Gpu]) -> None:
        """Continue with the GPUs of a gang that has changed its size. With a further GPU, a row begins."""
        before_s = self.seconds(before)
        self._rows = {gpu: IdleSpan(row.until_s, row.until_s) for gpu, row in self._rows.items() if gpu in gpus}
        self._gaps = []
        if gpus <= before:
            self._before_s = before_s
        else:
            self._end()

    def _end(self) -> None:
        self.breaks += 1
        self._before_s, self._gaps = 0.0, []

    def _leave_out(self, gap: IdleSpan) -> None:
        """Leave out a time in which a GPU was not reported; once, if several were not."""
        if gap.until_s <= gap.since_s:
            return
        is_full = len(self._gaps) >= MOST_GAPS  # then the row is rather too short
        apart = [one for one in self._gaps if one.until_s < gap.since_s or one.since_s > gap.until_s]
        joined = [gap, *self._gaps] if is_full else [gap, *(one for one in self._gaps if one not in apart)]
        whole = IdleSpan(min(one.since_s for one in joined), max(one.until_s for one in joined))
        self._gaps = [whole] if is_full else [*apart, whole]

    def seconds(self, gpus: Collection[Gpu]) -> float:
        """Return how long all of `gpus` have been idle. A GPU without a report adds nothing, and takes nothing away."""
        rows = [self._rows[gpu] for gpu in gpus if gpu in self._rows]
        if not rows or len(rows) < len(gpus):
            return self._before_s
        since_s, until_s = max(row.since_s for row in rows), min(row.until_s for row in rows)
        gaps_s = sum(max(0.0, min(gap.until_s, until_s) - max(gap.since_s, since_s)) for gap in self._gaps)
        return self._before_s + max(0.0, until_s - since_s - gaps_s)

    def is_fresh(self, gpus: Collection[Gpu], now_s: float) -> bool:
        """Return whether each of `gpus` was reported just now."""
        seen = [self._rows[gpu].until_s for gpu in gpus if gpu in self._rows]
        return 0 < len(gpus) == len(seen) and now_s - min(seen) <= FRESH_S


class RankTold(NamedTuple):
    """What a rank has reported: its last step, its last checkpoint's step, and how long it has saved."""

    step: int | None = None
    saved: int | None = None
    saved_s: float = 0.0


def rank_told(files: Mapping[str, object]) -> RankTold:
    """Return what a rank has reported. Its program wrote the files, so they may hold anything."""
    progress, checkpoint = files.get("progress"), files.get("checkpoint")
    saved_s = checkpoint.get("saved_s") if isinstance(checkpoint, dict) else None
    is_time = isinstance(saved_s, int | float) and 0 <= saved_s < MOST_STEP
    return RankTold(_step(progress), _step(checkpoint), float(saved_s) if is_time and saved_s is not None else 0.0)


def _step(said: object) -> int | None:
    step = said.get("step") if isinstance(said, dict) else None
    return step if type(step) is int and abs(step) < MOST_STEP else None


class ActivityCount:
    """Adds up the activity of one attempt. Not for several threads at once.

    Attributes:
        did: the sum so far.
    """

    def __init__(self, did: Activity, *, away_s: float = 0.0) -> None:
        """Continue a count.

        Args:
            away_s: since when nobody has counted.
        """
        if away_s > GAP_S:
            did = replace(did, row_s=0.0, moved_s=0.0, told_s=None)
        self.did = did
        self._row = IdleRow(did.row_s)
        self._gpus: Set[Gpu] | None = None

    def add_use(self, reports: Mapping[Gpu, tuple[float | None, float]], gpus: Set[Gpu], at_s: float) -> None:
        """Add a host's reports: the percentage and the sampled seconds of each GPU, as in `IdleRow.add`.

        Args:
            gpus: all GPUs of the gang. Reports about others do not count.
        """
        did, breaks = self.did, self._row.breaks
        if self._gpus is not None and gpus != self._gpus:
            self._row.change(self._gpus, gpus)
        self._gpus = frozenset(gpus)
        for gpu in reports.keys() & gpus:
            self._row.add(gpu, *reports[gpu], at_s)
        row_s = self._row.seconds(gpus)
        if self._row.breaks != breaks:
            did = replace(did, row_s=0.0, moved_s=0.0, told_s=None)
        row_s = max(row_s, did.row_s)  # after a gap, hosts report one after the other: what was counted stays
        more_s = 0.0 if self._is_repeating else row_s - did.row_s
        self.did = replace(did, row_s=row_s, idle_s=did.idle_s + more_s)

    def add_ranks(self, ranks: Sequence[RankTold], ran_s: float, *, is_whole: bool = True) -> None:
        """Add what the ranks have reported, after `ran_s` in RUNNING.

        Args:
            is_whole: all hosts have answered. Otherwise the furthest rank may only be missing.
        """
        steps = [rank.step for rank in ranks if rank.step is not None]
        saves = [rank.saved for rank in ranks if rank.saved is not None]
        step, saved = max(steps, default=None), max(saves, default=None)
        did = self.did
        is_further = _is_beyond(step, did.last_step) or _is_beyond(saved, did.last_saved)
        if is_further or (is_whole and (steps or saves) and (step, saved) != (did.last_step, did.last_saved)):
            did = replace(did, last_step=step, last_saved=saved, moved_s=did.row_s, told_s=None)
        if step is not None:
            did = replace(did, step=step if did.step is None else max(step, did.step))
            if did.first_step_s is None:
                did = replace(did, first_step_s=ran_s, idle_s=0.0)
        told_s = max((rank.saved_s for rank in ranks), default=did.saved_told_s)
        if not is_whole:  # the host of the rank that saves may be missing
            told_s = max(told_s, did.saved_told_s)
        save_s = min(max(0.0, told_s - did.saved_told_s), max(0.0, ran_s))
        did = replace(did, saved_told_s=told_s)
        if self._repeats(did):
            did = replace(did, repeated_s=max(did.repeated_s, ran_s - (did.first_step_s or 0.0)))
        elif did.first_step_s is not None:
            hidden_s = min(save_s, did.idle_s) if save_s >= LONG_SAVE_S else 0.0
            did = replace(did, saved_s=did.saved_s + save_s, idle_s=did.idle_s - hidden_s)
        self.did = did

    def tell(self) -> None:
        """Note that the owner has been told."""
        self.did = replace(self.did, told_s=self.did.row_s)

    def is_fresh(self, gpus: Collection[Gpu], now_s: float) -> bool:
        """Return whether all GPUs were reported just now."""
        return self._row.is_fresh(gpus, now_s)

    @property
    def _is_repeating(self) -> bool:
        return self._repeats(self.did)

    @staticmethod
    def _repeats(did: Activity) -> bool:
        """Return whether the ranks have not yet come further than an earlier attempt."""
        return did.first_step_s is not None and did.before is not None and (did.step or 0) <= did.before


def _is_beyond(step: int | None, last: int | None) -> bool:
    return step is not None and (last is None or step > last)


@dataclass(frozen=True)
class IdlePolicy:
    """What happens to a job whose GPUs are idle.

    Attributes:
        timeout_s: after so long in a row, its owner is told.
        grace_s: so much later, the action follows if they are still idle.
        pool: the pool whose rules they are; "" = the job's own.
    """

    timeout_s: float
    grace_s: float
    action: IdleAction
    pool: str = ""

    @classmethod
    def of(cls, rules: Pool, own_s: float | None) -> IdlePolicy | None:
        """Return the policy of a job; None if it has none.

        Args:
            rules: of the job's pool, as `gpurun.inventory.model.idle_rules` finds them.
            own_s: the job's own time. It may be longer than the pool's only if the pool allows that; the pool may have
                changed since the submit.
        """
        times = [time_s for time_s in (rules.idle_timeout_s, own_s) if time_s is not None]
        if not times:
            return None
        timeout_s = own_s if own_s is not None and rules.idle_longer else min(times)
        return cls(timeout_s, rules.idle_grace_s, rules.idle_action, rules.name)

    def step(self, did: Activity) -> Literal["tell", "act"] | None:
        """Return what is due."""
        is_idle = did.row_s - did.moved_s >= self.timeout_s
        if did.told_s is None:
            return "tell" if is_idle else None
        return "act" if is_idle and self.action != "tell" and did.row_s - did.told_s >= self.grace_s else None

    def is_unused(self, did: Activity) -> bool:
        """Return whether ranks report steps, but have used no GPU for as long."""
        return did.row_s >= self.timeout_s > did.row_s - did.moved_s

    def words(self, did: Activity) -> str:
        """Describe what was seen."""
        return (
            f"all GPUs have been less than {BUSY_PERCENT} % busy for {duration(did.row_s - did.moved_s)}, and no rank "
            f"has reported a step or a checkpoint ({self.rule})"
        )

    @property
    def rule(self) -> str:
        """Name the rule."""
        whose = f"pool {self.pool}" if self.pool else "the job"
        return f"`idle_timeout` of {whose}: {duration(self.timeout_s)}"

    def warning(self, did: Activity) -> str:
        """Return what the owner is told before the action."""
        what = {"end": "ends the job", "preempt": "stops the job and queues it again", "tell": ""}[self.action]
        then = f"; gpurun {what} in {duration(self.grace_s)} unless a GPU or a rank works" if what else ""
        return f"{self.words(did)}{then}"

    def end(self, did: Activity, now_s: float) -> End:
        """Return the end of the attempt."""
        if self.action == "preempt":
            reason = f"preempted: the job was idle: {self.words(did)}"
            return End(State.QUEUED, reason, 1, ladder=True, restart=Restart(now_s + PAUSE_S, attempt=0, of=None))
        reason = f"the job was idle: {self.words(did)}"
        return End(State.FAILED, reason, 1, failure=FirstFailure(reason, kind="idle"), ladder=True)


PAUSE_S = 60.0
"""How long a preempted idle job waits: others take its GPUs first, although a preempted job is first in its queue."""


def unused_warning(policy: IdlePolicy, did: Activity) -> str:
    """Return what the owner of a job is told that works without its GPUs."""
    return (
        f"ranks report steps, but all GPUs have been less than {BUSY_PERCENT} % busy for {duration(did.row_s)}: check "
        f"that the program uses its GPUs ({policy.rule})"
    )

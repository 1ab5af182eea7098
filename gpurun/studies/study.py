"""Points and early stops by Optuna. Only this module imports Optuna.

The study is only in memory: a new conductor replays the sweep's journal into it.
"""

from __future__ import annotations

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from gpurun.studies.sweep_plan import Dimension, SweepPlan
from gpurun.studies.trials import JournalEntry, Point, Value


class Study:
    """An Optuna study."""

    def __init__(self, plan: SweepPlan) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._plan = plan
        self._distributions = {name: _distribution(one) for name, one in plan.space.items()}
        self._trials: dict[int, optuna.Trial] = {}
        self._last_step: dict[int, int] = {}
        self._next: tuple[int, dict[str, Value], optuna.Trial] | None = None
        self._study = optuna.create_study(
            direction="minimize" if plan.metric and not plan.metric.more_is_better else "maximize",
            pruner=_pruner(plan),
        )  # fmt: skip

    def draw_point(self, number: int) -> Point:
        """Return the next point, which is drawn anew from the seed and `number`; the same until an entry asks for it.

        So a conductor that follows another one does not draw the same points again.
        """
        if self._next is None or self._next[0] != number:
            self._study.sampler = _sampler(self._plan, number)
            trial = self._study.ask(self._distributions)
            self._next = number, dict(trial.params), trial
        return self._next[1]

    def take(self, entry: JournalEntry) -> bool:
        """Tell the study."""
        if entry.kind == "asked":
            self._trials[entry.trial] = self._known(dict(entry.parameters))
            self._last_step[entry.trial] = -1
            return False
        trial = self._trials.get(entry.trial)
        if trial is None:
            return False
        if entry.kind == "reported":
            if entry.step <= self._last_step[entry.trial]:  # Optuna judges each step once, and refuses those below 0
                return False
            self._last_step[entry.trial] = entry.step
            trial.report(float("nan") if entry.value is None else entry.value, entry.step)
            return trial.should_prune()
        if entry.kind == "ended":
            del self._trials[entry.trial], self._last_step[entry.trial]
            self._end(trial, entry)
        return False

    def _known(self, point: dict[str, Value]) -> optuna.Trial:
        """The trial that was just drawn; one with this point, if it was drawn before."""
        drawn, self._next = self._next, None
        if drawn is not None and drawn[1] == point:
            return drawn[2]
        self._study.enqueue_trial(point)
        return self._study.ask(self._distributions)

    def _end(self, trial: optuna.Trial, entry: JournalEntry) -> None:
        if entry.outcome == "complete" and entry.value is not None:
            self._study.tell(trial, entry.value)
        elif entry.outcome == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, state=TrialState.FAIL)


def _distribution(one: Dimension) -> BaseDistribution:
    if one.values:
        return CategoricalDistribution(one.values)
    if one.is_whole:
        return IntDistribution(int(one.low), int(one.high), log=one.is_log)
    return FloatDistribution(one.low, one.high, log=one.is_log)


def _sampler(plan: SweepPlan, number: int) -> BaseSampler:
    seed = (plan.seed * 1_000_003 + number) % (1 << 32)
    if plan.search == "tpe":  # of trials that run it assumes the worst, so that it does not draw the same point again
        return TPESampler(seed=seed, constant_liar=True)
    return RandomSampler(seed=seed)


def _pruner(plan: SweepPlan) -> BasePruner:
    if plan.stop is None:
        return NopPruner()
    return SuccessiveHalvingPruner(min_resource=plan.stop.least, reduction_factor=plan.stop.factor)

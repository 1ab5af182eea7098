"""The plan of a sweep. It never changes after the submission. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.errors import BadInput
from gpurun.jobs.origin import Origin
from gpurun.jobs.spec import JobSpec
from gpurun.sweeps import space
from gpurun.sweeps.space import Dimension, Point, Value

LEAST_RESTARTS = 2
"""A trial runs again if its host dies, whatever its recipe says of restarts."""
Search = Literal["grid", "random", "tpe"]

_METRIC = re.compile(r"([A-Za-z_][A-Za-z0-9_./-]{0,63})(?::(max|min))?\Z", re.ASCII)
_STOP = re.compile(r"asha(?::(.*))?\Z", re.DOTALL)


@dataclass(frozen=True)
class Metric:
    """What trials are compared by: the name under which they report it, and whether more is better."""

    name: str
    more_is_better: bool = True

    def best(self, one: float, other: float) -> float:
        """The better of two values."""
        return max(one, other) if self.more_is_better else min(one, other)


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020.

    At step `least`, and at each step `factor` times the one before, a trial continues only if it is among the best
    1/`factor` of those that have come so far.
    """

    least: int = 1
    factor: int = 3


@dataclass(frozen=True)
class SweepPlan:
    """One sweep, complete.

    Attributes:
        template: the job of each trial, but for its parameters. Image and code are pinned.
        inventory: the file that trials are submitted against.
        space: parameters by name. Of a grid, all have lists.
        trials: how many points are tried.
        metric: None = trials are not compared.
        stop: which trials are stopped early; None = none.
        max_parallel: the most trials that are in the queue or run at a time; None = as the inventory has GPUs for.
        seed: of what is drawn at random.
        as_flags: parameters stand behind the command, too, as ``--NAME=VALUE``.
        origin: where the template comes from.
    """

    name: str
    template: JobSpec
    inventory: str
    space: Mapping[str, Dimension]
    search: Search
    trials: int
    created_s: float
    metric: Metric | None = None
    stop: Asha | None = None
    max_parallel: int | None = None
    seed: int = 0
    as_flags: bool = False
    origin: Origin = field(default_factory=Origin)


def job_of(plan: SweepPlan, sweep: str, number: int, parameters: Point) -> JobSpec:
    """The job of one trial. `gpurun_runtime.parameters()` and its environment tell its program the parameters."""
    told = {f"GPURUN_PARAMETER_{_variable(name)}": space.text(value) for name, value in parameters.items()}
    env = {"GPURUN_TRIAL": f"{sweep}/{number}", "GPURUN_PARAMETERS": json.dumps(dict(parameters)), **told}
    return replace(
        plan.template, name=f"{plan.name}-{number}", env={**plan.template.env, **env},
        command=(*plan.template.command, *(space.words(parameters) if plan.as_flags else ())),
        max_restarts=max(plan.template.max_restarts, LEAST_RESTARTS),
    )  # fmt: skip


def wrong_with(plan: SweepPlan) -> str:
    """Return why a stored plan cannot be carried, because somebody edited it; "" if it can."""
    if plan.trials < 1:
        return "the plan has no trials"
    if plan.max_parallel is not None and plan.max_parallel < 1:
        return "the plan lets no trial run"
    if plan.search == "grid" and plan.trials > math.prod(len(one.values) for one in plan.space.values()):
        return "the plan has more trials than points"
    return ""


def longest_point(plan: SweepPlan) -> dict[str, Value]:
    """A point that takes as much room in a command as any."""
    return {
        name: max((one.low, one.high, *one.values), key=lambda value: len(space.text(value)))
        for name, one in plan.space.items()
    }


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", name.upper())


def parse_metric(text: str) -> Metric:
    """Parse ``accuracy:max`` or ``loss:min``; without ``:max`` or ``:min``, more is better.

    Raises:
        BadInput: the text is not a metric.
    """
    found = _METRIC.match(text)
    if not found:
        raise BadInput(f"{text!r} is not a metric", hint="write NAME:max or NAME:min, such as accuracy:max")
    return Metric(found[1], found[2] != "min")


def parse_stop(text: str) -> Asha | None:
    """Parse ``asha``, ``asha:min=1,factor=3``, or ``none``, which overrides the recipe.

    Raises:
        BadInput: the text is not a stop rule.
    """
    if text == "none":
        return None
    found = _STOP.match(text)
    given: dict[str, int] = {}
    for part in filter(None, (found[1] or "").split(",") if found else ()):
        name, _, number = part.partition("=")
        if name not in ("min", "factor") or name in given or not re.fullmatch(r"[0-9]{1,9}", number, re.ASCII):
            found = None
            break
        given[name] = int(number)
    if not found or given.get("min", 1) < 1 or given.get("factor", 3) < 2:
        raise BadInput(
            f"{text!r} is not a stop rule",
            hint="write asha:min=1,factor=3, with a min of 1 or more and a factor of 2 or more",
        )
    return Asha(given.get("min", 1), given.get("factor", 3))

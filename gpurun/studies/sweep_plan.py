"""The plan of a sweep: its space, from a recipe's ``sweep:`` or flags, and the job of each trial. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpurun.errors import BadInput
from gpurun.jobs.record import Origin
from gpurun.jobs.spec import JobSpec
from gpurun.studies.trials import Metric, Point, Value

# What a sweep tries: parameters by name, each a list of values or a range. Pure.


MOST_POINTS = 1_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}\Z", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?\Z", re.ASCII)
_RANGE = re.compile(r"(log:)?([^,]+?)\.\.([^,.][^,]*)\Z")


@dataclass(frozen=True)
class Dimension:
    """What one parameter may be.

    Attributes:
        values: the list; empty for a range.
        low, high: the ends of a range, both included.
        is_log: a range is drawn by its logarithm.
        is_whole: a range has whole numbers only.
    """

    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False


Space = Mapping[str, Dimension]


def value_of(text: str) -> Value:
    """A value as a person writes it: ``true``, ``3``, ``1e-3`` or a text."""
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.match(text):
        return int(text)
    if _NUMBER.match(text) and math.isfinite(float(text)):
        return float(text)
    return text


def dimension(name: str, texts: tuple[str, ...]) -> Dimension:
    """One parameter: a list of values, or a single text that is a range.

    Raises:
        BadInput: it is neither.
    """
    if not _NAME.match(name):
        raise BadInput(f"{name!r} is not a valid name of a parameter", hint="use letters, digits, '_', '.' and '-'")
    if len(texts) == 1 and (found := _RANGE.match(texts[0])):
        return _range(name, bool(found[1]), found[2], found[3])
    if wrong := [text for text in texts if text.startswith("log:")]:
        raise BadInput(
            f"the parameter {name}: {wrong[0]!r} is not a range", hint=f"write a range such as {name}=log:1e-5..1e-1"
        )
    values = tuple(value_of(text) for text in texts)
    if not texts or "" in texts:
        raise BadInput(f"the parameter {name} has an empty value", hint=f"write values such as {name}=0.1,0.01")
    if len({(type(value), value) for value in values}) < len(values):
        raise BadInput(f"the parameter {name} has a value twice: {', '.join(texts)}")
    return Dimension(values)


def _range(name: str, is_log: bool, low: str, high: str) -> Dimension:
    ends = value_of(low), value_of(high)
    if any(isinstance(end, bool | str) for end in ends):
        raise BadInput(
            f"the range {low}..{high} of {name} has an end that is not a number",
            hint=f"write a range such as {name}=log:1e-5..1e-1",
        )
    first, last = float(ends[0]), float(ends[1])
    if first >= last or (is_log and first <= 0):
        needs = "0 < LOW < HIGH" if is_log else "LOW < HIGH"
        raise BadInput(f"the range {low}..{high} of {name} is empty: a range LOW..HIGH needs {needs}")
    return Dimension(low=first, high=last, is_log=is_log, is_whole=all(isinstance(end, int) for end in ends))


def parse_space(words: Mapping[str, tuple[str, ...]]) -> Space:
    """Parameters by name, as `dimension` reads each.

    Raises:
        BadInput: one of them cannot be read.
    """
    return {name: dimension(name, texts) for name, texts in words.items()}


def assignments(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """``NAME=VALUES`` of a command line, taken apart.

    Raises:
        BadInput: a word has no ``=``, or a name comes twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        if not equals:
            raise BadInput(
                f"{word!r} is not a parameter", hint="write NAME=VALUES, such as lr=0.1,0.01 or lr=log:1e-5..1e-1"
            )
        if name in found:
            raise BadInput(f"the parameter {name} is given twice")
        found[name] = tuple(rest.split(","))
    return found


def grid_point(space: Space, number: int) -> Point:
    """Return point `number` of a grid of lists; the last parameter changes fastest."""
    values = dict[str, Value]()
    for name in reversed(list(space)):
        number, at = divmod(number, len(space[name].values))
        values[name] = space[name].values[at]
    return {name: values[name] for name in space}


def check_grid(space: Space) -> int:
    """Return the number of points of a grid.

    Raises:
        BadInput: a parameter is a range, there are no parameters, or there are too many points.
    """
    for name, one in space.items():
        if not one.values:
            hint = f"write a list such as {name}=0.1,0.01, or choose --random N or --tpe N"
            raise BadInput(f"the parameter {name} is a range, but a grid needs a list of values", hint=hint)
    count = math.prod(len(one.values) for one in space.values())
    if not space or count > MOST_POINTS:
        raise BadInput(
            "the sweep has no parameter"
            if not space
            else f"the grid has {count} points, but at most {MOST_POINTS} are allowed"
        )
    return count


def words(point: Point) -> tuple[str, ...]:
    """A point as flags of a program: ``--lr=0.1``; a truth is ``true`` or ``false``."""
    return tuple(f"--{name}={value_text(value)}" for name, value in point.items())


def value_text(value: Value) -> str:
    """A value as `value_of` reads it again."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# The plan of a sweep. It never changes after the submission. Pure.


LEAST_RESTARTS = 2
"""A trial runs again if its host dies, whatever its recipe says of restarts."""
Search = Literal["grid", "random", "tpe"]

_METRIC = re.compile(r"([A-Za-z_][A-Za-z0-9_./-]{0,63})(?::(max|min))?\Z", re.ASCII)
_STOP = re.compile(r"asha(?::(.*))?\Z", re.DOTALL)


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
    told = {f"GPURUN_PARAMETER_{_variable(name)}": value_text(value) for name, value in parameters.items()}
    env = {"GPURUN_TRIAL": f"{sweep}/{number}", "GPURUN_PARAMETERS": json.dumps(dict(parameters)), **told}
    return replace(
        plan.template, name=f"{plan.name}-{number}", env={**plan.template.env, **env},
        command=(*plan.template.command, *(words(parameters) if plan.as_flags else ())),
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
        name: max((one.low, one.high, *one.values), key=lambda value: len(value_text(value)))
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


Texts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Wish:
    """A sweep as a person requested it.

    Attributes:
        grid, space: parameters by name, each a list of values or one range, as written.
        random, tpe: how many points to draw.
    """

    grid: Texts = field(default_factory=dict)
    space: Texts = field(default_factory=dict)
    random: int | None = None
    tpe: int | None = None
    metric: str | None = None
    stop: str | None = None
    max_parallel: int | None = None
    seed: int = 0
    as_flags: bool = False

    @classmethod
    def of_recipe(cls, keys: Mapping[str, Any]) -> Wish:
        """Return the sweep of a recipe's keys."""
        space = {name: tuple(text.split(",")) for name, text in keys.get("space", {}).items()}
        return cls(**{**keys, "space": space})

    def plan(self, template: JobSpec, inventory: str, now_s: float) -> SweepPlan:
        """The sweep of a pinned job.

        Raises:
            BadInput: it is no sweep, or contradicts itself.
        """
        search, points, trials = self._points()
        stop = None if self.stop is None else parse_stop(self.stop)
        if self.metric is None and (stop is not None or search == "tpe"):
            why = "--stop" if stop is not None else "--tpe"
            raise BadInput(
                f"{why} compares trials by a metric, but the sweep has no metric",
                hint="give a metric, such as --metric accuracy:max",
            )
        return SweepPlan(
            name=template.name, template=template, inventory=inventory, space=points, search=search, trials=trials,
            created_s=now_s, metric=None if self.metric is None else parse_metric(self.metric),
            stop=stop, max_parallel=self.max_parallel, seed=self.seed,
            as_flags=self.as_flags,
        )  # fmt: skip

    def _points(self) -> tuple[Search, Space, int]:
        if self.random is not None and self.tpe is not None:
            raise BadInput("--random and --tpe are two ways to draw points", hint="choose either --random or --tpe")
        both = {**self.grid, **self.space}
        if len(both) < len(self.grid) + len(self.space):
            raise BadInput("a parameter is given twice")
        points = parse_space(both)
        if not points:
            raise BadInput(
                "the sweep has no parameter",
                hint="write parameters: --grid lr=0.1,0.01, or --random 50 lr=log:1e-5..1e-1",
            )
        if self.random is None and self.tpe is None:
            return "grid", points, check_grid(points)
        return ("random", points, self.random) if self.random is not None else ("tpe", points, self.tpe or 0)

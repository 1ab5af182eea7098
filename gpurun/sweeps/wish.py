"""Turn a recipe's ``sweep:`` or flags into a plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.sweeps import space
from gpurun.sweeps.plan import Search, SweepPlan, parse_metric, parse_stop
from gpurun.sweeps.space import Space

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
        points = space.parse(both)
        if not points:
            raise BadInput(
                "the sweep has no parameter",
                hint="write parameters: --grid lr=0.1,0.01, or --random 50 lr=log:1e-5..1e-1",
            )
        if self.random is None and self.tpe is None:
            return "grid", points, space.check_grid(points)
        return ("random", points, self.random) if self.random is not None else ("tpe", points, self.tpe or 0)

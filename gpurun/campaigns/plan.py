"""The plan of a campaign. It never changes after the campaign has begun. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpurun.errors import BadInput
from gpurun.jobs.origin import Origin
from gpurun.jobs.spec import JobSpec, Roles
from gpurun.quantities.counts import count
from gpurun.scaling.shape import MOST_RANKS, LinkRates

MOST_SIZES, MOST_REPEATS = 64, 100
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_SIZE = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


@dataclass(frozen=True, order=True)
class RunKey:
    """Identifies a run of a campaign: the launcher, the number of GPUs, and the repetition, counted from 1."""

    launcher: str
    gpus: int
    number: int

    @property
    def words(self) -> str:
        """Return a text for people."""
        return f"{self.launcher}, {count(self.gpus, 'GPU')}, run {self.number}"


@dataclass(frozen=True)
class RefusedSize:
    """A size that cannot run, and the reason.

    Attributes:
        code: the exit code of the error.
    """

    launcher: str
    gpus: int
    reason: str
    code: int


@dataclass(frozen=True)
class CampaignPlan:
    """One campaign, complete.

    Attributes:
        jobs: the job of each size of each launcher; image and code are pinned.
        refused: requested sizes that cannot run.
        inventory: the file that jobs are submitted against.
        repeat: how often each size runs.
        rate: the metric to compare; None = the one metric whose name ends in ``_per_s``.
        rates: nominal link rates, if the user gave them.
        racks: the rack of each host of the inventory.
        origin: where the jobs come from.
    """

    name: str
    jobs: tuple[JobSpec, ...]
    inventory: str
    repeat: int
    created_s: float
    refused: tuple[RefusedSize, ...] = ()
    rate: str | None = None
    rates: LinkRates = field(default_factory=LinkRates)
    racks: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    def runs(self) -> Iterator[RunKey]:
        """Yield all runs in order. Launchers and sizes alternate, so a machine that becomes slower affects all of them
        equally.
        """
        for number in range(1, self.repeat + 1):
            for spec in self.jobs:
                yield RunKey(spec.launcher, spec.gpus, number)

    def job(self, run: RunKey) -> JobSpec:
        """Return the job of one run."""
        found = next(spec for spec in self.jobs if (spec.launcher, spec.gpus) == (run.launcher, run.gpus))
        return replace(found, name=f"{self.name}-{run.launcher}-{run.gpus}-{run.number}")

    def asks_the_same_as(self, other: CampaignPlan) -> bool:
        """Return whether both plans run the same command at the same sizes. Image, code and data may differ."""
        return self._asked == other._asked

    @property
    def _asked(self) -> object:
        pinned: dict[str, Any] = {"image": "", "image_id": "", "code": "", "data": {}, "python": None}
        jobs = [replace(spec, **pinned, outputs_limit_mib=None) for spec in self.jobs]
        sizes = [(each.launcher, each.gpus) for each in self.refused]
        return jobs, sizes, self.inventory, self.repeat, self.rate, self.rates


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4,8`` into sorted numbers.

    Raises:
        BadInput: a part is not a valid size, or a size occurs twice.
    """
    words = [word.strip() for word in text.split(",")]
    hint = "write sizes such as 1,2,4,8"
    if wrong := [word for word in words if not _SIZE.match(word) or not 1 <= int(word) <= MOST_RANKS]:
        raise BadInput(f"--gpus: {wrong[0][:40]!r} is not a number of GPUs", hint=hint)
    sizes = [int(word) for word in words]
    if twice := [size for size in sizes if sizes.count(size) > 1]:
        raise BadInput(
            f"--gpus has the size {twice[0]} twice", hint="write each size once: --repeat N runs each size N times"
        )
    if len(sizes) > MOST_SIZES:
        raise BadInput(f"--gpus has {len(sizes)} sizes, but at most {MOST_SIZES} are allowed", hint=hint)
    return tuple(sorted(sizes))


def check_name(name: str) -> None:
    """Refuse a name that cannot be a folder's name. Raises BadInput."""
    if not NAME.match(name):
        raise BadInput(
            f"--name {name[:80]!r} is not a valid name of a campaign",
            hint="use up to 64 letters, digits, '.', '_' and '-'",
        )


def given_for(given: Mapping[str, object], gpus: int, *, has_roles: bool, has_knobs: bool) -> dict[str, object]:
    """Return a recipe's fields for one size. It is not elastic, and has as many servers for each worker as the recipe.

    Drops roles if the launcher's ranks have none, and Horovod's settings if another launcher starts the ranks.
    """
    dropped = {"min_gpus", "rehearse_s", *([] if has_knobs else ["horovod", "controller"])}
    kept = {key: value for key, value in given.items() if key not in dropped}
    roles, before = kept.pop("roles", None), kept.get("gpus")
    if isinstance(roles, Roles) and has_roles:
        share = gpus / before if isinstance(before, int) else 1
        kept["roles"] = replace(roles, ps=max(1, round(roles.ps * share)) if roles.ps else 0, workers=None)
    return kept

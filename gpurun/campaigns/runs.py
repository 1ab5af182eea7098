"""The stored record of one run of a campaign, and the sample that the cost model reads. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpurun.campaigns.rates import MeasuredRate, middle
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.scaling.placed import exchange_of, shape_of
from gpurun.scaling.samples import Sample
from gpurun.scaling.shape import LinkRates

Outcome = Literal["open", "measured", "failed", "cancelled", "no-rate"]
DONE: tuple[Outcome, ...] = ("measured",)
"""What is not run again."""

MOST_WINDOWS = 200
"""Windows of a run in its sample, evenly spaced: their spread needs no more, and a file of many samples stays small."""

PRECISION = re.compile(r"precision_([a-z0-9]{1,8})")

MOST_APART = 4.0
"""If batch / rate and the reported seconds differ by a larger factor, batch and rate have different units."""


@dataclass(frozen=True)
class RunRecord:
    """One run: its job, and its result.

    Attributes:
        job: the job's id, known before the job is submitted.
        hint: what to do about the reason.
        grants: hosts and GPUs of the run.
        held_s: seconds from the run's start until its GPUs were free again.
        metrics: for each metric, the median over ranks of the last value.
        sample: what the cost model reads; None = the recipe reports no batch and no gradient_bytes.
    """

    launcher: str
    gpus: int
    number: int
    job: str
    outcome: Outcome = "open"
    reason: str = ""
    hint: str = ""
    rate: MeasuredRate | None = None
    grants: tuple[Grant, ...] = ()
    held_s: float = 0.0
    ended_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    sample: Sample | None = None

    @property
    def gpu_hours(self) -> float:
        """Return the GPU hours that the run used."""
        return sum(len(grant.gpus) for grant in self.grants) * self.held_s / 3600

    @property
    def hosts(self) -> int:
        """Return the number of hosts with a GPU of the job."""
        return sum(1 for grant in self.grants if grant.gpus)


def sample_of(
    spec: JobSpec, job: str, grants: Sequence[Grant], racks: Mapping[str, str], rates: LinkRates,
    rate: MeasuredRate, values: Mapping[str, Mapping[int, float]],
) -> Sample | None:  # fmt: skip
    """Return the run as a sample for the cost model.

    None if the program reports no valid batch and gradient size, or a batch in another unit than the rate.
    """
    batch, size = middle(values.get("batch")), middle(values.get("gradient_bytes"))
    if batch is None or size is None:
        return None
    computes = [value for value in values.get("compute_s", {}).values() if value > 0]
    images = batch * spec.gpus
    windows = rate.windows[:: len(rate.windows) // MOST_WINDOWS + 1]
    reported_s = middle(values.get("step_s"))
    try:
        step_s = images / rate.value
        if computes and statistics.median(computes) > MOST_APART * step_s:
            return None
        if reported_s is not None and not 1 / MOST_APART <= reported_s / step_s <= MOST_APART:
            return None
        shape = shape_of(spec, grants, racks, rates)
        return Sample(
            ranks_per_host=shape.ranks_per_host, racks=shape.racks, servers_per_host=shape.servers_per_host,
            batch_per_rank=int(batch), gradient_bytes=int(size), step_s=step_s, images_per_s=rate.value,
            windows_s=tuple(images / window for window in windows), gpus=spec.gpus,
            exchange=exchange_of(spec), launcher=spec.launcher,
            compute_s=statistics.median(computes) if computes else None,
            compute_spread=statistics.pstdev(computes) / statistics.mean(computes) if len(computes) > 1 else None,
            exchange_s=middle(values.get("exchange_s")), rates=rates, precision=_precision(values),
            is_compiled=_is_compiled(values.get("compiled")), job=job,
        )  # fmt: skip
    except (ValueError, OverflowError, ZeroDivisionError):
        return None


def _precision(values: Mapping[str, Mapping[int, float]]) -> str:
    """Return the precisions that ranks reported as metrics ``precision_NAME``: metrics are numbers."""
    found = {match[1] for name in values if (match := PRECISION.fullmatch(name)) and any(values[name].values())}
    return "+".join(sorted(found))


def _is_compiled(ranks: Mapping[int, float] | None) -> bool | None:
    return any(ranks.values()) if ranks else None

"""Choose the number of GPUs of a job: the largest with a sufficient predicted efficiency. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpurun.errors import BadInput, NeverFits
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import JobSpec
from gpurun.quantities.counts import count
from gpurun.scaling.model import CannotPredict, Prediction, ScalingModel
from gpurun.scaling.placed import exchange_of, shape_of
from gpurun.scheduler.gangs import new_gang
from gpurun.scheduler.model import Snapshot
from gpurun.scheduler.schedule import schedule

AUTO = re.compile(r"auto:([1-9][0-9]?|100)%")
PER_OCTAVE = 8
"""Sizes in whole hosts: every number of hosts up to twice this, then this many sizes per doubling."""


@dataclass(frozen=True)
class GpuChoice:
    """The chosen size.

    Attributes:
        larger: the next size, whose efficiency is too low, or the reason why it is unknown; None if there is none.
    """

    prediction: Prediction
    larger: Prediction | CannotPredict | None


def least_efficiency(text: str) -> float | None:
    """Parse ``auto:80%`` as 0.8; None for a text that does not begin with ``auto``. Raises BadInput."""
    if not text.startswith("auto"):
        return None
    found = AUTO.fullmatch(text)
    if found is None:
        raise BadInput(f"--gpus {text[:80]!r} must look like auto:80%, from 1 % to 100 %")
    return int(found[1]) / 100


def sizes(inventory: Inventory) -> list[int]:
    """Return the numbers of GPUs to try: each number up to one whole host, then whole hosts."""
    largest = max((host.gpus for host in inventory.hosts), default=0)
    found = list(range(1, largest + 1))
    hosts, step = 2, 1
    while largest and hosts * largest <= inventory.total_gpus:
        found.append(hosts * largest)
        hosts += step
        if hosts >= 2 * PER_OCTAVE * step:
            step *= 2
    return found


def predicted(model: ScalingModel, spec: JobSpec, inventory: Inventory) -> Prediction | None:
    """Predict the job on the empty inventory; None if it would not start there.

    Raises:
        CannotPredict: the samples do not allow a prediction.
    """
    gang = new_gang(spec, job="j-00000000", submitted_s=0.0)
    starts = schedule(Snapshot(inventory, queue=(gang,))).starts
    if not starts:
        return None
    grants = starts[0][1].grants
    racks = {grant.host: inventory.by_name[grant.host].rack for grant in grants}
    return model.predict(shape_of(spec, grants, racks), exchange=exchange_of(spec))


def most_gpus(
    model: ScalingModel, inventory: Inventory, least: float, spec_with: Callable[[int], JobSpec], tried: Iterable[int]
) -> GpuChoice:
    """Return the largest size with at least this efficiency. Places each size on the empty inventory.

    Args:
        spec_with: returns the job with so many GPUs.

    Raises:
        BadInput: no size is possible, or none is efficient enough.
        CannotPredict: the samples do not allow a prediction for the smallest size.
    """
    best: Prediction | None = None
    larger: Prediction | CannotPredict | None = None
    refusal: BadInput | NeverFits | None = None
    for gpus in tried:
        try:
            found = predicted(model, spec_with(gpus), inventory)
        except CannotPredict as error:
            larger = error
            break
        except (BadInput, NeverFits) as error:
            refusal = error
            continue
        if found is not None and found.efficiency.median >= least:
            best, larger = found, None
        elif larger is None:
            larger = found
    if best is not None:
        return GpuChoice(best, larger)
    if isinstance(larger, CannotPredict):
        raise larger
    if larger is None:
        raise refusal or BadInput("no number of GPUs in the inventory fits the job")
    most = count(larger.ranks, "GPU")
    raise BadInput(
        f"no number of GPUs reaches an efficiency of {least:.0%}: gpurun expects "
        f"{larger.efficiency.median:.0%} with {most}",
        hint="ask for a lower efficiency, such as --gpus auto:50%",
    )


@dataclass(frozen=True)
class SmallerGang:
    """A gang that would start now, as an alternative to a larger gang that waits.

    Attributes:
        rate: its images/s, divided by those of the larger gang.
        is_sooner: it ends first, whatever the length of the job.
        sooner_below_s: it ends first if the larger gang would run for less than this; None = the wait is unknown.
    """

    gpus: int
    rate: float
    is_sooner: bool
    sooner_below_s: float | None


def smaller_gang(
    smaller: Prediction, whole: Prediction, wait_s: float | None, time_limit_s: float | None
) -> SmallerGang:
    """Compare a gang that would start now with a gang that must wait.

    Args:
        time_limit_s: the larger gang runs no longer than this; None = unknown.
    """
    rate = smaller.images_per_s.median / whole.images_per_s.median
    below_s = None if wait_s is None or rate >= 1 else wait_s * rate / (1 - rate)
    is_bounded = below_s is not None and time_limit_s is not None and time_limit_s <= below_s
    return SmallerGang(smaller.ranks, rate, rate >= 1 or is_bounded, below_s)


def in_words(choice: GpuChoice, least: float) -> str:
    """Return the choice in words, with its range and the next larger size."""
    found = choice.prediction
    efficiency = found.efficiency
    text = (
        f"{count(found.ranks, 'GPU')}: the expected efficiency is {efficiency.median:.0%} ({efficiency.low:.0%} to "
        f"{efficiency.high:.0%}), {found.images_per_s.median:.4g} images/s"
    )
    if isinstance(choice.larger, Prediction):
        return f"{text}; {choice.larger.ranks} GPUs would have {choice.larger.efficiency.median:.0%}, below {least:.0%}"
    return text if choice.larger is None else f"{text}; more GPUs cannot be predicted: {choice.larger.message}"

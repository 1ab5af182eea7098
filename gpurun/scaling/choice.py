"""Choose the number of GPUs of a job: the largest with a sufficient predicted efficiency. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpurun.doctor.findings import Link
from gpurun.errors import BadInput, NeverFits
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch.launchers.launcher import SERVER, seats_of
from gpurun.quantities import count
from gpurun.scaling.model import (
    LEAST_BIT_PER_S,
    MOST_BIT_PER_S,
    CannotPredict,
    Exchange,
    LinkClass,
    LinkRates,
    PairFigure,
    Prediction,
    ScalingModel,
    Shape,
)
from gpurun.scheduler.model import Snapshot, new_gang
from gpurun.scheduler.passes import schedule

# Convert the link measurements of `gpurun bench` for the model. Pure.


MOST_LATENCY_US = 1e9


def pair_figures(links: Iterable[Link], racks: Mapping[str, str]) -> tuple[PairFigure, ...]:
    """Return the median of each class of links between hosts.

    Args:
        links: oldest first; the newest measurement of a link counts.
        racks: host → rack; links of other hosts are ignored.
    """
    newest = {(link.source, link.target): link for link in links}
    classes: dict[LinkClass, list[Link]] = {}
    for (source, target), link in newest.items():
        if source in racks and target in racks and source != target and _is_possible(link):
            near = racks[source] == racks[target]
            classes.setdefault(LinkClass.RACK if near else LinkClass.RACKS, []).append(link)
    return tuple(
        PairFigure(
            kind, 1e9 * median(link.gbit_per_s for link in alike), 1e-6 * median(link.latency_us for link in alike)
        )
        for kind, alike in classes.items()
    )


def _is_possible(link: Link) -> bool:
    """Return whether a network can have these figures. A file that somebody changed can contain others."""
    return LEAST_BIT_PER_S <= 1e9 * link.gbit_per_s <= MOST_BIT_PER_S and 0 < link.latency_us <= MOST_LATENCY_US


# The shape and the exchange of a placed job, as the model needs them. Pure.


def shape_of(spec: JobSpec, grants: Sequence[Grant], racks: Mapping[str, str], rates: LinkRates | None = None) -> Shape:
    """Return the shape of a job on these hosts. Parameter servers are on the hosts where gpurun starts them.

    Args:
        racks: host → rack.

    Raises:
        ValueError: no gang can have this shape.
    """
    servers = Counter(seat.node for seat in seats_of(grants, spec.roles) if seat.role == SERVER)
    return Shape(
        tuple(len(grant.gpus) for grant in grants),
        tuple(racks.get(grant.host, "") for grant in grants),
        tuple(servers[node] for node in range(len(grants))) if servers else (),
        rates or LinkRates(),
    )


def exchange_of(spec: JobSpec) -> Exchange:
    """Return how the job's ranks exchange gradients."""
    if spec.roles is not None and spec.roles.ps:
        return "servers"
    return "hierarchical" if spec.horovod.hierarchical_allreduce else "ring"


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

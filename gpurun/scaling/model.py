"""Fit the cost of a step to measured runs, and predict other gangs and links, with a range. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import exp, fsum, hypot, isfinite, log, log2, sqrt
from statistics import NormalDist, fmean, median, variance
from typing import Literal

import msgspec

from gpurun.errors import BadInput
from gpurun.msgspec_types import ready
from gpurun.scaling import posterior

# The hosts of a gang's ranks, and the links between them. Pure.


MOST_RANKS = 1_000_000
LEAST_BIT_PER_S, MOST_BIT_PER_S = 1e3, 1e16


class LinkClass(str, Enum):
    """A kind of link. The model treats links of one kind as equal."""

    HOST = "inside a host"
    RACK = "between hosts of a rack"
    RACKS = "between racks"


@dataclass(frozen=True)
class LinkRates:
    """Nominal rates per direction in bit/s; None = not known.

    Attributes:
        host: between GPUs of one host.
        rack: a host's own link.
        racks: a rack's link to the other racks, which all its hosts share.
    """

    host: float | None = None
    rack: float | None = None
    racks: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.host, self.rack, self.racks):
            if rate is not None and not (isfinite(rate) and LEAST_BIT_PER_S <= rate <= MOST_BIT_PER_S):
                raise ValueError(
                    f"the rate {rate!r} of a link must be from {LEAST_BIT_PER_S:g} to {MOST_BIT_PER_S:g} bit/s, or null"
                )

    def of(self, link: LinkClass) -> float | None:
        """Return the rate of a class."""
        return {LinkClass.HOST: self.host, LinkClass.RACK: self.rack, LinkClass.RACKS: self.racks}[link]


@dataclass(frozen=True)
class Shape:
    """The hosts of a gang's ranks.

    Attributes:
        ranks_per_host: ranks, host by host in rank order; 0 for a host that has only servers.
        racks: the rack of each host.
        servers_per_host: parameter servers on each host; empty = none.

    Raises:
        ValueError: no gang can have this shape.
    """

    ranks_per_host: tuple[int, ...]
    racks: tuple[str, ...]
    servers_per_host: tuple[int, ...] = ()
    rates: LinkRates = field(default_factory=LinkRates)

    def __post_init__(self) -> None:
        hosts = len(self.ranks_per_host)
        if len(self.racks) != hosts or len(self.servers_per_host) not in (0, hosts):
            raise ValueError(
                f"for {hosts} hosts, racks must have {hosts} entries, and servers_per_host {hosts} or 0 entries"
            )
        if any(not 0 <= count <= MOST_RANKS for count in (*self.ranks_per_host, *self.servers_per_host)):
            raise ValueError(f"a host must have from 0 to {MOST_RANKS} ranks or servers")
        if not 0 < sum(self.ranks_per_host) <= MOST_RANKS:
            raise ValueError(f"a gang must have from 1 to {MOST_RANKS} ranks")

    @cached_property
    def ranks(self) -> int:
        """The number of training ranks."""
        return sum(self.ranks_per_host)

    @cached_property
    def ring(self) -> tuple[tuple[int, str], ...]:
        """The ranks and the rack of each host with ranks, in rank order."""
        return tuple((ranks, rack) for ranks, rack in zip(self.ranks_per_host, self.racks, strict=True) if ranks)

    @cached_property
    def flows_between_racks(self) -> int:
        """The number of the ring's flows that share the busiest rack's link in one direction; 0 within one rack."""
        racks = [rack for _, rack in self.ring]
        leaving = [a for a, b in pairwise([*racks, racks[0]]) if a != b]
        return max((leaving.count(rack) for rack in set(leaving)), default=0)

    @cached_property
    def links(self) -> frozenset[LinkClass]:
        """The classes of links between its ranks and servers."""
        return frozenset(self._links())

    def _links(self) -> Iterator[LinkClass]:
        servers = self.servers_per_host or (0,) * len(self.ranks_per_host)
        used = [at for at, ranks in enumerate(self.ranks_per_host) if ranks + servers[at]]
        if any(ranks + servers[at] > 1 for at, ranks in enumerate(self.ranks_per_host)):
            yield LinkClass.HOST
        racks = [self.racks[at] for at in used]
        if len(set(racks)) < len(racks):
            yield LinkClass.RACK
        if len(set(racks)) > 1:
            yield LinkClass.RACKS

    def on(self, rates: LinkRates) -> Shape:
        """Return the same gang with other link rates."""
        return Shape(self.ranks_per_host, self.racks, self.servers_per_host, rates)


# One measured run of a scaling campaign, as a frozen value and as a line of JSON. Pure.


Exchange = Literal["ring", "hierarchical", "servers"]
"""The exchange of gradients: one ring of all ranks; rings inside hosts and one of the hosts; parameter servers."""

LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
MOST_BYTES = 1 << 50
MOST_RATE = 1e12
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6
MOST_WINDOWS = 10_000
PRECISIONS = re.compile(r"([a-z0-9]{1,8}(\+[a-z0-9]{1,8})*)?")


@dataclass(frozen=True)
class Sample:
    """One measured run.

    Attributes:
        ranks_per_host: training ranks, host by host in rank order; 0 for a host that has only parameter servers.
        racks: the rack of each host.
        batch_per_rank: images of one step of one rank.
        gradient_bytes: bytes of one rank's gradients in one step, before compression, as the program counted them: with
            autocast they are fp32, whatever the precision.
        step_s: median seconds of a step, without warm-up.
        images_per_s: of all ranks together.
        windows_s: seconds of a step in each window of the measurement.
        gpus: GPUs that the job held; 0 if its ranks have none.
        exchange: how ranks exchange gradients.
        servers_per_host: parameter servers on each host; empty without servers.
        launcher: the launcher's name, such as ``horovod``. Each launcher has its own model.
        compute_s: seconds of computation in a step of one rank; None = not known.
        compute_spread: standard deviation of ranks' compute times over their mean; None = not known.
        exchange_s: seconds of communication in a step, including hidden communication; None = not known.
        rates: nominal link rates during the run.
        compression: gradient bytes over bytes sent: 2 for fp16.
        precision: what the ranks compute in, such as ``bf16``; with ``+`` between them if ranks differ; "" = not known.
        is_compiled: whether the network was compiled; None = not known.
        job: the id of the measured job.

    Raises:
        ValueError: a value is not possible.
    """

    ranks_per_host: tuple[int, ...]
    racks: tuple[str, ...]
    batch_per_rank: int
    gradient_bytes: int
    step_s: float
    images_per_s: float
    windows_s: tuple[float, ...] = ()
    gpus: int = 0
    exchange: Exchange = "ring"
    servers_per_host: tuple[int, ...] = ()
    launcher: str = ""
    compute_s: float | None = None
    compute_spread: float | None = None
    exchange_s: float | None = None
    rates: LinkRates = field(default_factory=LinkRates)
    compression: float = 1.0
    precision: str = ""
    is_compiled: bool | None = None
    job: str = ""

    def __post_init__(self) -> None:
        _between("batch_per_rank", self.batch_per_rank, 1, MOST_BYTES)
        _between("gradient_bytes", self.gradient_bytes, 1, MOST_BYTES)
        _between("gpus", self.gpus, 0, MOST_BYTES)
        _between("step_s", self.step_s, LEAST_SECONDS, MOST_SECONDS)
        _positive("images_per_s", self.images_per_s, MOST_RATE)
        _between("compression", self.compression, LEAST_FACTOR, MOST_FACTOR)
        _between("the number of windows_s", len(self.windows_s), 0, MOST_WINDOWS)
        for window_s in self.windows_s:
            _between("windows_s", window_s, LEAST_SECONDS, MOST_SECONDS)
        if self.compute_s is not None:
            _between("compute_s", self.compute_s, LEAST_SECONDS, MOST_SECONDS)
        if self.exchange_s:
            _between("exchange_s", self.exchange_s, LEAST_SECONDS, MOST_SECONDS)
        if self.compute_spread is not None:
            _between("compute_spread", self.compute_spread, 0.0, MOST_FACTOR)
        if not PRECISIONS.fullmatch(self.precision):
            raise ValueError(
                f"precision {self.precision[:40]!r} must be a name such as bf16, or several names joined by +"
            )
        if (self.exchange == "servers") != any(self.servers_per_host):
            raise ValueError(
                "servers_per_host must have a server if the exchange is 'servers', and must have no server otherwise"
            )
        _ = self.shape

    @property
    def shape(self) -> Shape:
        """The hosts of its ranks and servers, with the links."""
        return Shape(self.ranks_per_host, self.racks, self.servers_per_host, self.rates)

    @property
    def ranks(self) -> int:
        """The number of training ranks."""
        return sum(self.ranks_per_host)

    @property
    def bytes_sent(self) -> float:
        """The bytes of one rank's gradients on the network."""
        return self.gradient_bytes / self.compression


def _between(name: str, value: float, least: float, most: float) -> None:
    if not (isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} {value!r} must be from {least:g} to {most:g}")


def _positive(name: str, value: float, most: float) -> None:
    if not (isfinite(value) and 0 < value <= most):
        raise ValueError(f"{name} {value!r} must be above 0 and at most {most:g}")


def encode(sample: Sample) -> bytes:
    """Return a sample as a line of JSON, with its newline."""
    return msgspec.json.encode(sample) + b"\n"


def decode(data: bytes, where: str) -> tuple[Sample, ...]:
    """Read samples, one per line; skips empty lines.

    Args:
        where: the file's name in messages.

    Raises:
        BadInput: a line is not a sample; the error names the line.
    """
    return tuple(_decoded(enumerate(data.split(b"\n"), 1), where))


def _decoded(lines: Iterable[tuple[int, bytes]], where: str) -> Iterable[Sample]:
    decoder = msgspec.json.Decoder(ready(Sample))
    for number, line in lines:
        if line.strip():
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise BadInput(
                    f"the line is not a measured run: {error}",
                    where=f"{where}:{number}",
                    hint="remove the line, or measure again with `gpurun scale`",
                ) from None


# The cost of a step: computation, communication, and the overlap of the two. Pure.


COMPUTE, SPREAD, AHEAD, BYTE = range(4)
"""Indices of parameters: seconds of compute; ranks' relative spread; compute before the first gradient is ready over
compute after it; seconds per byte of copies and sums."""

SHARPNESS = 6.0
"""How sharply hiding ends where exchange and the rest of the computation are equally long; ∞ would be a minimum."""

LINKS = tuple(LinkClass)


def latency_at(link: LinkClass) -> int:
    """Return the index of α, the seconds of one message."""
    return 4 + 2 * LINKS.index(link)


def inverse_at(link: LinkClass) -> int:
    """Return the index of 1/B: seconds per bit, or nominal rate over real rate if the nominal rate is known."""
    return 5 + 2 * LINKS.index(link)


PARAMETERS = 4 + 2 * len(LINKS)


@dataclass(frozen=True)
class ExchangeStage:
    """Consecutive messages.

    Attributes:
        messages: number of messages, one after the other.
        latencies: indices of the α of the links that each message may cross; the largest α counts.
        loads: bits on a link, or bits over its nominal rate, and the index of its 1/B; the slowest link counts.
        bytes: bytes that the busiest rank or server copies or sums.
    """

    messages: float
    latencies: tuple[int, ...]
    loads: tuple[tuple[float, int], ...]
    bytes: float


@dataclass(frozen=True)
class StepTraffic:
    """All inputs of a step's cost, except the parameters.

    Attributes:
        slowest: standard deviations from the mean to the expected slowest of the ranks.
    """

    slowest: float
    stages: tuple[ExchangeStage, ...]

    @property
    def links(self) -> frozenset[LinkClass]:
        """The classes of links that carry data."""
        return frozenset(LINKS[(at - 5) // 2] for stage in self.stages for _, at in stage.loads)


def traffic_of(shape: Shape, sent_bytes: float, exchange: Exchange, rated: frozenset[LinkClass]) -> StepTraffic:
    """Return the traffic of a gang of this shape in a step.

    Args:
        sent_bytes: bytes of one rank's gradients, after compression.
        rated: classes whose nominal rate the model uses; `shape.rates` contains it for the classes that the gang uses.
    """
    stages = _STAGES[exchange](shape, sent_bytes, rated) if shape.links else ()
    return StepTraffic(expected_slowest(shape.ranks), stages)


def expected_slowest(ranks: int) -> float:
    """Return the expected maximum of so many standard normal values, by Blom's formula."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def exchange_seconds(values: Sequence[float], traffic: StepTraffic) -> float:
    """Return the seconds of communication in a step, including hidden communication."""
    total = 0.0
    for stage in traffic.stages:
        total += stage.messages * max(values[at] for at in stage.latencies)
        total += max(load * values[at] for load, at in stage.loads) + stage.bytes * values[BYTE]
    return total


def compute_seconds(values: Sequence[float], traffic: StepTraffic) -> float:
    """Return the seconds until the slowest rank has computed."""
    return values[COMPUTE] * (1.0 + values[SPREAD] * traffic.slowest)


def step_seconds(values: Sequence[float], traffic: StepTraffic) -> float:
    """Return the seconds of a step."""
    return overlapped(values, compute_seconds(values, traffic), exchange_seconds(values, traffic))


def overlapped(values: Sequence[float], compute_s: float, exchange_s: float) -> float:
    """Return the seconds of computation, and of the part of the exchange that no computation hides."""
    short, long = sorted((exchange_s, compute_s / (1.0 + values[AHEAD])))
    hidden_s = short * (1.0 + (short / long) ** SHARPNESS) ** (-1.0 / SHARPNESS) if short else 0.0
    return float(compute_s + exchange_s - hidden_s)


def _stage(
    shape: Shape, messages: float, bits: Mapping[LinkClass, float], processed: float, rated: frozenset[LinkClass]
) -> ExchangeStage:
    loads = tuple((count / _bit_per_s(shape, link, rated), inverse_at(link)) for link, count in bits.items())
    return ExchangeStage(messages, tuple(latency_at(link) for link in bits), loads, processed)


def _bit_per_s(shape: Shape, link: LinkClass, rated: frozenset[LinkClass]) -> float:
    rate = shape.rates.of(link) if link in rated else None
    return 1.0 if rate is None else rate


def _between_hosts(shape: Shape, own: float, shared: float, rated: frozenset[LinkClass]) -> dict[LinkClass, float]:
    """Return the bits between hosts, by class.

    Args:
        own: bits on the busiest host's own link.
        shared: bits on the busiest rack's link. A host's own link also carries its part; the slower link counts.
    """
    bits = {LinkClass.RACK: own} if LinkClass.RACK in shape.links else {}
    if LinkClass.RACKS in shape.links:
        host_rate, rack_rate = shape.rates.rack, shape.rates.racks
        if host_rate and rack_rate and LinkClass.RACKS in rated:
            own *= rack_rate / host_rate
        bits[LinkClass.RACKS] = max(shared, own)
    return bits


def _ring(shape: Shape, sent_bytes: float, rated: frozenset[LinkClass]) -> tuple[ExchangeStage, ...]:
    """Return the stage of one ring of all ranks. A host's ranks are neighbours: one flow per direction leaves it."""
    if shape.ranks == 1:
        return ()
    volume = 2 * (shape.ranks - 1) / shape.ranks * sent_bytes
    bits = {LinkClass.HOST: 8 * volume} if max(shape.ranks_per_host) > 1 else {}
    bits |= _between_hosts(shape, 8 * volume, 8 * volume * shape.flows_between_racks, rated)
    return (_stage(shape, 2.0 * (shape.ranks - 1), bits, volume, rated),)


def _hierarchical(shape: Shape, sent_bytes: float, rated: frozenset[LinkClass]) -> tuple[ExchangeStage, ...]:
    """Return the stages of a ring inside each host, then a ring of hosts."""
    stages = []
    largest, hosts = max(shape.ranks_per_host), len(shape.ring)
    if largest > 1:
        volume = 2 * (largest - 1) / largest * sent_bytes
        stages.append(_stage(shape, 2.0 * (largest - 1), {LinkClass.HOST: 8 * volume}, volume, rated))
    if hosts > 1:
        volume = 2 * (hosts - 1) / hosts * sent_bytes
        bits = _between_hosts(shape, 8 * volume, 8 * volume * shape.flows_between_racks, rated)
        stages.append(_stage(shape, 2.0 * (hosts - 1), bits, volume, rated))
    return tuple(stages)


def _servers(shape: Shape, sent_bytes: float, rated: frozenset[LinkClass]) -> tuple[ExchangeStage, ...]:
    """Return the stage of parameter servers: each rank pushes its gradients and pulls the results once per step.

    All servers have equal parts. Links are full duplex, and pushes of one rank overlap with pulls of another. So in one
    direction a link carries the data that its servers receive and its ranks pull, and the same amount in the other.
    """
    servers = shape.servers_per_host
    part = sent_bytes / sum(servers)
    racks: dict[str, tuple[int, int]] = {}
    for ranks, count, rack in zip(shape.ranks_per_host, servers, shape.racks, strict=True):
        before = racks.get(rack, (0, 0))
        racks[rack] = (before[0] + ranks, before[1] + count)

    def inward(ranks: int, count: int) -> float:
        return 8 * part * (count * (shape.ranks - ranks) + ranks * (sum(servers) - count))

    hosts = list(zip(shape.ranks_per_host, servers, strict=True))
    own = max(inward(*host) for host in hosts)
    bits = _between_hosts(shape, own, max(inward(*rack) for rack in racks.values()), rated)
    if inside := max(ranks * count for ranks, count in hosts):
        bits[LinkClass.HOST] = 8 * part * inside
    return (_stage(shape, 2.0, bits, shape.ranks * part, rated),)


_STAGES: Mapping[Exchange, Callable[[Shape, float, frozenset[LinkClass]], tuple[ExchangeStage, ...]]] = {
    "ring": _ring, "hierarchical": _hierarchical, "servers": _servers
}  # fmt: skip


COVERAGE = 0.95
"""A range contains a run's value with this probability."""

LEAST_SPREAD = 0.02
"""The model's own relative error, as expected before the fit. Repeats of a configuration do not reduce it."""

COMPUTE_WEIGHT, EXCHANGE_WEIGHT = 0.5, 0.2
"""Weights of a profiler's values for parts of a step; the step's own time has weight 1."""


class Unknown(str, Enum):
    """The reason why there is no prediction."""

    NO_SAMPLES = "no samples"
    MIXED_SAMPLES = "mixed samples"
    LINK = "link class without a sample"
    RATE = "samples without the link's rate"
    EXCHANGE = "exchange without a sample"


class CannotPredict(BadInput):
    """The samples do not allow this prediction."""

    def __init__(self, reason: Unknown, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@dataclass(frozen=True)
class PairFigure:
    """A measurement of `gpurun bench` between two hosts, or inside one host."""

    link: LinkClass
    bit_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Range:
    """A value: the median, and bounds that contain a run's value with the probability `COVERAGE`."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The expected performance of a gang.

    Attributes:
        efficiency: images/s, divided by ranks times the images/s of one rank.
        host_efficiency: images/s per rank, divided by that of one host with as many ranks; None = no sample inside a
            host.
        exchange_s: median seconds of communication in a step, including hidden communication.
    """

    ranks: int
    step_s: Range
    images_per_s: Range
    efficiency: Range
    host_efficiency: Range | None
    exchange_s: float


def fit(samples: Iterable[Sample], figures: Iterable[PairFigure] = (), *, seed: int = 0) -> ScalingModel:
    """Fit the model.

    Args:
        samples: runs of one recipe with one launcher, batch and network.
        figures: measurements of single links. A class with a measurement counts as measured.

    Raises:
        CannotPredict: there are no samples, or they differ in a value that the model requires to be equal.
    """
    known = tuple(samples)
    if not known:
        raise CannotPredict(Unknown.NO_SAMPLES, "gpurun has no measured run", "measure with `gpurun scale` first")
    for name in ("launcher", "batch_per_rank", "gradient_bytes", "precision", "is_compiled", "exchange"):
        alike = known if name != "exchange" else [sample for sample in known if sample.shape.links]
        if len(values := {getattr(sample, name) for sample in alike}) > 1:
            shown = ", ".join(sorted(map(str, values))[:4])
            raise CannotPredict(
                Unknown.MIXED_SAMPLES, f"the measured runs differ in {name}: {shown}", f"choose runs with one {name}"
            )
    pairs = tuple(figures)
    rated = _rated(known)
    priors = _priors(known, rated, pairs)
    found = posterior.sample(_misfit(known, rated, priors), seed)
    draws = tuple((priors.values(z), spread) for z, spread in found.draws)
    return ScalingModel(known, pairs, rated, draws, found.effective, seed)


def _traffic(sample: Sample, rated: frozenset[LinkClass]) -> StepTraffic:
    return traffic_of(sample.shape, sample.bytes_sent, sample.exchange, rated)


def _rated(samples: Sequence[Sample]) -> frozenset[LinkClass]:
    """Return the classes of links whose nominal rate is known in every sample that uses them, and in at least one."""
    unrated = {
        link for sample in samples for link in _traffic(sample, frozenset()).links if sample.rates.of(link) is None
    }
    known = {link for sample in samples for link in LinkClass if sample.rates.of(link) is not None}
    return frozenset(known) - unrated


@dataclass(frozen=True)
class Priors:
    """Medians and spreads, as logarithms, of the parameters to which the samples are sensitive."""

    places: tuple[int, ...]
    medians: tuple[float, ...]
    spreads: tuple[float, ...]

    def values(self, z: Sequence[float]) -> tuple[float, ...]:
        """Return the parameters in the order of `gpurun.scaling.model`."""
        values = [1.0] * PARAMETERS
        for at, middle, spread, x in zip(self.places, self.medians, self.spreads, z, strict=True):
            values[at] = _bounded_exp(middle + spread * x)
        return tuple(values)


def _bounded_exp(power: float) -> float:
    """Return e to this power, or to ±200 beyond: products and quotients of a few such values stay finite."""
    return exp(max(-200.0, min(200.0, power)))


LATENCY_S = {LinkClass.HOST: 1e-5, LinkClass.RACK: 5e-5, LinkClass.RACKS: 6e-5}
BIT_PER_S = {LinkClass.HOST: 1e11, LinkClass.RACK: 1e10, LinkClass.RACKS: 1e10}


def _priors(samples: Sequence[Sample], rated: frozenset[LinkClass], figures: Sequence[PairFigure]) -> Priors:
    measured = {link for sample in samples for link in _traffic(sample, rated).links}
    links = sorted(measured | {figure.link for figure in figures}, key=LINKS.index)
    computes = [sample.compute_s for sample in samples if sample.compute_s]
    spreads = [sample.compute_spread for sample in samples if sample.compute_spread]
    rows = [
        (COMPUTE, median(computes) if computes else min(sample.step_s for sample in samples), 1.0),
        (SPREAD, median(spreads) if spreads else 0.03, 0.4 if spreads else 0.8),
        (AHEAD, 0.5, 1.2),
        (BYTE, 1e-10, 1.5),
    ]
    for link in links:
        pairs = [figure for figure in figures if figure.link is link]
        latency_s = median(pair.latency_s for pair in pairs) if pairs else LATENCY_S[link]
        rows.append((latency_at(link), max(latency_s, 1e-9), 1.0 if pairs else 2.0))
        rows.append((inverse_at(link), *_inverse_rate(samples, link, link in rated, pairs)))
    places, medians, widths = zip(*rows, strict=True)
    return Priors(places, tuple(map(log, medians)), widths)


def _inverse_rate(
    samples: Sequence[Sample], link: LinkClass, is_rated: bool, pairs: Sequence[PairFigure]
) -> tuple[float, float]:
    measured = median(max(pair.bit_per_s, 1.0) for pair in pairs) if pairs else None
    if not is_rated:
        return (1 / measured, 0.3) if measured else (1 / BIT_PER_S[link], 2.5)
    nominal = median(rate for sample in samples if (rate := sample.rates.of(link)))
    is_same = measured is not None and measured < 1.1 * nominal  # otherwise the link ran at another rate
    return (nominal / measured, 0.3) if measured is not None and is_same else (1.2, 0.25)


def _misfit(samples: Sequence[Sample], rated: frozenset[LinkClass], priors: Priors) -> posterior.Misfit:
    """Combine the runs of one configuration into one.

    Repeats average out the spread of runs. They do not average out the model's own error, which is the same in each.
    A figure with less weight is also less evidence of the spread: exact compute times do not make steps exact.
    """
    told: dict[tuple[str, StepTraffic], list[float]] = {}
    parts: dict[tuple[str, StepTraffic], tuple[Callable[[Sequence[float]], float], float]] = {}
    for sample in samples:
        traffic = _traffic(sample, rated)
        for name, value, computed, weight in _figures(sample, traffic):
            told.setdefault((name, traffic), []).append(log(value))
            parts[name, traffic] = (computed, weight)
    run = _run_spread(samples, [logs for (name, _), logs in told.items() if name == "step"])
    one = hypot(LEAST_SPREAD, run)
    rows = [
        (parts[key][0], parts[key][1] * one / hypot(LEAST_SPREAD, run / sqrt(len(logs))), fmean(logs))
        for key, logs in told.items()
    ]

    def residuals(z: Sequence[float]) -> list[float]:
        values = priors.values(z)
        return [weight * (measured - log(max(computed(values), 1e-12))) for computed, weight, measured in rows]

    count = fsum(weight**2 for _, weight in parts.values())
    return posterior.Misfit(len(priors.places), residuals, count, one)


def _figures(
    sample: Sample, traffic: StepTraffic
) -> Iterator[tuple[str, float, Callable[[Sequence[float]], float], float]]:
    yield "step", sample.step_s, lambda values: step_seconds(values, traffic), 1.0
    if sample.compute_s:
        yield "compute", sample.compute_s, lambda values: values[COMPUTE], COMPUTE_WEIGHT
    if sample.exchange_s and traffic.stages:
        yield "exchange", sample.exchange_s, lambda values: exchange_seconds(values, traffic), EXCHANGE_WEIGHT


def _run_spread(samples: Sequence[Sample], repeats: Sequence[Sequence[float]]) -> float:
    """Return the relative spread of runs: from the windows of single runs, and from the repeats of a configuration."""
    within = [
        1.4826 * median(abs(window_s / sample.step_s - 1) for window_s in sample.windows_s)
        for sample in samples
        if len(sample.windows_s) > 2
    ]
    expected = min(0.3, median(within) if within else LEAST_SPREAD)
    freedom = sum(len(logs) - 1 for logs in repeats)
    squares = fsum((len(logs) - 1) * variance(logs) for logs in repeats if len(logs) > 1)
    return sqrt((posterior.PRIOR_WEIGHT * expected**2 + squares) / (posterior.PRIOR_WEIGHT + freedom))


@dataclass(frozen=True)
class ScalingModel:
    """A fitted model.

    Attributes:
        samples, figures: the fitted data.
        rated: classes of links whose rate may differ from the samples.
        draws: parameters that are consistent with the samples, each with the relative spread of a run.
        effective: the equivalent number of independent draws.
    """

    samples: tuple[Sample, ...]
    figures: tuple[PairFigure, ...]
    rated: frozenset[LinkClass]
    draws: tuple[tuple[tuple[float, ...], float], ...]
    effective: float
    seed: int = 0

    @cached_property
    def links(self) -> frozenset[LinkClass]:
        """The classes of links that a run used or `gpurun bench` measured."""
        used = {link for sample in self.samples for link in _traffic(sample, self.rated).links}
        return frozenset(used | {figure.link for figure in self.figures})

    @cached_property
    def rates(self) -> LinkRates:
        """The median rate of each class in the samples."""
        of = {link: [rate for sample in self.samples if (rate := sample.rates.of(link))] for link in LinkClass}
        known = {link: median(rates) if rates else None for link, rates in of.items()}
        return LinkRates(known[LinkClass.HOST], known[LinkClass.RACK], known[LinkClass.RACKS])

    @cached_property
    def exchange(self) -> Exchange:
        """The ranks' exchange of gradients, from the samples with several ranks."""
        return next((sample.exchange for sample in self.samples if sample.shape.links), self.samples[0].exchange)

    def predict(
        self, shape: Shape, *, compression: float | None = None, exchange: Exchange | None = None
    ) -> Prediction:
        """Predict a gang of this shape. Uses the samples' rates for rates that the shape does not contain.

        Args:
            compression: gradient bytes over bytes sent; None = as in the samples.
            exchange: the gang's exchange of gradients, if it is known.

        Raises:
            CannotPredict: no sample has such links or such an exchange, or no sample contains the links' rate.
        """
        sample = self.samples[0]
        factor = sample.compression if compression is None else compression
        if not LEAST_FACTOR <= factor <= MOST_FACTOR:
            raise BadInput(f"compression {factor!r} must be from {LEAST_FACTOR:g} to {MOST_FACTOR:g}")
        sent = sample.gradient_bytes / factor
        self._refuse_unknown(shape, sent, exchange)
        there = shape.on(self._filled(shape.rates))
        traffic = traffic_of(there, sent, self.exchange, self.rated)
        exchanges = [exchange_seconds(values, traffic) for values, _ in self.draws]
        steps = [
            overlapped(values, compute_seconds(values, traffic), exchange_s)
            for (values, _), exchange_s in zip(self.draws, exchanges, strict=True)
        ]
        noise = self._noise(sqrt(1 + self._octaves(there, sent)))
        images = sample.batch_per_rank * shape.ranks
        host = self._host_steps(there, sent)
        return Prediction(
            ranks=shape.ranks,
            step_s=_range(steps, noise),
            images_per_s=_range([images / step for step in steps], noise),
            efficiency=_range([v[COMPUTE] / s for (v, _), s in zip(self.draws, steps, strict=True)], noise),
            host_efficiency=None if host is None else _range([h / s for h, s in zip(host, steps, strict=True)], noise),
            exchange_s=median(exchanges),
        )

    def _filled(self, rates: LinkRates) -> LinkRates:
        mine = self.rates
        return LinkRates(rates.host or mine.host, rates.rack or mine.rack, rates.racks or mine.racks)

    def _refuse_unknown(self, shape: Shape, sent: float, wanted: Exchange | None) -> None:
        exchange = self.exchange
        if (exchange == "servers") != any(shape.servers_per_host):
            has = "no parameter servers" if exchange == "servers" else "parameter servers"
            message = f"the job has {has}, but the measured runs used the exchange {exchange!r}"
            raise CannotPredict(Unknown.EXCHANGE, message, f"measure a job that has {has} with `gpurun scale`")
        if wanted not in (None, exchange) and shape.links:
            message = f"the job's exchange is {wanted!r}, but the measured runs used the exchange {exchange!r}"
            hint = f"measure a job with the exchange {wanted!r} with `gpurun scale`"
            raise CannotPredict(Unknown.EXCHANGE, message, hint)
        used = traffic_of(shape, sent, exchange, frozenset()).links
        for link in sorted(used - self.links, key=LINKS.index):
            hint = f"measure a job that uses links {link.value} with `gpurun scale`"
            raise CannotPredict(Unknown.LINK, f"no measured run used links {link.value}", hint)
        for link in sorted(used - self.rated, key=LINKS.index):
            if shape.rates.of(link) not in (None, self.rates.of(link)):
                message = f"the measured runs do not say the rate of the links {link.value}"
                hint = "measure again with `gpurun scale`, and give the rate of the links"
                raise CannotPredict(Unknown.RATE, message, hint)

    def _octaves(self, shape: Shape, sent: float) -> float:
        """Return how far a gang is outside the measured range: doublings of ranks, of links' rates, of bytes."""
        ranks = max(0.0, log2(shape.ranks / max(sample.ranks for sample in self.samples)))
        total = ranks + _outside(sent, [sample.bytes_sent for sample in self.samples])
        for link in traffic_of(shape, sent, self.exchange, self.rated).links & self.rated:
            if (rate := shape.rates.of(link)) is not None:
                total += _outside(rate, [known for sample in self.samples if (known := sample.rates.of(link))])
        return total

    def _noise(self, widened: float) -> list[float]:
        """Return a factor per draw: the deviation of one run from the model."""
        return [
            _bounded_exp(widened * spread * away) for (_, spread), away in zip(self.draws, self._normals, strict=True)
        ]

    @cached_property
    def _normals(self) -> list[float]:
        """A standard normal value per draw."""
        normal = NormalDist()
        return [normal.inv_cdf(u) for _, u in posterior.sequence(2, self.seed, len(self.draws))]

    def _host_steps(self, shape: Shape, sent: float) -> list[float] | None:
        """Return the seconds of a step on one host for each draw; None if no sample covers this."""
        alone = Shape((max(shape.ranks_per_host),), ("",), rates=shape.rates)
        has_servers = self.exchange == "servers"
        traffic = traffic_of(alone, sent, "ring" if has_servers else self.exchange, self.rated)
        if not traffic.links <= self.links or (has_servers and traffic.stages):
            return None
        return [step_seconds(values, traffic) for values, _ in self.draws]


def _outside(value: float, measured: Sequence[float]) -> float:
    return max(0.0, log2(value / max(measured)), log2(min(measured) / value)) if measured else 0.0


def _range(values: Sequence[float], noise: Sequence[float]) -> Range:
    """Return a range. The bounds include a run's spread; the median is the model's own."""
    middle = median(values)
    noisy = sorted(value * factor for value, factor in zip(values, noise, strict=True))
    tail = (1 - COVERAGE) / 2
    low, high = noisy[int(tail * len(noisy))], noisy[min(len(noisy) - 1, int((1 - tail) * len(noisy)))]
    return Range(min(low, middle), middle, max(high, middle))

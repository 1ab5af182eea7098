"""Fit the cost of a step to measured runs, and predict other gangs and links, with a range. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import exp, fsum, hypot, log, log2, sqrt
from statistics import NormalDist, fmean, median, variance

from gpurun.errors import BadInput
from gpurun.scaling import cost, posterior
from gpurun.scaling.cost import StepTraffic, traffic_of
from gpurun.scaling.samples import LEAST_FACTOR, MOST_FACTOR, Exchange, Sample
from gpurun.scaling.shape import LinkClass, LinkRates, Shape

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
        """Return the parameters in the order of `gpurun.scaling.cost`."""
        values = [1.0] * cost.PARAMETERS
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
    links = sorted(measured | {figure.link for figure in figures}, key=cost.LINKS.index)
    computes = [sample.compute_s for sample in samples if sample.compute_s]
    spreads = [sample.compute_spread for sample in samples if sample.compute_spread]
    rows = [
        (cost.COMPUTE, median(computes) if computes else min(sample.step_s for sample in samples), 1.0),
        (cost.SPREAD, median(spreads) if spreads else 0.03, 0.4 if spreads else 0.8),
        (cost.AHEAD, 0.5, 1.2),
        (cost.BYTE, 1e-10, 1.5),
    ]
    for link in links:
        pairs = [figure for figure in figures if figure.link is link]
        latency_s = median(pair.latency_s for pair in pairs) if pairs else LATENCY_S[link]
        rows.append((cost.latency_at(link), max(latency_s, 1e-9), 1.0 if pairs else 2.0))
        rows.append((cost.inverse_at(link), *_inverse_rate(samples, link, link in rated, pairs)))
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
    yield "step", sample.step_s, lambda values: cost.step_seconds(values, traffic), 1.0
    if sample.compute_s:
        yield "compute", sample.compute_s, lambda values: values[cost.COMPUTE], COMPUTE_WEIGHT
    if sample.exchange_s and traffic.stages:
        yield "exchange", sample.exchange_s, lambda values: cost.exchange_seconds(values, traffic), EXCHANGE_WEIGHT


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
        exchanges = [cost.exchange_seconds(values, traffic) for values, _ in self.draws]
        steps = [
            cost.overlapped(values, cost.compute_seconds(values, traffic), exchange_s)
            for (values, _), exchange_s in zip(self.draws, exchanges, strict=True)
        ]
        noise = self._noise(sqrt(1 + self._octaves(there, sent)))
        images = sample.batch_per_rank * shape.ranks
        host = self._host_steps(there, sent)
        return Prediction(
            ranks=shape.ranks,
            step_s=_range(steps, noise),
            images_per_s=_range([images / step for step in steps], noise),
            efficiency=_range([v[cost.COMPUTE] / s for (v, _), s in zip(self.draws, steps, strict=True)], noise),
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
        for link in sorted(used - self.links, key=cost.LINKS.index):
            hint = f"measure a job that uses links {link.value} with `gpurun scale`"
            raise CannotPredict(Unknown.LINK, f"no measured run used links {link.value}", hint)
        for link in sorted(used - self.rated, key=cost.LINKS.index):
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
        return [cost.step_seconds(values, traffic) for values, _ in self.draws]


def _outside(value: float, measured: Sequence[float]) -> float:
    return max(0.0, log2(value / max(measured)), log2(min(measured) / value)) if measured else 0.0


def _range(values: Sequence[float], noise: Sequence[float]) -> Range:
    """Return a range. The bounds include a run's spread; the median is the model's own."""
    middle = median(values)
    noisy = sorted(value * factor for value, factor in zip(values, noise, strict=True))
    tail = (1 - COVERAGE) / 2
    low, high = noisy[int(tail * len(noisy))], noisy[min(len(noisy) - 1, int((1 - tail) * len(noisy)))]
    return Range(min(low, middle), middle, max(high, middle))


def at_rate(rates: LinkRates, link: LinkClass, bit_per_s: float) -> LinkRates:
    """Return rates with a change in one class. Raises ValueError for an invalid rate."""
    return replace(rates, **{link.name.lower(): bit_per_s})

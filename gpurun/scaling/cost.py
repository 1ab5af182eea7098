"""The cost of a step: computation, communication, and the overlap of the two. Pure.

Sources: a rank sends gradients during its backward pass, from the first one that is ready (wait-free backpropagation:
Zhang et al., USENIX ATC 2017; Shi et al., MG-WFBP, INFOCOM 2019). So a step hides at most that part of the exchange
that fits into the rest of the computation. A ring costs 2(p-1)α + 2(p-1)/p · n/B (Patarasuk and Yuan, 2009; Thakur et
al., 2005). The slowest of p ranks needs the expected maximum of p normal times (Blom, 1958).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from gpurun.scaling.samples import Exchange
from gpurun.scaling.shape import LinkClass, Shape

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

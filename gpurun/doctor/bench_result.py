"""Interpret a benchmark: bus bandwidth, the matrix of links, slow hosts and links. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpurun.doctor.findings import Finding, Severity
from gpurun.errors import GpurunError

SLOW = 0.7
"""A link is slow below this part of what links like it do: honest links of one kind differ by a few percent."""

STANDARD_DEVIATIONS = 1.4826
"""A standard deviation of normal figures is so many median deviations: where good links differ much, more is needed."""

FAR_BELOW_RATE = 0.15
"""Without links to compare with, below this part of its own rate …"""

ONE_STREAM_GBIT_PER_S = 40.0
"""… or of what one TCP stream can be expected to do on a faster link."""

VERSION = 1


@dataclass(frozen=True)
class Link:
    """One direction between two hosts.

    Attributes:
        gbit_per_s: payload that arrived, Gbit/s.
        latency_us: half a round trip of one byte, microseconds.
    """

    source: str
    target: str
    gbit_per_s: float
    latency_us: float


@dataclass(frozen=True)
class Collective:
    """One allreduce size.

    Attributes:
        engine: ``mpi`` (host memory), ``horovod``, or ``horovod, NCCL``.
        time_us: of one allreduce, the slowest rank's mean.
    """

    engine: str
    size_bytes: int
    time_us: float
    ranks: int

    @property
    def algorithm_gbyte_per_s(self) -> float:
        """Size over time, GB/s (10⁹ bytes)."""
        return self.size_bytes / self.time_us / 1e3 if self.time_us else 0.0

    @property
    def bus_gbyte_per_s(self) -> float:
        """Algorithm bandwidth × 2·(n−1)/n, GB/s: comparable with the link's own rate whatever the number of ranks.

        Source: nccl-tests, `doc/PERFORMANCE.md`, "AllReduce".
        """
        return self.algorithm_gbyte_per_s * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class BenchResult:
    """One run. `hosts` are in rank order; `skipped` maps an engine to the reason it was not measured."""

    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    collectives: tuple[Collective, ...]
    skipped: Mapping[str, str]
    mpi: str = ""


def result_from_document(document: Mapping[str, object], hosts: Sequence[str], host_of: Sequence[str]) -> BenchResult:
    """Read the document that the job wrote.

    Args:
        hosts: the gang's hosts in rank order, each once.
        host_of: rank → host.

    Raises:
        GpurunError: the document does not fit this version of the job.
    """
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise GpurunError(f"the benchmark's result has version {version!r}, not {VERSION}")
    try:
        links = tuple(_link(entry, host_of) for entry in _list(document["pairs"]))
        ranks = int(document["world"])  # type: ignore[call-overload]
        collectives = tuple(
            Collective(str(entry["engine"]), int(entry["bytes"]), float(entry["time_us"]), ranks)
            for entry in _list(document["allreduce"])
        )
        skipped = {str(name): str(why) for name, why in dict(document["skipped"]).items()}  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise GpurunError(f"the benchmark's result is not valid: {type(error).__name__}: {error}") from None
    return BenchResult(tuple(hosts), links, collectives, skipped, str(document.get("mpi", "")))


def _list(value: object) -> list[Mapping[str, float]]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _link(entry: Mapping[str, float], host_of: Sequence[str]) -> Link:
    took_s = float(entry["seconds"])
    rate = float(entry["bytes"]) * 8 / took_s / 1e9 if took_s > 0 else 0.0
    return Link(host_of[int(entry["source"])], host_of[int(entry["target"])], rate, float(entry["latency_us"]))


def slow_links(result: BenchResult, racks: Mapping[str, str], rates: Mapping[str, float]) -> tuple[Finding, ...]:
    """Find hosts and links that are slower than similar ones.

    Compares links with links between the same two racks (for links within a rack: in all racks). If most links into or
    out of a host are slow, reports the host once instead of each link.

    Args:
        racks: host → rack.
        rates: host → the known rate of its fabric interface, Gbit/s.
    """
    slow = dict(_below_their_like(result.links, racks))
    for link in result.links:
        rate = min(rates.get(link.source, 0.0), rates.get(link.target, 0.0), ONE_STREAM_GBIT_PER_S)
        same_rack = racks.get(link.source) == racks.get(link.target)
        if link not in slow and same_rack and rate and link.gbit_per_s < rate * FAR_BELOW_RATE:
            slow[link] = rate
    return tuple(told("slow-link", slow, result.links, rates))


def _below_their_like(links: Iterable[Link], racks: Mapping[str, str]) -> Iterator[tuple[Link, float]]:
    """Yield slow links, each with the usual rate of similar links."""
    kinds: dict[tuple[str, ...], list[Link]] = {}
    for link in links:
        ends = sorted((racks.get(link.source, ""), racks.get(link.target, "")))
        kinds.setdefault(("within a rack",) if ends[0] == ends[1] else tuple(ends), []).append(link)
    for alike in kinds.values():
        good = _good(alike)
        usual = median(good)
        spread = STANDARD_DEVIATIONS * median(abs(figure - usual) for figure in good)
        limit = min(usual * SLOW, usual - 3 * spread)
        yield from ((link, usual) for link in alike if link.gbit_per_s < limit)


def _good(links: Sequence[Link]) -> list[float]:
    """Return the figures that show how fast links of this kind are.

    A bad host slows 2·(n−1) links, which may be more than half. So use a link only if it is near the median of each
    host's best links.
    """
    best: dict[str, float] = {}
    for link in links:
        for host in (link.source, link.target):
            best[host] = max(best.get(host, 0.0), link.gbit_per_s)
    near = median(best.values()) * SLOW
    return [link.gbit_per_s for link in links if link.gbit_per_s >= near]


def told(
    check: str, slow: Mapping[Link, float], links: Sequence[Link], rates: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield findings about slow links (link → usual rate). Combines a host's links if the host is to blame."""
    left = dict(slow)
    while (worst := _worst_host(left, links)) is not None:
        host, mine = worst
        usual = median(left[link] for link in mine)
        got = median(link.gbit_per_s for link in mine)
        ways = {"sends" if link.source == host else "receives" for link in mine}
        does = "sends and receives" if len(ways) == 2 else next(iter(ways))
        own = f"; the interface's nominal rate is {rates[host]:g} Gbit/s" if rates.get(host) else ""
        evidence = f"the host {does} only {got:.2f} Gbit/s, but {usual:.2f} Gbit/s is usual{own}"
        remedy = "check the cable, transceiver and switch port, and run: gpurun doctor " + host
        yield Finding(check, Severity.ERROR, (host,), evidence, remedy)
        for link in mine:
            del left[link]
    for link, usual in left.items():
        sent = f"{link.source} sends only {link.gbit_per_s:.2f} Gbit/s to {link.target}"
        evidence = f"{sent}, but {usual:.2f} Gbit/s is usual"
        remedy = f"check the path from {link.source} to {link.target} with traceroute and the counters of the switches"
        ends = (link.source, link.target)
        yield Finding(check, Severity.ERROR, ends, evidence, remedy, links=(ends,))


def _worst_host(slow: Mapping[Link, float], links: Sequence[Link]) -> tuple[str, list[Link]] | None:
    """Return the host with most of its links slow in one direction or both, and those links; None if there is none.

    Requires at least two slow links: with one, either end or the path may be the cause.
    """
    best: tuple[float, int, str, list[Link]] | None = None
    for host in {end for link in slow for end in (link.source, link.target)}:
        for ends in ((True, False), (False, True), (True, True)):
            all_of = [one for one in links if (ends[0] and one.source == host) or (ends[1] and one.target == host)]
            mine = [one for one in all_of if one in slow]
            part = len(mine) / len(all_of) if all_of else 0.0
            if len(mine) >= 2 and part > 0.6 and (best is None or (part, len(mine), host) > best[:3]):
                best = (part, len(mine), host, mine)
    return (best[2], best[3]) if best else None

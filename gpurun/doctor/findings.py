"""Findings of checks: the problem, the hosts, the evidence and the remedy; errors of the NVIDIA driver; slow links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Literal

from gpurun.errors import GpurunError
from gpurun.inventory.hostset import quoted


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Jobs on this host fail, hang or run very slowly."""
    WARNING = "warning"
    """Jobs run, but too slowly or not safely, or the inventory is wrong."""
    NOTE = "note"
    """A remark, not a problem. Never makes a host unhealthy."""


@dataclass(frozen=True)
class Finding:
    """A problem on hosts.

    Attributes:
        check: the stable name of the check, such as ``link-rate``.
        evidence: what gpurun saw, with numbers.
        remedy: the proposed repair, if possible a command.
        gpus: GPU indices by host, if the problem concerns some GPUs only.
        links: from and to, if the problem concerns links only.
    """

    check: str
    severity: Severity
    hosts: tuple[str, ...]
    evidence: str
    remedy: str = ""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()

    @property
    def is_fault(self) -> bool:
        """Return whether the finding makes its hosts unhealthy."""
        return self.severity is not Severity.NOTE


MOST_LETTERS = 1000


def one_line(said: str) -> str:
    """Return a host's words fit to be printed and stored: one line without control characters, a screen at most."""
    line = "".join(letter if letter.isprintable() else " " for letter in said[: 4 * MOST_LETTERS])
    return " ".join(line.split())[:MOST_LETTERS]


_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the worst first, and merge findings that differ only in their hosts.

    In a remedy, ``{hosts}`` becomes the hosts, quoted for a shell.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.check, finding.evidence, finding.remedy), []).append(finding)
    found = [_union(group) for group in groups.values()]
    return tuple(sorted(found, key=lambda finding: (_ORDER[finding.severity], finding.check, finding.hosts)))


def unhealthy(findings: Iterable[Finding]) -> frozenset[str]:
    """Return hosts with at least one error or warning."""
    return frozenset(host for finding in findings if finding.is_fault for host in finding.hosts)


def _union(group: list[Finding]) -> Finding:
    first = group[0]
    hosts = tuple(dict.fromkeys(host for finding in group for host in finding.hosts))
    return Finding(
        first.check,
        first.severity,
        hosts,
        first.evidence,
        first.remedy.replace("{hosts}", quoted(hosts)),
        {host: gpus for finding in group for host, gpus in finding.gpus.items()},
        tuple(dict.fromkeys(link for finding in group for link in finding.links)),
    )


# Xid errors of NVIDIA's driver: caused by the hardware or by the program, and NVIDIA's advice. Data.


Blame = Literal["hardware", "host", "program", "unclear"]


@dataclass(frozen=True)
class Xid:
    """The meaning of one number.

    Attributes:
        blame: ``hardware`` takes the host out of use. After ``host``, gpurun restarts the gang on other hosts, but
            other gangs may use the host. ``program`` and ``unclear`` do neither.
        fatal: the GPU stops computing for its user, so gpurun stops the gang immediately, before its other ranks time
            out.
        advice: NVIDIA's advice to the operator; "" = none, or more than a sentence.
    """

    meaning: str
    blame: Blame
    fatal: bool = False
    advice: str = ""


_RESET = "reset the GPU"
_CHECK = "check the program"
_SANITIZE = "run the program under compute-sanitizer"

XIDS: Mapping[int, Xid] = {
    8: Xid("GPU stopped processing", "unclear"),
    11: Xid("invalid or corrupted push buffer stream", "program", advice=_CHECK),
    13: Xid("graphics engine exception, such as an array index out of range in a kernel", "program", advice=_SANITIZE),
    25: Xid("invalid or illegal push buffer stream", "program", advice=_CHECK),
    31: Xid("GPU memory page fault: a program used an invalid address", "program", advice=_SANITIZE),
    32: Xid("invalid or corrupted push buffer stream, mostly because of a bad PCI bus", "host"),
    37: Xid("driver firmware error", "unclear"),
    38: Xid("driver firmware error", "unclear"),
    43: Xid("GPU stopped processing because of a fault in a program", "program"),
    44: Xid("graphics engine fault during a context switch", "unclear"),
    45: Xid("a program was ended, or cleaned up after an earlier error", "program"),
    46: Xid("GPU stopped processing", "hardware", fatal=True, advice=_RESET),
    48: Xid("uncorrectable double bit memory error", "hardware", fatal=True, advice=_RESET),
    54: Xid("auxiliary power is not connected to the GPU board", "hardware", advice="check the board's power cables"),
    61: Xid("internal micro-controller warning", "unclear"),
    62: Xid("internal micro-controller halt", "hardware", fatal=True, advice=_RESET),
    63: Xid("a memory page was retired or a row remapped, with effect at the next reset", "unclear"),
    64: Xid("the GPU could not retire a memory page or remap a row", "hardware", advice=_RESET),
    66: Xid("illegal access by the driver", "unclear"),
    67: Xid("illegal access by the driver", "unclear"),
    68: Xid("video decoder exception", "program"),
    69: Xid("graphics engine class error", "program", advice=_CHECK),
    74: Xid("NVLink error, of this GPU or the one at the other end", "hardware", fatal=True, advice=_RESET),
    79: Xid("GPU has fallen off the bus", "hardware", fatal=True, advice="reboot the host"),
    80: Xid("corrupted data sent to the GPU", "program", advice=_CHECK),
    92: Xid("high rate of single bit memory errors", "unclear"),
    94: Xid("contained memory error: the affected programs must start again", "host", fatal=True,
            advice=f"{_RESET} when convenient"),
    95: Xid("uncontained memory error", "hardware", fatal=True, advice=_RESET),
    109: Xid("context switch timeout", "host", advice=_RESET),
    110: Xid("security fault, which usually means failing hardware", "hardware", fatal=True, advice=_RESET),
    119: Xid("GSP firmware did not answer", "hardware", fatal=True, advice=_RESET),
    120: Xid("GSP firmware error", "hardware", fatal=True, advice=_RESET),
    121: Xid("corrected errors on the link to the CPU", "unclear"),
    136: Xid("NVLink training failed", "hardware", advice=_RESET),
    137: Xid("illegal access to another GPU over NVLink", "program", advice=_SANITIZE),
    140: Xid("unrecovered memory error", "hardware", fatal=True, advice=_RESET),
    141: Xid("CUDA fast path error", "unclear"),
    143: Xid("GPU could not be initialised", "hardware", fatal=True, advice=_RESET),
    154: Xid("the recovery action for another Xid changed", "unclear"),
    155: Xid("an NVLink was taken down by software", "unclear"),
    156: Xid("a resource was retired, with effect at the next reset", "unclear"),
    157: Xid("a resource could not be retired", "unclear"),
    158: Xid("fatal timeout of the GPU", "hardware", fatal=True, advice=_RESET),
    **dict.fromkeys((39, 40, 41, *range(70, 73), *range(75, 78), 85, *range(126, 136)),
                    Xid("copy engine error", "unclear")),
    **dict.fromkeys((60, *range(82, 85), 86, 88, 89, *range(96, 106), 139, 142),
                    Xid("video or image engine error", "unclear")),
    **dict.fromkeys(range(144, 151), Xid("NVLink error, with details in the NVLink registers", "unclear")),
    **dict.fromkeys((160, 161), Xid("a memory channel was retired, or could not be retired", "unclear")),
    **dict.fromkeys((171, 172), Xid("details of the memory error of an Xid 48", "unclear")),
}  # fmt: skip

UNKNOWN = Xid("gpurun does not know the meaning of this Xid", "unclear")


def xid(number: int) -> Xid:
    """Return the meaning of a number. An unlisted number blames nobody."""
    return XIDS.get(number, UNKNOWN)


# Interpret a benchmark: bus bandwidth, the matrix of links, slow hosts and links. Pure.


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
    return tuple(link_findings("slow-link", slow, result.links, rates))


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


def link_findings(
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

"""The history of link benchmarks, and links that have become slower."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpurun.doctor.bench_result import Link, told
from gpurun.doctor.findings import Finding
from gpurun.state import durable
from gpurun.state.change_lock import change_lock
from gpurun.state.path import StatePath

KEPT_RUNS = 200
COMPARED_RUNS = 10

FEW_RUNS = 3
SLOWER, MUCH_SLOWER = 0.7, 0.5
"""Below this part of the median of earlier runs a link has become slower; the second while there are few of them."""


@dataclass(frozen=True)
class Run:
    """One benchmark. `time_s`: when, seconds since 1970."""

    time_s: float
    links: tuple[Link, ...]


def history_file(home: Path) -> StatePath:
    """Return the file that keeps runs below the state directory: one JSON document per line."""
    return StatePath(home) / "bench" / "links.jsonl"


def append(home: Path, run: Run) -> None:
    """Add a run, and remove the oldest beyond `KEPT_RUNS`. Several processes may do so at the same time."""
    path = history_file(home)
    durable.make_folder(path.parent)
    with change_lock(home, "bench.lock"):
        lines = path.read_text().splitlines() if path.exists() else []
        links = [[link.source, link.target, round(link.gbit_per_s, 4), round(link.latency_us, 2)] for link in run.links]
        lines = [*lines, json.dumps({"time_s": run.time_s, "links": links})][-KEPT_RUNS:]
        durable.write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def read(home: Path) -> tuple[Run, ...]:
    """Read runs, oldest first. Skips damaged lines.

    Raises:
        StateError: the file cannot be read.
    """
    try:
        text = history_file(home).read_text()
    except FileNotFoundError:
        return ()
    return tuple(run for line in text.splitlines() if (run := _run(line)) is not None)


def _run(line: str) -> Run | None:
    try:
        document = json.loads(line)
        links = tuple(
            Link(str(source), str(target), float(rate), float(latency))
            for source, target, rate, latency in document["links"]
        )
        return Run(float(document["time_s"]), links)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


FRESH_S = 7 * 86400.0
"""`gpurun doctor` does not judge a link by figures that are older."""


def slower(runs: Sequence[Run], hosts: Iterable[str], *, since_s: float = 0.0) -> tuple[Finding, ...]:
    """Find links of these hosts whose last figure is well below that of earlier runs.

    Args:
        since_s: judge only links that were measured after this, seconds since 1970.
    """
    wanted = frozenset(hosts)
    figures: dict[tuple[str, str], list[Link]] = {}
    fresh = {(link.source, link.target) for run in runs if run.time_s >= since_s for link in run.links}
    for run in runs:
        for link in run.links:
            if link.source in wanted and link.target in wanted and (link.source, link.target) in fresh:
                figures.setdefault((link.source, link.target), []).append(link)
    last = [links[-1] for links in figures.values()]
    usual = {links[-1]: _before(links) for links in figures.values() if len(links) > 1}
    slow = {link: before for link, before in usual.items() if link.gbit_per_s < before * _part(figures, link)}
    return tuple(told("link-history", slow, last, {}))


def _before(links: Sequence[Link]) -> float:
    return median(link.gbit_per_s for link in links[-COMPARED_RUNS - 1 : -1])


def _part(figures: Mapping[tuple[str, str], Sequence[Link]], link: Link) -> float:
    return SLOWER if len(figures[link.source, link.target]) > FEW_RUNS else MUCH_SLOWER

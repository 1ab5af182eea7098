"""What a rank measures, in any framework: times of steps, bytes on the network, one JSON file. Needs no framework."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import choices
import models

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

NET = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")


def sent_counters(net: Path = NET, infiniband: Path = INFINIBAND) -> dict[str, int]:
    """Bytes that this host has sent so far, over each interface of its network namespace and each HCA, but for ``lo``.

    Bytes of RDMA pass the interface's own counter; an HCA counts them in units of four bytes.
    """
    files = [(file, 1) for file in net.glob("*/statistics/tx_bytes") if file.parts[-3] != "lo"]
    files += [(file, 4) for file in infiniband.glob("*/ports/*/counters/port_xmit_data")]
    return {str(file): _number(file) * unit for file, unit in files}


def sent_bytes(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes sent between two looks. Interfaces of other jobs' containers come and go meanwhile: those do not count."""
    return sum(max(0, after[name] - count) for name, count in before.items() if name in after)


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one span lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile; of few values the least and the most."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def timeline_s(text: str) -> list[tuple[float, float]]:
    """When collective operations ran, in seconds, from a timeline that Horovod has written.

    Horovod traces each tensor as a process: ``B`` begins an activity and ``E`` ends the innermost one. Negotiation
    is waiting for other ranks, not exchange. A timeline that is still open lacks its last bracket.
    """
    begun: dict[object, list[tuple[str, float]]] = {}
    spans = []
    for event in _objects(text):
        try:
            phase, at, who = event["ph"], float(event.get("ts", 0)) / 1e6, event["pid"]
        except (ValueError, TypeError, KeyError):
            continue
        if phase == "B":
            begun.setdefault(who, []).append((str(event.get("name", "")), at))
        elif phase == "E" and begun.get(who):
            name, begin = begun[who].pop()
            if name.endswith("ALLREDUCE") and not name.startswith("NEGOTIATE") and name != "ALLREDUCE":
                spans.append((begin, at))
    return spans


def _objects(text: str) -> Iterator[dict[str, object]]:
    """The JSON objects in a text, as far as they are whole, whatever stands between them."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield found


class Steps:
    """Times this rank's steps, drops the warm-up, tells gpurun each rate.

    Attributes:
        count: the measured steps. With `--seconds`, the warm-up's last step says how many they are.
        items: images or tokens of a step; `unit` says which.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.count, self.warmup, self.seconds = arguments.steps, arguments.warmup, arguments.seconds
        self.items = models.items(arguments.model, arguments.batch, arguments.sequence)
        self.unit = models.unit(arguments.model)
        self.times_s: list[float] = []
        self.sent = 0

    def run(self, step, agreed=lambda count: count) -> None:
        """Run `step` for the warm-up and the measured steps; it returns when its work is done.

        `agreed` returns the most of what all ranks give it: each must take as many steps as the others.
        """
        warm_s = [self._timed(step, number) for number in range(self.warmup)]
        if self.seconds:
            self.count = agreed(choices.steps_for(self.seconds, warm_s[-1]))
            self._timed(step, self.warmup)  # the ranks' agreement emptied the GPU's queue: this step fills it again
            self.warmup += 1
        before = sent_counters()
        for number in range(self.warmup, self.last):
            self.times_s.append(self._timed(step, number))
            tell(number, **{f"{self.unit}_per_s": self.items / self.times_s[-1]})
        self.sent = sent_bytes(before, sent_counters())

    def _timed(self, step, number: int) -> float:
        began = time.perf_counter()
        step()
        took_s = time.perf_counter() - began
        if gpurun:
            gpurun.progress(number, of=self.last)
        return took_s

    @property
    def last(self) -> int:
        """The number behind the last step's."""
        return self.warmup + self.count

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def rate(self) -> float:
        """Images or tokens per second of this rank."""
        return self.items / self.step_s


def way_of_training(arguments: argparse.Namespace) -> dict[str, float]:
    """Precision and compiling as metrics, which are numbers: `gpurun scale` keeps runs apart that differ in them."""
    return {f"precision_{arguments.precision}": 1.0, "compiled": float(arguments.compile)}


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    """What was trained, for a rank's file."""
    names = ("model", "batch", "sequence", "precision", "channels_last")
    return {**{name: getattr(arguments, name) for name in names}, "compiled": arguments.compile}


def median_s(work, count: int) -> float:
    """The median time that `work` takes, the first time left out."""
    times = []
    for _ in range(count + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def tell(step: int, **metrics: float | None) -> None:
    """Report metrics to gpurun, where it runs the job."""
    if gpurun:
        gpurun.report(step, **{name: value for name, value in metrics.items() if value is not None})


def write(outputs: Path | None, rank: str, document: dict[str, object]) -> None:
    """One JSON file for a rank, and one line of it on stdout."""
    document = {"rank": rank, "host": socket.gethostname(), **document}
    print(json.dumps(document) + "\n", end="", flush=True)
    if outputs:
        part = outputs / f".rank-{rank}.json"
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(outputs / f"rank-{rank}.json")


def outputs_folder() -> Path | None:
    folder = os.environ.get("GPURUN_OUTPUTS")
    return Path(folder) if folder else None


def watch_bytes(every_s: float = 0.25) -> list[tuple[float, dict[str, int]]]:
    """A list that grows: when, and what this host's counters said. For ranks that serve others."""
    seen: list[tuple[float, dict[str, int]]] = []

    def look() -> None:
        while True:
            seen.append((time.time(), sent_counters()))
            time.sleep(every_s)

    threading.Thread(target=look, daemon=True).start()
    return seen

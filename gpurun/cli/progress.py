"""Progress of an image or a data set to hosts: a bar per host on a terminal, otherwise a line every 5 s."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gpurun.cli.printing import duration, printable, say
from gpurun.cli.tables import console
from gpurun.quantities.counts import count

LINE_EVERY_S = 5.0
MOST_BARS = 16


class ShipProgress:
    """Shows the progress of a copy to hosts. Beyond `MOST_BARS` hosts, one bar shows the sum.

    Attributes:
        what: is copied.
    """

    def __init__(self, what: str = "image") -> None:
        self.what = what
        self._live = sys.stderr.isatty()
        self._done: dict[str, tuple[int, int]] = {}
        self._bars: dict[str, TaskID] = {}
        self._said = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[state]}"),
            console=console(stderr=True), transient=True, disable=not self._live,
        )  # fmt: skip
        self._progress.start()

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event of a host: `bytes` of `total`, and its state."""
        host, state = str(event.get("host")), str(event.get("state", ""))
        done, total = int(event.get("bytes") or 0), int(event.get("total") or 0)
        self._done[host] = (done, total)
        if self._live:
            self._update_bar(host, done, total, state)
        elif total and time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            all_done, all_total = self._sums()
            left = f", {duration(float(event['eta_s']))} left" if event.get("eta_s") else ""
            what, amount = printable(self.what), f"{all_done >> 20} of {all_total >> 20} MiB"
            say(f"        {what}: {amount} on {count(len(self._done), 'host')}{left}")

    def close(self) -> None:
        """Remove the bars."""
        self._progress.stop()

    def _sums(self) -> tuple[int, int]:
        return sum(done for done, _ in self._done.values()), sum(total for _, total in self._done.values())

    def _update_bar(self, host: str, done: int, total: int, state: str) -> None:
        key = host if host in self._bars or len(self._bars) < MOST_BARS else "other hosts"
        if key == "other hosts":
            done, total = self._sums()
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(key, total=total or None, state=state)
        self._progress.update(self._bars[key], completed=done, total=total or None, state=state)

"""Identify a process reliably, and end it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_POLL_S = 0.02


@dataclass(frozen=True)
class ProcessId:
    """One process of this boot. The kernel reuses pids, but not a pid with the same start time.

    Attributes:
        start_ticks: clock ticks after boot at which it started, field 22 of ``/proc/PID/stat`` (proc(5)).
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has this pid now; None if there is none or it is a zombie."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def load(cls, record: Path) -> ProcessId | None:
        """Read the file that `save` wrote; None if it is missing or invalid."""
        try:
            fields = json.loads(record.read_text())
            return cls(int(fields["pid"]), int(fields["start_ticks"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, record: Path) -> None:
        """Write the process's identity atomically."""
        draft = record.with_name(f".{record.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(record)

    def alive(self) -> bool:
        """Return True if this exact process still runs."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if not self.alive():
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False after the time-out."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to `grace_s` seconds, then send SIGKILL; returns when the process has ended."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
            if self.wait(grace_s):
                return
        self.send(signal.SIGKILL)
        self.wait(10.0)


def _stat(pid: int) -> list[str] | None:
    """Return fields 3 and up of ``/proc/PID/stat``. The name before them may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

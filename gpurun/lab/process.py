"""Naming a process so that it is never mistaken for another, and ending it."""

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
    """One process of this boot: pids are used again, a pid with its start time is not.

    Attributes:
        start_ticks: clock ticks after boot at which it started, field 22 of ``/proc/PID/stat`` (proc(5)).
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None if there is none or it is a zombie."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def load(cls, record: Path) -> ProcessId | None:
        """Read what `save` wrote; None if there is no such file or it says nothing sensible."""
        try:
            fields = json.loads(record.read_text())
            return cls(int(fields["pid"]), int(fields["start_ticks"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, record: Path) -> None:
        """Write this down, whole or not at all."""
        draft = record.with_name(f".{record.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(record)

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process is gone."""
        if not self.alive():
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it has not by then."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self, grace_s: float) -> None:
        """SIGTERM, up to `grace_s` seconds, then SIGKILL; returns when it is gone."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
            if self.wait(grace_s):
                return
        self.send(signal.SIGKILL)
        self.wait(10.0)


def _stat(pid: int) -> list[str] | None:
    """Fields 3 and up of ``/proc/PID/stat``: the name before them may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

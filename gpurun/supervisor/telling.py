"""Tell people how far a job's image and data sets are on their way to its hosts."""

from __future__ import annotations

import time
from contextlib import suppress

from gpurun.errors import StateError
from gpurun.images.events import ShipEvent
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.sending import Sent, write_sent

EVERY_S = 1.0
"""The file is written at most so often."""


class SendingTold:
    """What an attempt tells of transfers: an event for each state of each host; the rest goes to `gpurun.jobs.sending`.

    `told` is called by one thread at a time.
    """

    def __init__(self, folder: JobFolder, attempt: int, events: EventLog) -> None:
        self._folder, self._attempt, self._events = folder, attempt, events
        self._last: dict[tuple[str, str, str], Sent] = {}
        self._states: set[tuple[str, str, str, str]] = set()
        self._written_s = -EVERY_S

    def told(self, kind: str, event: ShipEvent, data: str = "") -> None:
        """Tell one event of a transfer, of the data set `data` if it is one. A full disk stops no transfer."""
        said = event.as_json()
        key = (kind, data, event.host)
        self._last[key] = Sent(kind=kind, data=data, **said)
        if (state := (*key, event.state)) not in self._states:
            self._states.add(state)
            self._events.emit(kind, **({"data": data} if data else {}), **said)
        if time.monotonic() - self._written_s >= EVERY_S:
            self._written_s = time.monotonic()
            with suppress(StateError, FileNotFoundError):
                write_sent(self._folder, self._attempt, tuple(self._last.values()))

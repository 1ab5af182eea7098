"""A job's events: one JSON object a line, appended; what ``submit --follow`` and scripts watch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gpurun.state import durable
from gpurun.state.growing import GrowingFile
from gpurun.state.path import StatePath


class EventLog:
    """Appends events. Each line is one ``write``, so readers never see half a line of a live writer."""

    def __init__(self, path: StatePath, *, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock

    def emit(self, kind: str, **fields: object) -> None:
        """Append one event of `kind`; `fields` must be JSON values. A job that was pruned has no events any more."""
        line = json.dumps({"t": round(self._clock(), 3), "kind": kind, **fields})
        with suppress(FileNotFoundError):
            durable.append_line(self.path, line)


class EventTail:
    """Reads events as they come, from the beginning; remembers how far it got."""

    def __init__(self, path: StatePath) -> None:
        self._file = GrowingFile(path)

    def new(self) -> Iterator[dict[str, Any]]:
        """Events written since the last call; a torn last line is left for later, a damaged one skipped."""
        for line in self._file.lines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event

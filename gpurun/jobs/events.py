"""A job's events: one JSON object per line, appended, for ``submit --follow`` and scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gpurun.errors import StateUnavailable
from gpurun.state import durable
from gpurun.state.growing import GrowingFile
from gpurun.state.path import StatePath

MOST_WARNINGS = 10


class EventLog:
    """Appends events. Each line is one ``write``, so readers never see half a line of a live writer."""

    def __init__(self, path: StatePath, *, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock

    def emit(self, kind: str, **fields: object) -> None:
        """Append one event of `kind`; `fields` must be JSON values. Does nothing if the job was pruned.

        An event that a full or broken disk does not take is lost. Events are for people: nothing stops for them.
        """
        line = json.dumps({"t": round(self._clock(), 3), "kind": kind, **fields})
        with suppress(FileNotFoundError, StateUnavailable):
            durable.append_line(self.path, line)


def warnings_of(path: StatePath, attempt: int) -> list[str]:
    """Return the warnings of an attempt: notes that say something is likely wrong while the job goes on."""
    told = (event for event in EventTail(path).new() if event.get("kind") == "note")
    texts = [str(event.get("text")) for event in told if event.get("warning") == attempt]
    return list(dict.fromkeys(texts))[:MOST_WARNINGS]


class EventTail:
    """Reads events as they are written, from the beginning; remembers its position."""

    def __init__(self, path: StatePath) -> None:
        self._file = GrowingFile(path)

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield events written since the last call. Leaves an incomplete last line for later, and skips damaged
        lines.
        """
        for line in self._file.lines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event

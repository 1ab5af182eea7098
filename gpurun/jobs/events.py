"""A job's events: one JSON object per line, appended; and the state of copies to its hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.folder import JobFolder
from gpurun.state import durable
from gpurun.state.durable import GrowingFile
from gpurun.state.paths import StatePath

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


def warnings_of(path: StatePath, attempt: int) -> dict[str, list[str]]:
    """Return the warnings of an attempt, each with more lines about it, if there are any: notes that say something is
    likely wrong while the job goes on.

    A later note may say that the warnings about something are over.
    """
    found: dict[str, dict[str, Any]] = {}
    for event in EventTail(path).new():
        if event.get("kind") != "note":
            continue
        if (over := event.get("over")) is not None:
            found = {text: warning for text, warning in found.items() if warning.get("about") != over}
        if event.get("warning") == attempt:
            found.setdefault(str(event.get("text")), event)
    return {text: _lines_of(warning) for text, warning in list(found.items())[:MOST_WARNINGS]}


def _lines_of(warning: dict[str, Any]) -> list[str]:
    lines = warning.get("lines")
    return [str(line) for line in lines] if isinstance(lines, list) else []


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


# How far a job's image and data sets are on their way to its hosts: ``sending.json`` in the job's folder.


FILE = "sending.json"


@dataclass(frozen=True)
class Sent:
    """What one host has of the image or of a data set. `gpurun.content.ship.ShipEvent` says what the fields mean.

    Attributes:
        kind: ``ship``: the image; ``stage``: a data set; ``workdir``: its code.
        data: the name of the data set.
    """

    kind: str
    host: str
    data: str = ""
    state: str = ""
    bytes: int = 0
    total: int = 0
    rate_bytes_s: float | None = None
    eta_s: float | None = None
    layer: int = 0
    layers: int = 0
    message: str | None = None


@dataclass(frozen=True)
class _SentFile:
    attempt: int
    sent: tuple[Sent, ...]


def read_sent(folder: JobFolder, attempt: int) -> tuple[Sent, ...]:
    """Return how far an attempt's image and data sets are; nothing if nobody has told, or the file is damaged."""
    try:
        found = durable.read_record(folder.path / FILE, _SentFile)
    except (FileNotFoundError, StateError):
        return ()
    return found.sent if found.attempt == attempt else ()


def write_sent(folder: JobFolder, attempt: int, sent: tuple[Sent, ...]) -> None:
    """Replace what `read_sent` returns.

    Raises:
        FileNotFoundError: there is no such job.
        StateError: it cannot be written.
    """
    durable.write_record(folder.path / FILE, _SentFile(attempt, sent))

"""How far a job's image and data sets are on their way to its hosts: ``sending.json`` in the job's folder.

Progress is replaced, not appended: an hour of it takes no more room than a second. The job's events say once for each
host that a transfer began and how it ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.errors import StateError
from gpurun.jobs.folder import JobFolder
from gpurun.state import durable

FILE = "sending.json"


@dataclass(frozen=True)
class Sent:
    """What one host has of the image or of a data set. `gpurun.images.events.ShipEvent` says what the fields mean.

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

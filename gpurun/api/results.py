"""Read what the ranks of a function returned. The data come from hosts, so this module does not trust them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpurun.documents.plain import printable
from gpurun.errors import JobFailed
from gpurun.node.folder.below import Cursor, open_regular, open_top
from gpurun.runtime.gpurun_call import MOST_BYTES, MOST_KIND, MOST_TEXT, RESULTS, decoded

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder

MOST_VALUES = 10_000_000
"""A value of two bytes, such as an empty list, takes about 64 in memory."""


class RemoteError(JobFailed):
    """The function raised an exception on a rank.

    Attributes:
        rank: the rank.
        kind: the name of the exception's class.
        trace: the traceback as text.
    """

    def __init__(self, *, job: str | None, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}", job=job, where=f"rank {rank}")
        self.rank, self.kind, self.text, self.trace = rank, kind, text, trace

    def __reduce__(self) -> Any:
        """Pools of processes pass exceptions on as pickles."""
        return partial(RemoteError, job=self.job, rank=self.rank, kind=self.kind, text=self.text, trace=self.trace), ()

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}" if self.trace else super().__str__()


class NoResult(JobFailed):
    """The job succeeded, but a rank's result is missing or cannot be read."""


@dataclass(frozen=True)
class Returned:
    """The result of one rank: a value, or an error."""

    value: Any = None
    error: RemoteError | None = None


def answer_of(folder: JobFolder, rank: int) -> Returned | None:
    """Return the result of a rank; None if the rank left none.

    Raises:
        NoResult: it cannot be read.
    """
    try:
        text = _read(folder, rank)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoResult(
            f"the rank's result cannot be read: {error.strerror}", job=folder.id, where=f"rank {rank}"
        ) from error
    try:
        most = sum(map(text.count, (b",", b"[", b"{")))
        if most > MOST_VALUES:
            raise ValueError(f"the result has more than {MOST_VALUES} values")
        told = json.loads(text)
        if "error" in told:
            lengths = {"kind": MOST_KIND, "text": MOST_TEXT, "trace": MOST_TEXT}
            said = {key: _plain(told["error"][key], most) for key, most in lengths.items()}
            return Returned(error=RemoteError(job=folder.id, rank=rank, **said))
        return Returned(decoded(told["value"]))
    except ModuleNotFoundError as error:
        raise NoResult(
            "the result has NumPy arrays, but NumPy is not installed here",
            job=folder.id,
            hint="install NumPy: pip install numpy",
        ) from error
    except Exception as error:  # whatever a stranger's bytes make a parser raise
        why = f"the rank's result is damaged: {type(error).__name__}: {printable(str(error)[:200])}"
        raise NoResult(why, job=folder.id, where=f"rank {rank}") from error


def _read(folder: JobFolder, rank: int) -> bytes:
    top = open_top(str(folder.outputs))
    try:
        with Cursor(top) as cursor:
            descriptor, found = open_regular(cursor.at((RESULTS.encode(),)), b"%d.json" % rank)
        with os.fdopen(descriptor, "rb") as file:
            if found.st_size > MOST_BYTES:
                raise OSError(27, f"the result is larger than {MOST_BYTES >> 20} MiB")
            return file.read(MOST_BYTES)
    finally:
        os.close(top)


def _plain(text: object, most: int) -> str:
    """Return text that cannot control a terminal or a notebook."""
    if not isinstance(text, str):
        raise TypeError("no text")
    return "\n".join(printable(line) for line in text[-most:].split("\n"))

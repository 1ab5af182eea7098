"""Parse horovodrun's output: which rank printed a line, and which rank failed first. Pure.

Horovod 0.28.1 prefixes each line of a rank with ``[RANK]<stdout>:`` (Gloo, `safe_shell_exec.prefix_stream`) or
``[1,RANK]<stdout>:`` (``mpirun -tag-output``). In Gloo mode it names the first rank to fail, by time
(`gloo_run.launch_gloo`); mpirun names the first process that exited non-zero.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_TAGGED = re.compile(r"(\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:)(.*)", re.DOTALL)
_GLOO_NAME = re.compile(r"Process name: (\d+)\s*$")
_MPI_NAME = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]")
_ELASTIC_NAME = re.compile(r"Process name: (\S+)\[\d+\]\s*$")
_EXIT_CODE = re.compile(r"Exit code:\s*(-?\d+)")
_MPI_SIGNAL = re.compile(r"mpirun noticed that process rank (\d+) .* on node (\S+) exited on signal (\d+)")
EXCERPT_LINES = 12


class Line(NamedTuple):
    """One line of a gang's output. `rank` None: the launcher's own line."""

    rank: int | None
    stream: str
    text: str


class Failure(NamedTuple):
    """The first rank that failed, and how.

    Attributes:
        rank: None if ranks change: an elastic launcher names the host.
        exit_code: 128 + n for signal n.
        host: an elastic launcher's name of the host; else None.
    """

    rank: int | None
    exit_code: int
    host: str | None = None


def parse_line(text: str, stream: str) -> Line:
    """Parse a line of the launcher's output, and remove its tag.

    mpirun tags every piece that a rank wrote, so a line written in two pieces has a tag in the middle, too. Open MPI 5
    writes a space behind its tag, Open MPI 4 does not: the line loses one. horovodrun and gpurun itself write none.
    """
    found = _TAGGED.fullmatch(text)
    if found is None:
        return Line(None, stream, text)
    tag, rank, of_rank, rest = found.groups()
    return Line(int(rank), of_rank, rest.replace(tag, "").removeprefix(" ") if "," in tag else rest)


def first_failure(lines: Iterable[Line]) -> Failure | None:
    """Return the rank that the launcher names as the first to fail; None if it names none."""
    rank: int | None = None
    host: str | None = None
    for line in lines:
        if line.rank is not None:
            continue  # a rank may print anything, also what looks like the launcher's words
        if signalled := _MPI_SIGNAL.search(line.text):
            return Failure(int(signalled[1]), 128 + int(signalled[3]))
        if named := _GLOO_NAME.search(line.text) or _MPI_NAME.search(line.text):
            rank = int(named[1])
        elif named := _ELASTIC_NAME.search(line.text):
            host = named[1]
        elif (rank is not None or host is not None) and (code := _EXIT_CODE.search(line.text)):
            return Failure(rank, _as_shell(int(code[1])), host)
    return None


def excerpt_of(lines: Iterable[Line], rank: int | None) -> tuple[str, ...]:
    """Return the last lines of one rank; of the launcher if None."""
    return tuple(deque((line.text for line in lines if line.rank == rank and line.text.strip()), EXCERPT_LINES))


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code

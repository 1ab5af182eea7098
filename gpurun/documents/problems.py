"""What is wrong with a document, each problem with its place in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.errors import BadInput

_SHOWN_CHARACTERS = 80


def shown(value: str) -> str:
    """Quote a value from a file for a message: one line, printable ASCII, cut when it is long."""
    short = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…"
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return f"'{printable}'"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        line: 1 is the first.
        column: 1 is the first; counted in characters.
        value: what the file says there, if the problem is about one value.
        allowed: what could stand there instead, as a person would write it; empty = not a closed list.
    """

    file: str
    line: int
    column: int
    message: str
    value: str | None = None
    allowed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The message and what is allowed, without the place."""
        return f"{self.message} (allowed: {', '.join(self.allowed)})" if self.allowed else self.message

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.text}"


class DocumentError(BadInput):
    """A document that is not valid. `problems` lists everything that is wrong, in the file's order.

    Its text is one line for each problem, ``FILE:LINE:COL: what is wrong``.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.column)))
        super().__init__("\n".join(str(problem) for problem in self.problems))

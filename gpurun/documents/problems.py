"""Problems of a document, each with its place in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.errors import BadInput
from gpurun.quantities.counts import count

_SHOWN_CHARACTERS = 80
_SHOWN_PROBLEMS, _LONG_LIST = 20, 12


def shown(value: str) -> str:
    """Quote a value from a file for a message: one line, printable ASCII, shortened if long."""
    short = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…"
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return f"'{printable}'"


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        line: counted from 1.
        column: counted from 1, in characters.
        value: the text in the file, if the problem is about one value.
        allowed: what a person could write instead; empty = not a closed list.
    """

    file: str
    line: int
    column: int
    message: str
    value: str | None = None
    allowed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the message and what is allowed, without the place. A guess of what was meant replaces a long list."""
        is_enough = not self.allowed or (len(self.allowed) > _LONG_LIST and self.message.endswith("?"))
        return self.message if is_enough else f"{self.message} (allowed: {', '.join(self.allowed)})"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.text}"


class DocumentError(BadInput):
    """A document that is not valid. `problems` lists all problems in the file's order.

    Its text has one line for each of the first problems, ``FILE:LINE:COL: problem``.
    """

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.column)))
        lines = [str(problem) for problem in self.problems[:_SHOWN_PROBLEMS]]
        if (more := len(self.problems) - _SHOWN_PROBLEMS) > 0:
            lines.append(f"… and {count(more, 'more problem')}")
        super().__init__("\n".join(lines), hint=hint)

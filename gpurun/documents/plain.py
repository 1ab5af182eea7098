"""Text for people and programs: what comes from outside cannot control a terminal or a notebook; JSON. Pure."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from gpurun.errors import BadInput
from gpurun.quantities import count

# Problems of a document, each with its place in the file.


_SHOWN_CHARACTERS = 80
_SHOWN_PROBLEMS, _LONG_LIST = 20, 12


def shown(value: str) -> str:
    """Quote a value from a file for a message: one line, printable ASCII, shortened if long."""
    short = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…"
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return f"'{printable}'"


@dataclass(frozen=True)
class Problem:
    """A problem of a file.

    Attributes:
        line: counted from 1. Line 1 and column 1: values of the file contradict each other.
        column: counted from 1, in characters.
        value: the text in the file, if the problem is about one value.
        allowed: the values that you may write instead; empty: gpurun knows no closed list of values.
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


_COLOURS = re.compile(r"\x1b\[(?:[0-9;]*m|[0-2]?K)")
"""Colours and weights, and "erase to the end of the line" (ECMA-48, SGR and EL): what progress bars write."""


def printable(text: str) -> str:
    """Return text from outside with control characters made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def printed(text: str) -> str:
    """Return a rank's line as a terminal shows it: without colours, and with the final state of progress bars."""
    plain = _COLOURS.sub("", text)
    return printable(_overwritten(plain) if "\r" in plain or "\b" in plain else plain)


def _overwritten(text: str) -> str:
    """Apply carriage returns and backspaces; return the visible text."""
    shown: list[str] = []
    at = 0
    for letter in text:
        if letter == "\r":
            at = 0
        elif letter == "\b":
            at = max(0, at - 1)
        else:
            shown[at : at + 1] = [letter]
            at += 1
    return "".join(shown).rstrip()


# Cells of CSV tables. Pure.


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FORMULA = re.compile(r"[\s\ufeff\u200b-\u200f\u2060]*[=+\-@\uff1d\uff0b\uff0d\uff20]|\t")


def csv_text(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, each cell as `cell` returns it."""
    import csv  # noqa: PLC0415  each command loads this file

    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(map(cell, row) for row in (heads, *rows))
    return stream.getvalue()


def cell(value: object) -> object:
    """Return a cell that a spreadsheet shows as it is, and that cannot control a terminal. Numbers stay numbers."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    text = printable(value)
    return f"'{text}" if _FORMULA.match(text) or _FORMULA.match(value) else text


# JSON for programs: a value is encoded as it is.


def json_text(document: object, *, indent: int | None = None) -> str:
    """Return a document as JSON text. A dataclass becomes an object with its fields as keys, any other value a list."""
    return json.dumps(document, indent=indent, default=_encoded)


def _encoded(value: object) -> object:
    """Return a value that `json` does not know as one that it knows, one level deep."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else list(value)  # type: ignore[call-overload]

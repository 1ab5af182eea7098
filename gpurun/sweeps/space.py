"""What a sweep tries: parameters by name, each a list of values or a range. Pure.

::

    lr=0.1,0.01             a list; of a grid, or to choose from
    lr=log:1e-5..1e-1       a range of numbers, drawn by their logarithm
    dropout=0.1..0.5        a range of numbers
    layers=2..8             a range of whole numbers, ends included: both ends are written without a point
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpurun.errors import BadInput

Value = bool | int | float | str
Point = Mapping[str, Value]

MOST_POINTS = 1_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}\Z", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?\Z", re.ASCII)
_RANGE = re.compile(r"(log:)?([^,]+?)\.\.([^,.][^,]*)\Z")


@dataclass(frozen=True)
class Dimension:
    """What one parameter may be.

    Attributes:
        values: the list; empty for a range.
        low, high: the ends of a range, both included.
        is_log: a range is drawn by its logarithm.
        is_whole: a range has whole numbers only.
    """

    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False


Space = Mapping[str, Dimension]


def value_of(text: str) -> Value:
    """A value as a person writes it: ``true``, ``3``, ``1e-3`` or a text."""
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.match(text):
        return int(text)
    if _NUMBER.match(text) and math.isfinite(float(text)):
        return float(text)
    return text


def dimension(name: str, texts: tuple[str, ...]) -> Dimension:
    """One parameter: a list of values, or a single text that is a range.

    Raises:
        BadInput: it is neither.
    """
    if not _NAME.match(name):
        raise BadInput(f"{name!r} is not a valid name of a parameter", hint="use letters, digits, '_', '.' and '-'")
    if len(texts) == 1 and (found := _RANGE.match(texts[0])):
        return _range(name, bool(found[1]), found[2], found[3])
    if wrong := [text for text in texts if text.startswith("log:")]:
        raise BadInput(
            f"the parameter {name}: {wrong[0]!r} is not a range", hint=f"write a range such as {name}=log:1e-5..1e-1"
        )
    values = tuple(value_of(text) for text in texts)
    if not texts or "" in texts:
        raise BadInput(f"the parameter {name} has an empty value", hint=f"write values such as {name}=0.1,0.01")
    if len({(type(value), value) for value in values}) < len(values):
        raise BadInput(f"the parameter {name} has a value twice: {', '.join(texts)}")
    return Dimension(values)


def _range(name: str, is_log: bool, low: str, high: str) -> Dimension:
    ends = value_of(low), value_of(high)
    if any(isinstance(end, bool | str) for end in ends):
        raise BadInput(
            f"the range {low}..{high} of {name} has an end that is not a number",
            hint=f"write a range such as {name}=log:1e-5..1e-1",
        )
    first, last = float(ends[0]), float(ends[1])
    if first >= last or (is_log and first <= 0):
        needs = "0 < LOW < HIGH" if is_log else "LOW < HIGH"
        raise BadInput(f"the range {low}..{high} of {name} is empty: a range LOW..HIGH needs {needs}")
    return Dimension(low=first, high=last, is_log=is_log, is_whole=all(isinstance(end, int) for end in ends))


def parse(words: Mapping[str, tuple[str, ...]]) -> Space:
    """Parameters by name, as `dimension` reads each.

    Raises:
        BadInput: one of them cannot be read.
    """
    return {name: dimension(name, texts) for name, texts in words.items()}


def assignments(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """``NAME=VALUES`` of a command line, taken apart.

    Raises:
        BadInput: a word has no ``=``, or a name comes twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        if not equals:
            raise BadInput(
                f"{word!r} is not a parameter", hint="write NAME=VALUES, such as lr=0.1,0.01 or lr=log:1e-5..1e-1"
            )
        if name in found:
            raise BadInput(f"the parameter {name} is given twice")
        found[name] = tuple(rest.split(","))
    return found


def grid(space: Space) -> Iterator[dict[str, Value]]:
    """All points of lists, the last parameter changing fastest."""
    for values in itertools.product(*(dimension.values for dimension in space.values())):
        yield dict(zip(space, values, strict=True))


def check_grid(space: Space) -> int:
    """Return the number of points of a grid.

    Raises:
        BadInput: a parameter is a range, there are no parameters, or there are too many points.
    """
    for name, one in space.items():
        if not one.values:
            hint = f"write a list such as {name}=0.1,0.01, or choose --random N or --tpe N"
            raise BadInput(f"the parameter {name} is a range, but a grid needs a list of values", hint=hint)
    count = math.prod(len(one.values) for one in space.values())
    if not space or count > MOST_POINTS:
        raise BadInput(
            "the sweep has no parameter"
            if not space
            else f"the grid has {count} points, but at most {MOST_POINTS} are allowed"
        )
    return count


def words(point: Point) -> tuple[str, ...]:
    """A point as flags of a program: ``--lr=0.1``; a truth is ``true`` or ``false``."""
    return tuple(f"--{name}={text(value)}" for name, value in point.items())


def text(value: Value) -> str:
    """A value as `value_of` reads it again."""
    return str(value).lower() if isinstance(value, bool) else str(value)

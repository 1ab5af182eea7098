"""Fold sets of hosts: ``gpu-r1-[01-06,08-16]``. Handles the common case without the slow import of ClusterShell.

A view folds hundreds of sets of hosts whose names differ only in the number at their end. ClusterShell folds all other
sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"([A-Za-z0-9_.-]*?[A-Za-z_.-])([0-9]{1,9})", re.ASCII)
_TWICE = re.compile(r"([A-Za-z0-9_.-]*?[A-Za-z_.-])([0-9]{1,9})([A-Za-z_.-]+)", re.ASCII)


def fold(names: Iterable[str]) -> str:
    """Return the shortest notation for these hosts, the same as `hostset.fold_by_clustershell`."""
    given = list(names)
    if simple := _simple(given):
        return simple

    from gpurun.inventory.hostset import fold_by_clustershell  # noqa: PLC0415 (imports ClusterShell)

    return fold_by_clustershell(given)


def _simple(names: Sequence[str]) -> str:
    """Fold names that differ only in the last number, with the same numbers for each rack; "" for all other names."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            return ""
        numbers.setdefault(found[1], []).append(found[2])
    ends = {_range(digits) for digits in numbers.values()}
    end = ends.pop() if len(ends) == 1 else ""
    if len(numbers) == 1 and end:
        return f"{names[0][: -len(numbers.popitem()[1][0])]}{end}"
    before = [_TWICE.fullmatch(prefix) for prefix in numbers] if end else []
    parts = {(found[1], found[3]) for found in before if found is not None}
    if len(parts) != 1 or None in before:
        return ""
    ((first, last),) = parts
    middle = _range([found[2] for found in before if found is not None])
    return f"{first}{middle}{last}{end}" if middle else ""


def _range(digits: Sequence[str]) -> str:
    """Return ``07`` or ``[01-03,07]``; "" for numbers of different lengths if one has leading zeros."""
    width = len(digits[0])
    if any(len(each) != width for each in digits):
        if any(each[0] == "0" for each in digits):
            return ""
        width = 0
    numbers = sorted({int(each) for each in digits})
    if len(numbers) == 1:
        return digits[0]
    found, begin = [], numbers[0]
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        if following != number + 1:
            found.append(f"{begin:0{width}}" if begin == number else f"{begin:0{width}}-{number:0{width}}")
            begin = following
    return f"[{','.join(found)}]"

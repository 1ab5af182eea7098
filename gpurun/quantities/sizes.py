"""Sizes: ``512MiB``, ``16G``, ``500GB``. G and GiB are 1024³ bytes, GB is 1000³, as in GNU's dd and du. Pure."""

from __future__ import annotations

import re

from gpurun.quantities.texts import stripped

MIB = 1 << 20
MOST_BYTES = 1 << 60
HOW = "write a number with its unit, such as 512MiB, 16GiB or 500GB"

_LETTERS = "kmgtp"
_UNITS = {
    "b": 1,
    **{letter + end: 1024 ** (at + 1) for at, letter in enumerate(_LETTERS) for end in ("", "i", "ib")},
    **{letter + "b": 1000 ** (at + 1) for at, letter in enumerate(_LETTERS)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]*|%)", re.ASCII)


def size_bytes(text: str) -> int:
    """Return the bytes of a size, at most 1 EiB. Upper and lower case are the same.

    Raises:
        ValueError: with the reason, and what to write.
    """
    text = stripped(text, "a size", HOW)
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"is negative; {HOW}" if text.startswith("-") else f"is not a size; {HOW}")
    number, unit = found.groups()
    if not unit:
        raise ValueError(f"has no unit; write {number}MiB or {number}GiB")
    if unit == "%":
        raise ValueError("is a percentage; write the size itself, such as 16GiB")
    if unit.lower() not in _UNITS:
        raise ValueError(f"has the unknown unit '{unit}'; the units are KiB, MiB, GiB, TiB and KB, MB, GB, TB")
    size = float(number) * _UNITS[unit.lower()]
    if size > MOST_BYTES:
        raise ValueError(f"is more than {MOST_BYTES >> 40}TiB")
    return int(size)


def size_mib(text: str) -> int:
    """Return the whole MiB of a size. Raises ValueError, also for a size between 0 and 1 MiB."""
    size = size_bytes(text)
    if 0 < size < MIB:
        raise ValueError("is less than 1MiB")
    return size // MIB


def size_text(size: int) -> str:
    """Write a size in bytes: ``0 B``, ``4.0 KiB``, ``1.5 GiB``."""
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{size} B" if units[0] == "B" else f"{number:.1f} {units[0]}"

"""Times: ``90s``, ``15 min``, ``1h30m``, ``2d``, ``1:30:00``, ``1-12:00:00``. Pure."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from gpurun.quantities.texts import stripped

MOST_S = 10 * 365 * 86400.0
HOW = "write a number with its unit, such as 90s, 15m, 1h30m or 2d"

_S = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_UNITS = {
    **dict.fromkeys(("w", "wk", "wks", "week", "weeks"), "w"),
    **dict.fromkeys(("d", "day", "days"), "d"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
}
_NEXT = dict(pairwise(_S))
_NO_LENGTH = ("mo", "mon", "month", "months", "y", "yr", "year", "years")
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_PARTS = re.compile(r"(?:\d+(?:\.\d+)? *[A-Za-z]* *)+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


def duration_s(text: str, *, zero: bool = False) -> float:
    """Return the seconds of a time, at most ten years.

    A last number without a unit counts the next smaller unit: ``1h30`` is 1 h 30 min. Also reads ``H:MM:SS`` and
    Slurm's ``D-HH``, ``D-HH:MM`` and ``D-HH:MM:SS``.

    Args:
        zero: allow 0, with or without a unit.

    Raises:
        ValueError: with the reason, and what to write.
    """
    text = stripped(text, "a time", HOW)
    if _NUMBER.fullmatch(text) and float(text) > 0:
        raise ValueError(f"has no unit; write {text}s, {text}m, {text}h or {text}d")
    total = _clock_s(text) if ":" in text or "-" in text[1:] else _parts_s(text)
    if total <= 0 and not zero:
        raise ValueError("must be more than 0")
    if total > MOST_S:
        raise ValueError("is more than 3650d")
    return total


def _parts_s(text: str) -> float:
    """Return the seconds of ``1h30m``: numbers with units, the largest first."""
    if not _PARTS.fullmatch(text):
        raise ValueError(f"is negative; {HOW}" if text.startswith("-") else f"is not a time; {HOW}")
    total, before = 0.0, ""
    for number, word in _PART.findall(text):
        unit = _unit(text, word) if word else _next_unit(text, number, before)
        if before and _S[unit] >= _S[before]:
            raise ValueError(f"has its units in the wrong order; {HOW}")
        total, before = total + float(number) * _S[unit], unit
    return total


def _unit(text: str, word: str) -> str:
    if word == "M":
        raise ValueError(
            f"M could mean minutes or months; write {text.replace('M', 'm')} for minutes, or days such as 30d"
        )
    if word.lower() in _NO_LENGTH:
        raise ValueError("has months or years, which have no fixed length; write days, such as 30d")
    if (unit := _UNITS.get(word.lower())) is None:
        raise ValueError(f"has the unknown unit '{word}'; the units are s, m, h, d and w, such as 90s or 1h30m")
    return unit


def _next_unit(text: str, number: str, before: str) -> str:
    """Return the unit of a last number without one. A number like the 90 of ``1h90`` is not what anybody means."""
    if not before:  # "0" where 0 is allowed
        return "s"
    unit = _NEXT.get(before)
    if unit is None or not text.endswith(number) or "." in number or float(number) * _S[unit] >= _S[before]:
        raise ValueError(f"has no unit after {number}; {HOW}")
    return unit


def _clock_s(text: str) -> float:
    """Return the seconds of ``H:MM:SS`` or ``D-HH[:MM[:SS]]``."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ValueError(f"is negative; {HOW}" if text.startswith("-") else f"is not a time; {HOW}")
    days, hours, minutes, seconds = found.groups()
    if days is None and seconds is None:
        raise ValueError(f"could be hours or minutes; write {hours}h{minutes}m or {hours}m{minutes}s")
    if int(minutes or 0) > 59 or int(seconds or 0) > 59 or (days is not None and int(hours) > 23):
        raise ValueError("can have at most 59 minutes, 59 seconds and, after a number of days, 23 hours")
    return int(days or 0) * _S["d"] + int(hours) * _S["h"] + int(minutes or 0) * _S["m"] + int(seconds or 0)


def duration(seconds: float) -> str:
    """Write a time: ``0.5s``, ``42s``, ``3m07s``, ``5h02m`` or ``3d04h``; ``?`` for a number that is none."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, int(seconds))
    if whole < 60:
        tenths = int(10 * seconds) if whole == 0 else 0
        return f"0.{tenths}s" if tenths > 0 else f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"

"""How people write times, sizes, rates and moments, and how gpurun writes them: one parser and one spelling each.

times       90s, 15m, 1h30m, 2d ⇄ seconds
sizes       512MiB, 16GiB, 500GB ⇄ bytes
rates       25gbit → bits per second
moments     10m ago, yesterday, 2026-11-27 10:00 → a datetime
counts      1 job, 2 jobs
texts       what each of these parsers refuses first
local_time  seconds since the epoch → 2026-11-27 10:00:00 +01:00; the only module that reads the environment (TZ)

A parser takes a text and returns a number. It raises ValueError with a message that completes "VALUE …": what is wrong,
and what to write instead.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

# What every parser refuses first: texts that are empty or too long. Pure.


MOST_CHARS = 40
"""Longer, no time and no size is meant; patterns are not tried on it."""


def stripped(text: str, what: str, how: str) -> str:
    """Return a text without the spaces around it.

    Args:
        what: the kind of value that is wanted, such as ``a time``.
        how: what to write.

    Raises:
        ValueError: it is empty, or too long for such a value.
    """
    text = text.strip()
    if not text:
        raise ValueError(f"is empty; {how}")
    if len(text) > MOST_CHARS:
        raise ValueError(f"is too long for {what}; {how}")
    return text


# Times: ``90s``, ``15 min``, ``1h30m``, ``2d``, ``1:30:00``, ``1-12:00:00``. Pure.


MOST_S = 10 * 365 * 86400.0
HOW_LONG = "write a number with its unit, such as 90s, 15m, 1h30m or 2d"

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
    text = stripped(text, "a time", HOW_LONG)
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
        raise ValueError(f"is negative; {HOW_LONG}" if text.startswith("-") else f"is not a time; {HOW_LONG}")
    total, before = 0.0, ""
    for number, word in _PART.findall(text):
        unit = _unit(text, word) if word else _next_unit(text, number, before)
        if before and _S[unit] >= _S[before]:
            raise ValueError(f"has its units in the wrong order; {HOW_LONG}")
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
        raise ValueError(f"has no unit after {number}; {HOW_LONG}")
    return unit


def _clock_s(text: str) -> float:
    """Return the seconds of ``H:MM:SS`` or ``D-HH[:MM[:SS]]``."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ValueError(f"is negative; {HOW_LONG}" if text.startswith("-") else f"is not a time; {HOW_LONG}")
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


# Counts of things: ``1 job``, ``2 jobs``. Each number with a noun comes from here. Pure.


def count(number: int, thing: str, things: str | None = None) -> str:
    """Write a number of things.

    Args:
        things: the plural, if it is not `thing` with an s.
    """
    return f"{number} {plural(number, thing, things)}"


def plural(number: float, thing: str, things: str | None = None) -> str:
    """Return the noun that follows a number, for numbers that are written in another way or not at all."""
    return thing if number == 1 else things or f"{thing}s"


# Sizes: ``512MiB``, ``16G``, ``500GB``. G and GiB are 1024³ bytes, GB is 1000³, as in GNU's dd and du. Pure.


MIB = 1 << 20
MOST_BYTES = 1 << 60
HOW_LARGE = "write a number with its unit, such as 512MiB, 16GiB or 500GB"

_LETTERS = "kmgtp"
_UNITS_OF_SIZES = {
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
    text = stripped(text, "a size", HOW_LARGE)
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"is negative; {HOW_LARGE}" if text.startswith("-") else f"is not a size; {HOW_LARGE}")
    number, unit = found.groups()
    if not unit:
        raise ValueError(f"has no unit; write {number}MiB or {number}GiB")
    if unit == "%":
        raise ValueError("is a percentage; write the size itself, such as 16GiB")
    if unit.lower() not in _UNITS_OF_SIZES:
        raise ValueError(f"has the unknown unit '{unit}'; the units are KiB, MiB, GiB, TiB and KB, MB, GB, TB")
    size = float(number) * _UNITS_OF_SIZES[unit.lower()]
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


# Rates of links: ``25gbit``, ``2.5 Gbit/s``, ``100mbit``, as tc and people write them. Pure.


LEAST_BPS, MOST_BPS = 8_000, 10**15
HOW_FAST = "write bits per second, such as 10gbit, 2.5gbit or 100mbit"
_BITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
_RATE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt])(?:bit(?:/s)?|b/s)?", re.ASCII | re.IGNORECASE)
_BYTES = re.compile(r"[\d.]+ *[kmgt]i?(?:b|bps|b/s)", re.ASCII | re.IGNORECASE)


def rate_bps(text: str) -> int:
    """Return the bits per second of a rate.

    Raises:
        ValueError: with the reason, and what to write.
    """
    text = stripped(text, "a rate", HOW_FAST)
    found = _RATE.fullmatch(text)
    if _BYTES.fullmatch(text) and (found is None or "B" in text):
        raise ValueError(f"could be bits or bytes; {HOW_FAST}")
    if found is None:
        raise ValueError(f"is not a rate; {HOW_FAST}")
    rate = float(found[1]) * _BITS[found[2].lower()]
    if not LEAST_BPS <= rate <= MOST_BPS:
        raise ValueError("is not between 8kbit and 1000tbit")
    return int(rate)

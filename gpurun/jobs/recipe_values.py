"""How people write the values of a recipe: times, sizes, commands, names. Each type says its own rule."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from msgspec import Meta

from gpurun.documents.convert import written
from gpurun.jobs.notify_wish import NotifyWish, notify_wish

MAX_GPUS = 1_000_000
MAX_CHARS = 40
"""Longer, no time or size is meant; patterns are not tried on it."""
MAX_TIME_S = 10 * 365 * 86400.0
MAX_SIZE_MIB = 1 << 40
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)\s*d)?\s*(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*m(?:in)?)?"
                      r"\s*(?:(\d+(?:\.\d+)?)\s*s?)?")  # fmt: skip
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB|M|G|T|m|g)")
_NEAR_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mgt]?)(i?b?|%)", re.IGNORECASE)
_MIB = {"m": 1, "mib": 1, "g": 1024, "gib": 1024, "t": 1024 * 1024, "tib": 1024 * 1024}

_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\r?\n")
_OPERATOR = re.compile(r"""&&?|\|[|&]?|[^\\'"]*;|[0-9]*(>>?|<<?<?)(&[0-9-])?""")


def duration_s(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``1h30m`` or ``2d`` in seconds, above 0, at most ten years. Raises ValueError."""
    found = DURATION.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if not found or not any(found.groups()):
        raise ValueError
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise ValueError("is not more than 0")
    if total > MAX_TIME_S:
        raise ValueError("is more than 3650d")
    return total


def size_mib(text: str) -> int:
    """``512MiB``, ``16GiB`` or ``80G`` in MiB. Raises ValueError."""
    found = SIZE.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if not found:
        raise ValueError(_meant_size(text))
    mib = float(found[1]) * _MIB[found[2].lower()]
    if mib > MAX_SIZE_MIB:
        raise ValueError(f"is more than {MAX_SIZE_MIB >> 20}TiB")
    return int(mib)


def _meant_size(text: str) -> str:
    """Return why a text is no size, with the line that would do; empty if no size can be meant."""
    near = _NEAR_SIZE.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if near is None:
        return ""
    number, unit, rest = near.groups()
    if rest == "%":
        return "" if unit else "is a part of something; write the size itself, such as 16GiB"
    if unit:
        return f"has a unit that gpurun does not know; write {number}{unit.upper()}iB"
    return "" if rest else f"has no unit; write {number}MiB or {number}GiB"


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character")
    return text


def _words(line: str) -> list[str]:
    """One line as a shell splits words; no shell ever runs it. A backslash at the end of a line continues it.

    Raises:
        ValueError: it cannot be split, or has an operator that only a shell carries out.
    """
    try:
        line = _CONTINUED.sub(r"\1", _without_nul(line))
        words, quoted = shlex.split(line), shlex.split(line, posix=False)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}") from error
    if operator := next((word for word in quoted if _OPERATOR.fullmatch(word)), None):
        raise ValueError(f"has {operator}, which only a shell carries out; write [bash, -c, 'FIRST {operator} SECOND']")
    return words


def _limit_s(text: str) -> float:
    """`duration_s` of a text with a unit: Slurm's limits without one are minutes. Raises ValueError."""
    limit_s = duration_s(text)
    if text.strip().replace(".", "", 1).isdigit():
        raise ValueError(f"has no unit; write {text.strip()}s, {text.strip()}m or {text.strip()}h")
    return limit_s


_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z"
Name = Annotated[str, Meta(pattern=_NAME_PATTERN, title="a name (letters, digits, '.', '_', '-')")]
HostOrLabel = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}(=[^\x00-\x1f\x7f]{1,200})?\Z",
        title="a host's name, or a label as name=value",
    ),
]
JobName = Annotated[
    str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z", title="1 to 200 characters without control characters")
]
Image = Annotated[  # docker's reference grammar, loosely: never a flag, never white space
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,254}\Z", title="a Docker image reference such as gpurun/train:tf2.15"
    ),
]
PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a pool's name")]
ProjectName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a project's name")]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", title="a variable's name")]
SecretName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a file name")]
Text = Annotated[str, written(_without_nul, "a text", null=True)]
Command = Annotated[tuple[Text, ...], Meta(min_length=1), written(_words, "a command that names a program")]
Notify = Annotated[NotifyWish, written(notify_wish, "a target such as mail:alice@example.com or failure=slack:FILE")]
Duration = Annotated[float, written(duration_s, "a time such as 90s, 15m, 1h30m or 2d")]
WholeSeconds = Annotated[int, written(lambda text: round(duration_s(text)), "a time such as 90s, 15m, 1h30m or 2d")]
Size = Annotated[int, written(size_mib, "a size such as 512MiB or 16GiB")]
Gpus = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
TimeLimit = Annotated[float, written(_limit_s, "a time such as 15m, 1h30m or 2d")]
Knob = Annotated[int, Meta(ge=0, le=1_000_000)]

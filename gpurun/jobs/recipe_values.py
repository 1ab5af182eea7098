"""How people write the values of a recipe: times, sizes, commands, names. Each type says its own rule."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from msgspec import Meta

from gpurun.documents.convert import written
from gpurun.jobs.notify_wish import NotifyWish, notify_wish
from gpurun.quantities.sizes import size_mib
from gpurun.quantities.times import duration_s

MAX_GPUS = 1_000_000
_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\r?\n")
_OPERATOR = re.compile(r"""&&?|\|[|&]?|[^\\'"]*;|[0-9]*(>>?|<<?<?)(&[0-9-])?""")


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
        raise ValueError(
            f"has {operator}, but only a shell understands {operator}; write [bash, -c, 'FIRST {operator} SECOND']"
        )
    return words


def _whole_seconds(text: str) -> int:
    """Return the seconds of a time, rounded. Raises ValueError for less than one."""
    seconds = duration_s(text)
    if seconds < 1:
        raise ValueError("is less than 1s")
    return round(seconds)


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
    str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z", title="a text of 1 to 200 characters without control characters")
]
Image = Annotated[  # Docker's reference grammar, loosely: never a flag, never white space; a registry may have capitals
    str,
    Meta(
        pattern=r"^([a-zA-Z0-9][a-zA-Z0-9.:-]*/)?[a-z0-9][a-z0-9._/-]*(:[\w.-]+)?(@[\w.:-]+)?\Z", max_length=255,
        title="a Docker image reference in lower case such as gpurun/train:tf2.15",
    ),
]  # fmt: skip
PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a pool's name")]
ProjectName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a project's name")]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", title="a variable's name")]
SecretName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a file name")]
Text = Annotated[str, written(_without_nul, "a text", null=True)]
Command = Annotated[tuple[Text, ...], Meta(min_length=1), written(_words, "a command that names a program")]
Notify = Annotated[NotifyWish, written(notify_wish, "a target such as mail:alice@example.com or failure=slack:FILE")]
Duration = Annotated[float, written(duration_s, "a time such as 90s, 15m, 1h30m or 2d")]
WholeSeconds = Annotated[int, written(_whole_seconds, "a time such as 90s, 15m, 1h30m or 2d")]
Size = Annotated[int, written(size_mib, "a size such as 512MiB or 16GiB")]
Gpus = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
Knob = Annotated[int, Meta(ge=0, le=1_000_000)]

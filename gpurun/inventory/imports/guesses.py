"""Guessed values of an imported inventory, until the hosts themselves have told. Pure.

`compose` writes a comment for each guess and, for hosts whose source does not say, a default. A value counts as a guess
while both are there as written, for the hosts that have no value of their own. So what a person edits is no guess.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.hostset import fold
from gpurun.inventory.load import parse

_IMPORTED = re.compile(r"^# Imported from (.*) by gpurun inventory import\.$", re.MULTILINE)
_COMMENT = re.compile(r"^# Guessed: (gpus|generation) (\S+) for .*\n", re.MULTILINE)
_INTERFACE = re.compile(r"^# Guessed: interface ([^\s:]+).*\n", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults: \{.*\}$", re.MULTILINE)
_OTHERWISE = "otherwise"


@dataclass(frozen=True)
class Guess:
    """A guessed default.

    Attributes:
        key: ``gpus`` or ``generation``.
        value: as YAML has it, without quotes.
        comment: the line that says so.
    """

    key: str
    value: str
    comment: str


def is_imported(text: str) -> bool:
    """Return whether `compose` wrote an inventory's text, before people edited it."""
    return _IMPORTED.search(text) is not None


def imported_from(text: str) -> str | None:
    """Return the file that an inventory was imported from, as it was written; None if its text does not say."""
    found = _IMPORTED.search(text)
    return found.group(1) if found else None


def guesses(text: str) -> tuple[Guess, ...]:
    """Return the guesses that are still in an inventory's text."""
    found = [Guess(each[1], each[2], each[0]) for each in _COMMENT.finditer(text)]
    return tuple(guess for guess in found if _with_default(text, guess, guess.value) is not None)


def guessed_hosts(text: str, guess: Guess, source: Path) -> tuple[str, ...]:
    """Return the hosts that have a guessed default, and no value of their own.

    Args:
        source: the inventory's file, for messages.
    """
    other = str(int(guess.value) + 1) if guess.value.isdecimal() else _OTHERWISE
    changed = _with_default(text, guess, other)
    if changed is None:
        return ()
    try:
        before, after = parse(text.encode(), source), parse(changed.encode(), source)
    except BadInput:
        return ()
    return tuple(
        host.name for host in before.hosts if getattr(host, guess.key) != getattr(after.by_name[host.name], guess.key)
    )


def settled(text: str, guess: Guess, value: str, unknown: Collection[str]) -> str:
    """Return the text with a default that hosts have told.

    Args:
        unknown: hosts with this default that have not told. For them, it stays a guess.
    """
    changed = _with_default(text, guess, value)
    if changed is None:
        return text
    still = f"# Guessed: {guess.key} {value} for {fold(unknown)}, as most others have\n" if unknown else ""
    return changed.replace(guess.comment, still, 1)


def with_interface(text: str, interface: str) -> str:
    """Return the text with the interface that the hosts have, if its interface is a guess; then it is none any more."""
    guess = _INTERFACE.search(text)
    if guess is None:
        return text
    stated = re.compile(rf"(?<=\binterface: ){re.escape(guess[1])}(?=[,}}\s])")
    return stated.sub(lambda _: interface, text.replace(guess[0], "", 1))


def _with_default(text: str, guess: Guess, value: str) -> str | None:
    """Return the text with another value of the default; None if the default is not the guess any more."""
    line = _DEFAULTS.search(text)
    if line is None:
        return None
    stated = re.compile(rf"(?<=[{{ ]){guess.key}: ('?){re.escape(guess.value)}\1(?=[,}}])")
    found = stated.search(line[0])
    if found is None:
        return None
    start, end = line.start() + found.start(), line.start() + found.end()
    is_plain = value.isdecimal() if guess.key == "gpus" else value.replace("-", "").replace("_", "").isalpha()
    return f"{text[:start]}{guess.key}: {value if is_plain else _quoted(value)}{text[end:]}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

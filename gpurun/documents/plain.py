"""Make text from outside safe to print: it cannot control a terminal or a notebook. Pure."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[(?:[0-9;]*m|[0-2]?K)")
"""Colours and weights, and "erase to the end of the line" (ECMA-48, SGR and EL): what progress bars write."""


def printable(text: str) -> str:
    """Return text from outside with control characters made visible."""
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

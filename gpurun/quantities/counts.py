"""Counts of things: ``1 job``, ``2 jobs``. Pure."""

from __future__ import annotations


def count(number: int, thing: str, things: str | None = None) -> str:
    """Write a number of things.

    Args:
        things: the plural, if it is not `thing` with an s.
    """
    return f"{number} {thing if number == 1 else things or thing + 's'}"

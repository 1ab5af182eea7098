"""Counts of things: ``1 job``, ``2 jobs``. Each number with a noun comes from here. Pure."""

from __future__ import annotations


def count(number: int, thing: str, things: str | None = None) -> str:
    """Write a number of things.

    Args:
        things: the plural, if it is not `thing` with an s.
    """
    return f"{number} {plural(number, thing, things)}"


def plural(number: float, thing: str, things: str | None = None) -> str:
    """Return the noun that follows a number, for numbers that are written in another way or not at all."""
    return thing if number == 1 else things or f"{thing}s"

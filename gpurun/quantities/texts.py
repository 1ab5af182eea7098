"""What every parser refuses first: texts that are empty or too long. Pure."""

from __future__ import annotations

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

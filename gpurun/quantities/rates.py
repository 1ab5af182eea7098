"""Rates of links: ``25gbit``, ``2.5 Gbit/s``, ``100mbit``, as tc and people write them. Pure."""

from __future__ import annotations

import re

from gpurun.quantities.texts import stripped

LEAST_BPS, MOST_BPS = 8_000, 10**15
HOW = "write bits per second, such as 10gbit, 2.5gbit or 100mbit"
_BITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
_RATE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt])(?:bit(?:/s)?|b/s)?", re.ASCII | re.IGNORECASE)
_BYTES = re.compile(r"[\d.]+ *[kmgt]i?(?:b|bps|b/s)", re.ASCII | re.IGNORECASE)


def rate_bps(text: str) -> int:
    """Return the bits per second of a rate.

    Raises:
        ValueError: with the reason, and what to write.
    """
    text = stripped(text, "a rate", HOW)
    found = _RATE.fullmatch(text)
    if _BYTES.fullmatch(text) and (found is None or "B" in text):
        raise ValueError(f"could be bits or bytes; {HOW}")
    if found is None:
        raise ValueError(f"is not a rate; {HOW}")
    rate = float(found[1]) * _BITS[found[2].lower()]
    if not LEAST_BPS <= rate <= MOST_BPS:
        raise ValueError("is not between 8kbit and 1000tbit")
    return int(rate)

"""Cells of CSV tables. Pure.

A spreadsheet computes a cell that begins with ``=``, ``+``, ``-`` or ``@``, or with these letters in full width. It may
drop blanks in front of them when it reads a file (OWASP, "CSV Injection").
"""

from __future__ import annotations

import re

from gpurun.documents.plain import printable

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FORMULA = re.compile(r"[\s\ufeff\u200b-\u200f\u2060]*[=+\-@\uff1d\uff0b\uff0d\uff20]|\t")


def cell(value: object) -> object:
    """Return a cell that a spreadsheet shows as it is, and that cannot control a terminal. Numbers stay numbers."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    text = printable(value)
    return f"'{text}" if _FORMULA.match(text) or _FORMULA.match(value) else text

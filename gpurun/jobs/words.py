"""The words of a command, as text. Pure.

A word may hold any byte but NUL, and a job's record holds text. A byte that belongs to no UTF-8 text, such as the é in
a file name of Latin-1, is the character U+EF00 plus the byte. These characters are private: where a person writes one,
it is stored as three such bytes. So each word has one text, and each text one word.
"""

from __future__ import annotations

import re
import shlex

_SURROGATES, _STAND_INS = 0xDC00, 0xEF00
_ODD = re.compile("[\udc80-\udcff\uef80-\uefff]")
_STOOD_IN = re.compile("([\uef80-\uefff]+)")


def as_text(word: str) -> str:
    """Return the text of a word that the system gave (with surrogates) or that a file said."""
    return _ODD.sub(_stand_in, word)


def as_bytes(text: str) -> bytes:
    """Return the bytes of a word."""
    return b"".join(
        bytes(ord(letter) - _STAND_INS for letter in part) if at % 2 else part.encode()
        for at, part in enumerate(_STOOD_IN.split(text))
    )


def quoted(text: str) -> str:
    """Return a word as a POSIX shell reads it. The result is UTF-8 text: ``printf`` makes the other bytes."""
    if _STOOD_IN.search(text) is None:
        return shlex.quote(text)
    return "".join(
        f"\"$(printf '{_octal(part)}')\"" if at % 2 else shlex.quote(part)
        for at, part in enumerate(_STOOD_IN.split(text))
        if part
    )


def _stand_in(found: re.Match[str]) -> str:
    letter = found[0]
    if letter <= "\udcff":
        return chr(ord(letter) - _SURROGATES + _STAND_INS)
    return "".join(chr(_STAND_INS + byte) for byte in letter.encode())


def _octal(text: str) -> str:
    return "".join(f"\\{ord(letter) - _STAND_INS:03o}" for letter in text)

"""How ranks get what ignore rules left out of the workdir's copy. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable


def given_again(name: str, left_out: Iterable[str]) -> tuple[str, str]:
    """Return what to give ranks of what is left out, and the line of ``.gitignore`` that stops leaving it out.

    It is the name's folder if more in that is left out: a rank that misses one file of a data set misses the others.
    """
    folder = posixpath.dirname(name)
    if folder and sum(posixpath.dirname(each) == folder for each in left_out) > 1:
        return folder, f"!/{folder}/*"
    return name, f"!/{name}"

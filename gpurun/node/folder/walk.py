"""Find what is below a folder that other programs may change at any moment; opens it like `below` does."""

import os
import stat
from typing import Iterator, List, NamedTuple, Optional, Tuple

from gpurun.node.folder import below

_LOOK_AT_ONCE = 1000


class Found(NamedTuple):
    """An entry below a folder.

    Attributes:
        above: a descriptor of its folder, valid until the next item.
        status: None if it could not be read, or is a folder that could not be read: see `why`.
    """

    parts: below.Parts
    above: int
    status: Optional[os.stat_result]
    why: str = ""


class Look(NamedTuple):
    """Some entries of one folder, names in order.

    Attributes:
        above: a descriptor of the folder, valid until the next item.
        at: how many names came before these.
        found: each name with its status, or with the reason why it has none (as in `Found`).
    """

    parts: below.Parts
    above: int
    at: int
    found: List[Tuple[bytes, Optional[os.stat_result], str]]


def look(top: int, need: int = 0) -> Iterator[Look]:
    """Yield everything below a folder, each folder before its content. Leaves out what disappears meanwhile.

    Args:
        need: as for `gpurun.node.folder.below.Cursor`.
    """
    with below.Cursor(top, need) as cursor:
        waiting: List[Tuple[below.Parts, int]] = [((), 0)]
        while waiting:
            folder, length = waiting.pop()
            try:
                names = below.names_in(cursor.at(folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                if not folder:
                    raise
                yield _unread(folder, top, str(error.strerror))
                continue
            if length + 256 > below.LONGEST:
                fits = [name for name in names if length + 1 + len(name) <= below.LONGEST]
                if len(fits) < len(names):
                    yield _unread(folder, top, "holds a path that is longer than %d bytes" % below.LONGEST)
                names = fits
            inner: List[Tuple[below.Parts, int]] = []
            for at in range(0, len(names), _LOOK_AT_ONCE):
                yield _looked(folder, length, cursor.at(folder), at, names, inner)
            waiting += reversed(inner)


def _unread(folder: below.Parts, top: int, why: str) -> Look:
    return Look(folder[:-1], top, 0, [(folder[-1], None, why)])


def _looked(
    folder: below.Parts, length: int, above: int, at: int, names: List[bytes], inner: List[Tuple[below.Parts, int]]
) -> Look:
    """Look at some names of a folder; add those that are folders to `inner`."""
    found: List[Tuple[bytes, Optional[os.stat_result], str]] = []
    for name in names[at : at + _LOOK_AT_ONCE]:
        try:
            status = os.lstat(name, dir_fd=above)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append((name, None, str(error.strerror)))
            continue
        if stat.S_ISDIR(status.st_mode):
            inner.append(((*folder, name), length + 1 + len(name)))
        found.append((name, status, ""))
    return Look(folder, above, at, found)


def walk(top: int, need: int = 0) -> Iterator[Found]:
    """Do the same as `look`, one by one."""
    for parts, above, _, found in look(top, need):
        for name, status, why in found:
            yield Found((*parts, name), above, status, why)

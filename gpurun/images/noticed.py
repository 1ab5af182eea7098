"""What a person may not expect of a job's code: what ignore rules leave out, where links lead, and sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpurun.images.ignore import Walk

MOST_COUNTED = 20_000
"""How many files and folders that are left out are counted at most: a folder of data may have millions."""
MOST_KEPT = 200
_JUNK = re.compile(
    r"(?:.*/)?(?:__pycache__|\.venv|venv|node_modules|\.(?:mypy|pytest|ruff)_cache|\.ipynb_checkpoints|\.idea|\.vscode"
    r"|\.tox|\.DS_Store|[^/]*\.(?:py[co]|egg-info|sw[op]))"
)
"""What no rank misses."""


@dataclass(frozen=True)
class LeftOut:
    """What ignore rules left out, but for what no rank misses.

    Attributes:
        names: files, and folders without what is in them.
        files: all files in them, as far as they were counted.
        is_all: all were counted.
    """

    names: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0
    is_all: bool = True


@dataclass(frozen=True)
class Copied:
    """What is copied: path → size of each file, and path → target of each link."""

    sizes: dict[str, int]
    links: dict[str, str]


def look(top: Path) -> tuple[Copied, LeftOut]:
    """Return what gpurun copies of a folder, and what it leaves out, without reading a file.

    Raises:
        OSError: the folder cannot be read.
    """
    walk, sizes, links = Walk(top.resolve()), {}, {}
    for path, entry in walk.entries():
        if not is_text(path):
            continue
        if entry.is_symlink():
            links[path] = os.fsencode(os.readlink(entry.path)).decode(errors="replace")  # noqa: PTH115 - any bytes
        elif entry.is_file():
            sizes[path] = entry.stat().st_size
    return Copied(sizes, links), counted(top, walk.left_out)


def missed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a rank may miss, those nearest to the top first; not all of very many."""
    wanted = (name for name in names if not _JUNK.fullmatch(name) and is_text(name))
    return tuple(sorted(wanted, key=lambda name: (name.count("/"), name))[:MOST_KEPT])


def is_text(name: str) -> bool:
    """Return whether a job's record can keep a name: it is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(top: Path, names: Iterable[str]) -> LeftOut:
    """Count files and bytes of what is left out."""
    kept = missed(names)
    files = size = seen = 0
    for path in _paths(top / name for name in kept):
        seen += 1
        if seen > MOST_COUNTED:
            return LeftOut(kept, files, size, is_all=False)
        try:
            status = path.lstat()
        except OSError:
            continue
        files, size = files + 1, size + status.st_size
    return LeftOut(kept, files, size)


def _paths(tops: Iterable[Path]) -> Iterable[Path]:
    for top in tops:
        if top.is_symlink() or not top.is_dir():
            yield top
            continue
        for folder, _, files in os.walk(top):
            yield from (Path(folder, name) for name in files)

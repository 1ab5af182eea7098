"""Stream the content of a folder: regular files in rows, many at once; all other entries one by one.

========= ==========================================================================================================
header    meaning
========= ==========================================================================================================
``in``    the payload is the files that begin with name number ``at`` of this folder, as a JSON list of rows: ``[name,
          mode, mtime_ns, size, ctime_ns, inode, stored]``
``same``  the same, without a payload: the rows have the SHA-256 that the reader sent
other     `gpurun.node.folder.contents.Listed.header`
========= ==========================================================================================================

A reader that already has a list sends the hashes of its rows: ``{"in", "at", "sha"}``. Then only changed rows travel.
"""

import hashlib
import json
import os
import stat
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from gpurun.node.agent import frames
from gpurun.node.folder import below, contents
from gpurun.node.folder.batches import Item
from gpurun.node.folder.walk import look

Rows = Tuple[str, int]
"""Names rows: their folder, and the number of the first name."""
LeavesOut = Callable[[below.Parts, int, Optional[os.stat_result]], bool]
"""Is asked with an entry's path, its open folder, and its status, if that could be read."""


def known_rows(said: Iterable[frames.Frame]) -> Dict[Rows, str]:
    """Return the rows that the reader has, with their SHA-256."""
    return {(str(header.get("in")), int(header.get("at", 0))): str(header.get("sha")) for header, _ in said}


def told(
    top: int, force: bool, known: Dict[Rows, str], above: str = "", leaves_out: LeavesOut = lambda *_: False
) -> Iterator[Item]:
    """Yield everything below a folder, each folder before its content.

    Args:
        force: look into folders of ours whose modes keep us out.
        known: rows that the reader has.
        above: the folder's own path in the list; "" = it is the list's top.
        leaves_out: returns whether an entry is no part of the list. It is asked for what is in a folder, too.
    """
    prefix = (os.fsencode(above),) if above else ()
    for seen in look(top, below.READ if force else 0):
        folder = below.text_of_path(prefix + seen.parts)
        rows: List[Any] = []
        for raw, status, why in seen.found:
            if leaves_out((*seen.parts, raw), seen.above, status):
                continue
            name = raw.decode("utf-8", "surrogateescape")
            if status is not None and stat.S_ISREG(status.st_mode):
                size, mtime_ns, ctime_ns, inode = contents.marks_of(status)
                stored = contents.stored_of(status)
                rows.append((name, status.st_mode & 0o777, mtime_ns, size, ctime_ns, inode, stored))
                continue
            entry = contents.entry_of(folder + "/" + name if folder else name, seen.above, status, why)
            if entry is not None:
                yield entry.header(), b""
        if rows:
            yield _item(folder, seen.at, rows, known)


def _item(folder: str, at: int, rows: List[Any], known: Dict[Rows, str]) -> Item:
    payload = json.dumps(rows, separators=(",", ":")).encode("ascii")
    if known.get((folder, at)) == hashlib.sha256(payload).hexdigest():
        return {"in": folder, "at": at, "same": 1}, b""
    return {"in": folder, "at": at}, payload

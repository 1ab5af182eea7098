"""Say what a person may not expect of a job's code: what is left out, links that lead nowhere, a large folder. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from gpurun.cli.printing import size_text
from gpurun.images.given_again import given_again
from gpurun.images.noticed import Copied, LeftOut
from gpurun.quantities.counts import plural

LARGE_BYTES = 100 << 20
"""So large a folder is named: the head keeps a copy of it for each submission, and each host gets it."""
MOST_NAMED = 3


def words(workdir: str, copied: Copied, left: LeftOut) -> tuple[str, ...]:
    """Return what to tell about a workdir; nothing if it holds no surprise."""
    return tuple(filter(None, (_left_out(left), _leading_out(copied, left), _large(workdir, copied))))


def _left_out(left: LeftOut) -> str:
    if not left.names:
        return ""
    least = "" if left.is_all else "at least "
    size = f"{least}{_files(left.files)}, {size_text(left.size_bytes)}"
    given, line = given_again(left.names[0], left.names)
    return (
        f"workdir: .gitignore leaves out {_few(left.names)} ({size}). If ranks need {given}, add a line "
        f"such as `{line}` at the end of .gitignore, or submit with --data NAME={given}: ranks read /data/NAME"
    )


def _leading_out(copied: Copied, left: LeftOut) -> str:
    out = [f"{path} → {target}" for path, target in sorted(copied.links.items()) if _leads_out(path, target, left)]
    if not out:
        return ""
    verb = "points outside the copied files" if len(out) == 1 else "point outside the copied files"
    return (
        f"workdir: {_few(out)} {verb}, so ranks do not find the linked files. Copy the linked files into the workdir, "
        "or give the files with --data"
    )


def _leads_out(path: str, target: str, left: LeftOut) -> bool:
    if target.startswith("/"):
        return True
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    is_left = any(meant == name or meant.startswith(f"{name}/") for name in left.names)
    return meant == ".." or meant.startswith("../") or is_left


def _large(workdir: str, copied: Copied) -> str:
    total = sum(copied.sizes.values())
    if total < LARGE_BYTES:
        return ""
    below: dict[str, int] = {}
    for path, size in copied.sizes.items():
        top = path.split("/", 1)[0] + ("/" if "/" in path else "")
        below[top] = below.get(top, 0) + size
    biggest = sorted(below.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMED]
    named = ", ".join(f"{name} {size_text(size)}" for name, size in biggest)
    return (
        f"workdir: {workdir} has {size_text(total)} in {_files(len(copied.sizes))} ({named}). The head keeps a "
        "copy for each submission. List files that ranks do not need in .gitignore, and give data with --data"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _files(count: int) -> str:
    return f"{count:,} {plural(count, 'file')}"

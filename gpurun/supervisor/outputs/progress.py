"""Decide whether an attempt has written a checkpoint that no earlier attempt had, from the head's copy of its outputs.

Names and times say nothing: a program may touch its checkpoints, or write the same ones again. So the content decides.
Logs grow in every attempt, and are no progress.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from heapq import nlargest
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

from gpurun.errors import StateError, StateUnavailable
from gpurun.node.folder.contents import Listed
from gpurun.state import durable
from gpurun.state.paths import StatePath, state_error
from gpurun.supervisor.outputs.copy import HeadCopy

BEGAN = "outputs.began"
"""The file of the job's folder that has the content at the beginning of the attempt."""
MOST_FILES = 1000
"""So many files are compared, those that changed last."""
COMPARED_S = 20.0
"""For so long files are read, the newest first: the job's GPUs wait meanwhile, and a slow disk takes minutes."""
MOST_SHOWN = 100
LOGS = (
    "events.out.tfevents.*", "*.log", "*.out", "*.err", "*.tmp", "*.part", "*.lock", "*.pid", "*.pyc", "core", "core.*",
    "nohup.out", ".nfs*",
)  # fmt: skip
"""Names of files that programs write in every attempt."""
LOG_FOLDERS = frozenset({"__pycache__", "wandb", ".git"})
"""Folders of such files. Trainers write checkpoints below `runs`, `logs` and `lightning_logs`, too."""


def note_begin(copy: HeadCopy, folder: StatePath) -> None:
    """Record the content of the outputs that an attempt begins with. The caller has locked the copy.

    Raises:
        StateError: it cannot be written.
    """
    found = _contents(copy)
    if found:
        least_ns = min(mtime_ns for mtime_ns, _ in found.values())
        began = _Began({path: content for path, (_, content) in found.items()}, least_ns)
        durable.write_bytes(folder / BEGAN, json.dumps(began._asdict()).encode())
    else:
        durable.remove_file(folder / BEGAN)


def new_checkpoint(copy: HeadCopy, folder: StatePath) -> str:
    """Return a file of the outputs with content that the outputs did not have when the attempt began, for people; "" if
    there is none.

    Raises:
        StateError: the head cannot read its copy.
    """
    try:
        with copy.alone():
            now = _contents(copy)
    except OSError as error:
        raise state_error(error, folder / "outputs", "read") from error
    before = _read(folder)
    known = frozenset(before.files.values())
    new = sorted(
        path
        for path, (mtime_ns, content) in now.items()
        if content not in known and (path in before.files or mtime_ns >= before.least_ns)
    )
    if not new:
        return ""
    shown = new[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")[-MOST_SHOWN:]
    more = f" and {len(new) - 1} more" if len(new) > 1 else ""
    return f"{shown!r}{more}"


def checkpoints(entries: Iterable[Listed]) -> Iterator[Listed]:
    """Yield the files that may be checkpoints."""
    for entry in entries:
        *folders, name = entry.path.split("/")
        if entry.kind != "file" or not entry.size or not LOG_FOLDERS.isdisjoint(folders):
            continue
        if not any(fnmatch(name, pattern) for pattern in LOGS):
            yield entry


class _Began(NamedTuple):
    """The content of outputs when an attempt began.

    Attributes:
        files: path → a digest of some of its content, of the files that were read.
        least_ns: when the oldest of these was written. Older files that are not among them were there, too.
    """

    files: Mapping[str, str] = MappingProxyType({})
    least_ns: int = 0


def _contents(copy: HeadCopy) -> Mapping[str, tuple[int, str]]:
    """Return path → when it was written, and a digest of some of its content."""
    newest = nlargest(MOST_FILES, checkpoints(copy.entries().values()), key=lambda entry: entry.mtime_ns)
    written = {entry.path: entry.mtime_ns for entry in newest}
    until_s = time.monotonic() + COMPARED_S
    found = takewhile(lambda _: time.monotonic() < until_s, copy.samples_of(written))
    return {path: (written[path], content) for path, content in found}


def _read(folder: StatePath) -> _Began:
    """Return what `note_begin` recorded; nothing if there is nothing, or it is damaged."""
    try:
        said = json.loads((folder / BEGAN).read_bytes())
    except StateUnavailable:
        raise
    except (FileNotFoundError, StateError, ValueError, RecursionError):
        return _Began()
    files, least_ns = (said.get("files"), said.get("least_ns")) if isinstance(said, dict) else (None, None)
    if not isinstance(files, dict) or type(least_ns) is not int:
        return _Began()
    return _Began({path: text for path, text in files.items() if isinstance(text, str)}, least_ns)

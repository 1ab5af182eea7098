"""Decide whether an attempt has written a checkpoint that no earlier attempt had, from the head's copy of its outputs.

Names and times say nothing: a program may touch its checkpoints, or write the same ones again. So the content decides.
Logs grow in every attempt, and are no progress.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from heapq import nlargest

from gpurun.errors import StateError, StateUnavailable
from gpurun.node.folder.contents import Listed
from gpurun.state import durable
from gpurun.state.paths import StatePath, state_error
from gpurun.supervisor.outputs.copy import HeadCopy

BEGAN = "outputs.began"
"""The file of the job's folder that has the content at the beginning of the attempt."""
MOST_FILES = 1000
"""So many files are compared, those that changed last."""
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
        durable.write_bytes(folder / BEGAN, json.dumps(found).encode())
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
    before = frozenset(_read(folder).values())
    new = sorted(path for path, content in now.items() if content not in before)
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


def _contents(copy: HeadCopy) -> Mapping[str, str]:
    newest = nlargest(MOST_FILES, checkpoints(copy.entries().values()), key=lambda entry: entry.mtime_ns)
    return dict(copy.samples_of(sorted(entry.path for entry in newest)))


def _read(folder: StatePath) -> Mapping[str, str]:
    """Return what `note_begin` recorded; nothing if there is nothing, or it is damaged."""
    try:
        said = json.loads((folder / BEGAN).read_bytes())
    except StateUnavailable:
        raise
    except (FileNotFoundError, StateError, ValueError, RecursionError):
        return {}
    return {path: text for path, text in said.items() if isinstance(text, str)} if isinstance(said, dict) else {}

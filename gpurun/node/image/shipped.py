"""The record of what gpurun has put into this host's Docker, so that it can remove exactly that.

A JSON file below the user's state folder on the host, changed under a lock and written as a whole.
"""

import fcntl
import json
import os
import tempfile
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List

from gpurun.node.agent import processes

Entry = Dict[str, Any]
Record = Dict[str, Entry]


def folder() -> str:
    """Return the record's folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "gpurun")


def read() -> Record:
    """Return the record; empty if it is unreadable.

    It is the head's image ID → ``{"local", "names", "layers", "sizes", "shipped_s", "temporary", "by", "needed_by"}``:
    the process that made a temporary image, and those that need an image, as in `this_process`.
    """
    try:
        with open(os.path.join(folder(), "images.json"), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {ident: entry for ident, entry in entries if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    """Return whether this version of gpurun wrote the entry."""
    if not isinstance(entry, dict):
        return False
    shipped_s = entry.get("shipped_s")
    lists = [entry.get("names"), entry.get("layers")]
    return (
        isinstance(entry.get("local"), str)
        and isinstance(shipped_s, (int, float))
        and abs(shipped_s) < 1e12  # no NaN either
        and all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists)
    )


@contextmanager
def change(required: bool = True) -> Iterator[Record]:
    """Let one process at a time change the record; writes it if the block ends without an error.

    Args:
        required: raise if it cannot be written. Who removes images goes on: it may be the disk that they fill, and an
            entry of an image that is gone does no harm.
    """
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    with open(os.path.join(folder(), "images.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = read()
        yield record
        try:
            _write(record)
        except OSError:
            if required:
                raise


def _write(record: Record) -> None:
    handle, temporary = tempfile.mkstemp(dir=folder())
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(temporary, os.path.join(folder(), "images.json"))
    except BaseException:
        os.unlink(temporary)
        raise


def need(wanted: Callable[[str, Entry], bool]) -> None:
    """Note that this process needs those images and no others: nobody removes them before it ends.

    Args:
        wanted: whether it needs an image, by the head's ID and the entry.
    """
    me = this_process()
    if not any(me in _needing(entry) or wanted(ident, entry) for ident, entry in read().items()):
        return
    with change() as record:
        for ident, entry in record.items():
            others = [process for process in _needing(entry) if process != me and _lives(process)]
            entry["needed_by"] = [*others, me] if wanted(ident, entry) else others


def is_needed(entry: Entry) -> bool:
    """Return whether another ship or job counts on an image: its agent lives as long as it."""
    me = this_process()
    return any(_lives(process) for process in _needing(entry) if process != me)


def is_abandoned(entry: Entry) -> bool:
    """Return whether an entry is of a temporary image whose ship has died, and that no ship needs."""
    return bool(entry.get("temporary")) and not _lives(entry.get("by")) and not is_needed(entry)


def this_process() -> List[int]:
    """Return this process's number and start time, because its number may be reused."""
    process = processes.read_process(os.getpid())
    return [0, 0] if process is None else [process.pid, process.started]


def _needing(entry: Entry) -> List[Any]:
    needing = entry.get("needed_by")
    return needing if isinstance(needing, list) else []


def _lives(noted: Any) -> bool:
    """Return whether a process that `this_process` described is still there."""
    if not isinstance(noted, list) or len(noted) != 2 or not all(type(number) is int for number in noted):
        return False
    process = processes.read_process(noted[0])
    return process is not None and process.started == noted[1]

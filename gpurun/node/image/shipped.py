"""The record of what gpurun has put into this host's Docker, so that it can remove exactly that.

A JSON file below the user's state folder on the host, changed under a lock and written as a whole.
"""

import fcntl
import json
import os
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator

Record = Dict[str, Dict[str, Any]]


def folder() -> str:
    """Return the record's folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "gpurun")


def read() -> Record:
    """Return the head's image ID → ``{"local", "names", "layers", "shipped_s", "temporary"}``; empty if unreadable."""
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
def change() -> Iterator[Record]:
    """Let one process at a time change the record; writes it if the block ends without an error."""
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    with open(os.path.join(folder(), "images.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = read()
        yield record
        handle, temporary = tempfile.mkstemp(dir=folder())
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(temporary, os.path.join(folder(), "images.json"))

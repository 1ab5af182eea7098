"""The id of a state directory: it distinguishes its jobs on a host from those of other users and head nodes."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import StateError, StateUnavailable
from gpurun.state import durable
from gpurun.state.path import StatePath

FILE = "identity.json"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Identity:
    """The content of ``identity.json``."""

    id: str


def state_id(home: Path) -> str:
    """Return the id of a state directory; create it when it is first needed.

    Raises:
        StateError: the file is damaged, or this user may not create it.
    """
    found = known_id(home)
    if found is not None:
        return found
    path = StatePath(home) / FILE
    made = path.sibling(f".{FILE}.{secrets.token_hex(8)}")
    durable.make_home(home)
    try:
        durable.write_record(made, Identity(secrets.token_hex(8)))
    except StateError as error:
        if not isinstance(error, StateUnavailable):
            error.hint = "ask the owner of the shared state directory to run `gpurun share`"
        raise
    with suppress(FileExistsError):  # another process was quicker: its id counts
        made.link(path)
    made.unlink()
    durable.sync_folder(path.parent)
    found = known_id(home)
    if found is None:
        raise StateError("the file is a link to a missing file", where=str(home / FILE), hint=f"remove {home / FILE}")
    return found


def known_id(home: Path) -> str | None:
    """The id of a state directory; None if it has none yet.

    Raises:
        StateError: the file is damaged.
    """
    path = StatePath(home) / FILE
    try:
        found = durable.read_record(path, Identity).id
    except FileNotFoundError:
        return None
    except StateUnavailable:  # it says nothing about the file
        raise
    except StateError as error:
        error.hint = f"remove {path}: gpurun then makes a new id, and hosts treat running jobs as jobs of another head"
        raise
    if not _ID.fullmatch(found):
        raise StateError(f"{found[:40]!r} is not the id of a state directory", where=str(path), hint=f"remove {path}")
    return found

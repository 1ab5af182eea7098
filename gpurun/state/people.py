"""Who does something: names of users and of commands, for people to read."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path


def user_name(uid: int) -> str:
    """The user's name; ``uid 1234`` for one without an entry. The environment has no say: it can be set to anything."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def has_account(uid: int) -> bool:
    """Return whether a user of this number exists on this machine."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def is_account(name: str) -> bool:
    """Return whether a user of this name exists on this machine."""
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):  # a name with a zero byte
        return False
    return True


def myself() -> str:
    """The name of the user that this process runs as."""
    return user_name(os.getuid())


def command_name(argv: Sequence[str]) -> str:
    """``gpurun submit``, ``gpurun supervisor j-0a1b2c3d``: which of our processes an argv is, in few words.

    Nothing after the first word that is not a flag is kept, so nothing secret can be.
    """
    program = Path(argv[0]) if argv else Path("gpurun")
    words = [word for word in argv[1:] if not word.startswith("-")]
    if program.name == "__main__.py" and program.parent.name == "supervisor":
        return " ".join(["gpurun supervisor", *words[:1]])
    if program.name == "waiter.py":
        return "gpurun waiter"
    return " ".join(["gpurun", *words[:1]])

"""Who did what: ``audit.jsonl`` in the state directory, one line each, only ever appended.

What is written is what a person would be asked about: a job submitted, cancelled, granted, preempted, ended or adopted,
a host cordoned, a damaged lease moved away, the inventory changed. Words of the command line that may be secret are
left out. A line is one ``write`` to a file opened for appending, so lines of several processes never mix; it is not
synced, so a power loss may cost the last ones.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpurun.errors import StateError
from gpurun.jobs import durable
from gpurun.jobs.people import command_name, myself

MAX_COMMAND_CHARS = 1000
MAX_LINE_BYTES = 1 << 20
SECRET_NAME = re.compile(r"token|secret|passw|key|credential|auth", re.IGNORECASE)
ENV_FLAGS = ("-e", "--env")


def audit_file(home: Path) -> Path:
    """Where it is kept."""
    return home / "audit.jsonl"


def note(home: Path, what: str, *, job: str | None = None, **fields: object) -> None:
    """Append one line; `fields` must be JSON values. What cannot be written is not worth stopping for."""
    entry = {
        "time_s": round(time.time(), 3),
        "what": what,
        "user": myself(),
        "uid": os.getuid(),
        "sudo_user": os.environ.get("SUDO_USER"),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "command": without_secrets(sys.argv),
        "job": job,
        **fields,
    }
    line = json.dumps({key: value for key, value in entry.items() if value is not None})
    with suppress(OSError, StateError):
        durable.append_line(audit_file(home), line)


def read(home: Path) -> Iterator[Mapping[str, Any]]:
    """Every entry, oldest first; a line that is damaged comes as ``{"what": "damaged", "text": …}``.

    Raises:
        StateError: it cannot be read.
    """
    try:
        stream = durable.opened(audit_file(home))
    except FileNotFoundError:
        return
    with stream:
        while raw := stream.readline(MAX_LINE_BYTES):
            try:
                entry = json.loads(raw)
            except (ValueError, RecursionError):
                entry = None
            text = raw.decode("utf-8", "replace").rstrip("\n")
            yield entry if isinstance(entry, dict) else {"what": "damaged", "text": text}


def without_secrets(argv: Sequence[str]) -> str:
    """A command line for others to read: what may be secret is ``***``.

    That is the value of every ``-e`` and of every flag or setting whose name sounds like it, passwords in URLs, and all
    arguments of a user's own program (after ``--``), of which only the name is kept.
    """
    words = [command_name(argv[:1]), *argv[1:]]
    program: list[str] = []
    if "--" in words:
        at = words.index("--")
        program = ["--", *words[at + 1 : at + 2], *(["…"] if len(words) > at + 2 else [])]
        words = words[:at]
    shown, previous = [], ""
    for word in words:
        shown.append(_masked(word, previous))
        previous = word
    return " ".join([*shown, *program])[:MAX_COMMAND_CHARS]


def _masked(word: str, previous: str) -> str:
    name, equals, value = word.partition("=")
    if name == "--env" and equals:
        return f"--env={value.partition('=')[0]}=***"
    if previous in ENV_FLAGS or (equals and (name.startswith("-e") or SECRET_NAME.search(name))):
        return f"{name}=***"
    if previous.startswith("--") and "=" not in previous and SECRET_NAME.search(previous):
        return "***"
    return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:***@", word)

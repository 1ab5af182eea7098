"""Golden files as text: what is no promise becomes a placeholder, and a state directory becomes one file and back."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).parent
WRITES = os.environ.get("GPURUN_GOLDEN") == "write"
_PLACES = (
    (r'("(?:owner_)?uid": ?|gpurun\.uid=)\d+', r"\1{UID}"),
    (r'("pid": ?)\d+', r'\1{PID}'),
    (r'"device":\d+,"boot":"[^"]*"', '"device":{DEVICE},"boot":"{BOOT}"'),
    (r"(?<=history/)\d+|(?<=machines/)\d+|(?<=waiters/)\d+", "{UID}"),
    (r"(?<=inventory/)[0-9a-f]{16}", "{HASH}"),
    (r'("(?:disk_free_bytes|elapsed_s)": ?)[\d.]+', r'\1{NUMBER}'),
    (r'[^"\s]*(?=/\.ssh/)', "{HOME}"),
    (r"(?<=[js]-)0000(?!0000)[0-9a-f]{4}\b", "{ID}"),
)  # fmt: skip
"""What differs between machines, users and runs, and what it becomes."""
_FILL = (("{ID}", "0000abcd"), ("{UID}", str(os.getuid())), ("{PID}", "1"), ("{DEVICE}", "0"), ("{BOOT}", "0"))
_HEAD = re.compile(r"^=== (.*)\n", re.MULTILINE)


def normal(text: str, top: Path) -> str:
    """Return a text with placeholders."""
    text = text.replace(str(top), "{TOP}")
    for pattern, place in _PLACES:
        text = re.sub(pattern, place, text)
    return text


_OF_COMMANDS = {
    "version": (r'": (null|"\d[^"]*")', '": "{VERSION}"'),
    "metrics": (r'version="[^"]*"', 'version="{VERSION}"'),
    "follow good": (r"(?m)^ *[\d.]+s  ", "{NUMBER}  "),
    "follow bad": (r"(?m)^ *[\d.]+s  ", "{NUMBER}  "),
    "inventory probe h1": (r"in [\d.]+ s$", "in {NUMBER} s"),
    "prune --older-than 1s --yes": (r'("bytes": )\d+', r"\1{BYTES}"),
    "du": (r'("(?:outputs|logs|other|total)": )\d+', r"\1{BYTES}"),
}
"""Versions, durations, and sizes that depend on the file system."""


def told(line: str, code: int, out: str, err: str, top: Path) -> str:
    """Return how a command line was answered. A document has a line for each key, and for each entry of a list."""
    parts = [f"$ gpurun {line}", _lines_of(out).rstrip("\n"), *(["--- stderr", err.rstrip("\n")] if err else [])]
    text = normal("\n".join(filter(None, parts)), top)
    if found := _OF_COMMANDS.get(line):
        text = re.sub(*found, text)
    return f"{text}\n=== exit code {code}\n\n"


def _lines_of(out: str) -> str:
    try:
        document = json.loads(out)
    except ValueError:
        return out
    if not isinstance(document, dict) or f"{json.dumps(document, ensure_ascii=False)}\n" != out:
        return out
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_rows(value)}" for key, value in document.items()) + "\n}"


def _rows(value: object) -> str:
    if not isinstance(value, list) or not any(isinstance(one, dict) for one in value):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value) + "\n]"


def compared(name: str, found: str) -> None:
    """Compare with the golden file of that name; with GPURUN_GOLDEN=write, replace it.

    Raises:
        AssertionError: they differ; it shows how.
    """
    path = FOLDER / name
    if WRITES:
        path.write_text(found, encoding="utf-8")
    wanted = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), name, "now", lineterm="", n=2)
    told = "\n".join(lines)
    assert not told, f"{told}\n\nGPURUN_GOLDEN=write pytest tests/golden accepts this"


def packed(home: Path, top: Path) -> str:
    """Return all that lies in a state directory: names, kinds, modes and contents."""
    seen: dict[int, str] = {}
    return "".join(f"=== {part}" for part in _parts(home, top, seen))


def _parts(home: Path, top: Path, seen: dict[int, str]) -> Iterator[str]:
    for path in sorted(home.rglob("*")):
        found, name = path.lstat(), normal(path.relative_to(home).as_posix(), top)
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        if stat.S_ISDIR(found.st_mode):
            yield f"{mode} folder {name}\n"
        elif found.st_ino in seen:
            yield f"{mode} link {name} {seen[found.st_ino]}\n"
        else:
            seen[found.st_ino] = name
            kind, text = _content(path)
            yield f"{mode} {kind} {name}\n{normal(text, top)}{'' if text.endswith(chr(10)) or not text else chr(10)}"


def _content(path: Path) -> tuple[str, str]:
    if path.suffix == ".db":
        with closing(sqlite3.connect(path)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            return "sql", "".join(f"{line}\n" for line in (f"PRAGMA user_version={version};", *database.iterdump()))
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "base64", base64.encodebytes(data).decode()
    return "text" if text.endswith("\n") or not text else "unended", text


def unpacked(text: str, home: Path, top: Path, now_s: float) -> None:
    """Make the state directory that `packed` has made a text of. Each file is a bit younger than the one before."""
    of_inventory = hashlib.sha256(os.fsencode(top.resolve() / "inventory.yaml")).hexdigest()[:16]
    for place, value in (("{TOP}", str(top)), ("{HASH}", of_inventory), *_FILL):
        text = text.replace(place, value)
    home.mkdir()
    _, *parts = _HEAD.split(text)
    made = []
    for head, content in zip(parts[::2], parts[1::2], strict=True):
        mode, kind, name, *of = head.split(" ")
        path = home / name
        _make(path, kind, content, home.joinpath(*of))
        path.chmod(int(mode, 8))
        made.append(path)
    for number, path in enumerate(made):
        os.utime(path, (now_s - 1000.0, now_s - 1000.0 + number / 100))


def _make(path: Path, kind: str, content: str, other: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.hardlink_to(other)
    elif kind == "sql":
        with closing(sqlite3.connect(path)) as database:
            database.executescript(content)
    elif kind == "base64":
        path.write_bytes(base64.b64decode(content))
    else:
        path.write_text(content if kind == "text" else content[:-1], encoding="utf-8")

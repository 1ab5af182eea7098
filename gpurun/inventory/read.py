"""Load an inventory file."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpurun.documents.plain import DocumentError, Problem
from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory
from gpurun.msgspec_types import ready
from gpurun.state import caches

# Find the inventory file of a command.


def find_inventory(explicit: str | None, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the inventory file.

    The first of: the value of ``--inventory``, ``$GPURUN_INVENTORY``, ``./inventory.yaml``,
    ``$XDG_CONFIG_HOME/gpurun/inventory.yaml``, ``/etc/gpurun/inventory.yaml``. gpurun never skips the first two: if the
    named file does not exist, that is an error.

    Raises BadInput: no inventory exists; the message lists the searched places.
    """
    if explicit == "":
        raise BadInput(
            "the inventory's path is empty",
            hint="name a file; without --inventory, gpurun looks for inventory.yaml",
        )
    named = explicit or environ.get("GPURUN_INVENTORY")
    if named:
        hint = None if explicit else "the variable GPURUN_INVENTORY names the file: change or unset the variable"
        try:
            path = Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise BadInput(f"there is no inventory at {named}: no such user", hint=hint) from error
        if "\0" in named or not is_there(path):  # no command line has such a byte; a program may
            raise BadInput(f"there is no inventory at {path}", hint=hint)
        return path
    places = candidates(environ)
    for place in places:
        if is_there(place):
            return place
    looked = "\n".join(f"  {place}" for place in places)
    raise BadInput(
        f"gpurun found no inventory; it looked for\n{looked}",
        hint="make an inventory with `gpurun init 'gpu-[01-16]'`, or name an inventory with --inventory FILE. For "
        "the lab, run `export GPURUN_INVENTORY=$(gpurun lab up)/inventory.yaml` in each terminal",
    )


def is_there(path: Path) -> bool:
    """Return True if the path exists, or cannot be inspected: reading it then reports the reason."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the default places of the inventory, in the order of the search."""
    home = environ.get("HOME")
    config = Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else None
    if config is None and home:
        config = Path(home) / ".config"
    places = [Path.cwd() / "inventory.yaml"]
    if config is not None:
        places.append(config / "gpurun" / "inventory.yaml")
    places.append(Path("/etc/gpurun/inventory.yaml"))
    return tuple(places)


# A cache of large inventories: the values of the last parse, in the user's own cache folder.


PACKAGES = (Path(__file__).parent, Path(__file__).parents[1] / "documents")
CODE = caches.code_stamp(*PACKAGES)
"""Of the code that this process runs, which pip may have replaced since."""
MIN_HOSTS = 256  # gpurun parses a smaller inventory as fast as it reads a cache entry


@dataclass(frozen=True)
class Key:
    """The origin of a cached inventory: the file in this exact state, and the code that parsed it."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    code: str


@dataclass(frozen=True)
class _Cached:
    key: Key
    inventory: Inventory


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of parsed inventories; None if the environment names none."""
    return caches.cache_room(environ, "inventory")


def cache_key(path: Path, status: os.stat_result) -> Key:
    """Return the key of a file. `status` must come from the descriptor from which the caller reads the file."""
    return Key(
        path=str(path),
        inode=status.st_ino,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        code=CODE,
    )


def fetch(cache: Path, wanted: Key) -> Inventory | None:
    """Return the cached inventory for this key, or None."""
    payload = caches.read_cache(caches.cache_file(cache, wanted.path))
    try:
        entry = msgspec.msgpack.decode(payload or b"", type=ready(_Cached))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry.inventory if entry.key == wanted else None


def keep_inventory(cache: Path, made_from: Key, inventory: Inventory) -> None:
    """Store an inventory for the next command, if it is large and its file has not just changed. Never fails."""
    if len(inventory.hosts) >= MIN_HOSTS and caches.is_settled(made_from.changed_ns):
        caches.keep_cache(
            caches.cache_file(cache, made_from.path), msgspec.msgpack.encode(_Cached(made_from, inventory))
        )


MAX_BYTES = 8 * 1024 * 1024  # 10,000 hosts in one entry each are about 1 MiB


def load_inventory(path: Path | str) -> Inventory:
    """Return the inventory in a file; a large inventory comes from the user's cache if it was read before.

    Its `source` is the canonical path: all spellings of a path, and links to it, give the same cluster.

    Raises DocumentError with all errors of the file; BadInput if the file is unreadable.
    """
    source = Path(os.path.realpath(path))
    with opened(source) as file:
        kept = cache_folder(os.environ)
        key = cache_key(source, os.fstat(file.fileno()))
        inventory = fetch(kept, key) if kept else None
        if inventory is not None:
            return inventory
        data = _content(file, source, "the inventory", MAX_BYTES)
        unchanged = key == cache_key(source, os.fstat(file.fileno()))
    inventory = parse_inventory(data, source, shown_as=str(path))
    if kept and unchanged:
        keep_inventory(kept, key, inventory)
    return inventory


def parse_inventory(data: bytes, source: Path, *, shown_as: str | None = None) -> Inventory:
    """Return the inventory in a file's bytes.

    Args:
        source: the path of the file; relative paths in the inventory start at its folder.
        shown_as: the file's name in messages; default: `source`.
    Raises DocumentError with all errors of the file.
    """
    from gpurun.documents.convert import ProblemReport, compose_document  # noqa: PLC0415
    from gpurun.inventory.validate import inventory  # noqa: PLC0415

    file = shown_as or str(source)
    if len(data) > MAX_BYTES:
        raise DocumentError([Problem(file, 1, 1, f"the file is larger than {MAX_BYTES >> 20} MiB")])
    report = ProblemReport(file)
    with collector_at_rest():
        root = compose_document(data, file)
        if root is None:
            raise DocumentError([Problem(file, 1, 1, "the inventory is empty", allowed=("version: 1 …",))])
        found = inventory(root, report, source)
    report.raise_if_any()
    return found


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Stop the garbage collector during a parse: all new objects stay alive, and the collector doubles the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def read_inventory_bytes(path: Path, what: str = "the inventory", *, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of an inventory file or a similar file: `most_bytes`, plus one if the file is larger.

    Raises BadInput if it is not a readable regular file.
    """
    with opened(path, what) as file:
        return _content(file, path, what, most_bytes)


def _content(file: BinaryIO, path: Path, what: str, most_bytes: int) -> bytes:
    try:
        return file.read(most_bytes + 1)
    except OSError as error:
        raise BadInput(f"cannot read {what}: {error.strerror}", where=str(path)) from error


def opened(path: Path, what: str = "the inventory") -> BinaryIO:
    """Open a file for reading. Raises BadInput if it is not a readable regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"cannot read {what}: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise BadInput(f"cannot read {what}: {error}", where=repr(str(path))) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise BadInput(f"{what} must be a regular file", where=str(path))

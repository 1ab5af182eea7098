"""Load an inventory file."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gpurun.documents.problems import DocumentError, Problem
from gpurun.errors import BadInput
from gpurun.inventory import cache
from gpurun.inventory.model import Inventory

MAX_BYTES = 8 * 1024 * 1024  # 10,000 hosts in one entry each are about 1 MiB


def load(path: Path | str) -> Inventory:
    """Return the inventory in a file; a large inventory comes from the user's cache if it was read before.

    Its `source` is the canonical path: all spellings of a path, and links to it, give the same cluster.

    Raises DocumentError with all errors of the file; BadInput if the file is unreadable.
    """
    source = Path(os.path.realpath(path))
    with opened(source) as file:
        kept = cache.folder(os.environ)
        key = cache.key(source, os.fstat(file.fileno()))
        inventory = cache.fetch(kept, key) if kept else None
        if inventory is not None:
            return inventory
        data = _content(file, source, "the inventory", MAX_BYTES)
        unchanged = key == cache.key(source, os.fstat(file.fileno()))
    inventory = parse(data, source, shown_as=str(path))
    if kept and unchanged:
        cache.keep(kept, key, inventory)
    return inventory


def parse(data: bytes, source: Path, *, shown_as: str | None = None) -> Inventory:
    """Return the inventory in a file's bytes.

    Args:
        source: the path of the file; relative paths in the inventory start at its folder.
        shown_as: the file's name in messages; default: `source`.
    Raises DocumentError with all errors of the file.
    """
    from gpurun.documents.nodes import ProblemReport, compose  # noqa: PLC0415  a cached inventory needs no YAML
    from gpurun.inventory.validate import inventory  # noqa: PLC0415

    file = shown_as or str(source)
    if len(data) > MAX_BYTES:
        raise DocumentError([Problem(file, 1, 1, f"the file is larger than {MAX_BYTES >> 20} MiB")])
    report = ProblemReport(file)
    with collector_at_rest():
        root = compose(data, file)
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


def read(path: Path, what: str = "the inventory", *, most_bytes: int = MAX_BYTES) -> bytes:
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

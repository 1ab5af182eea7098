"""An inventory file to an Inventory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.document import MAX_BYTES, Report, compose
from gpurun.inventory.model import Inventory
from gpurun.inventory.problems import InventoryError, Problem
from gpurun.inventory.validate import inventory


def load(path: Path | str) -> Inventory:
    """The inventory in a file.

    Raises InventoryError with everything that is wrong with it; BadInput if it cannot be read.
    """
    source = Path(path).absolute()
    return parse(read(source), source, shown_as=str(path))


def parse(data: bytes, source: Path, *, shown_as: str | None = None) -> Inventory:
    """The inventory in a file's bytes.

    Args:
        source: the file they are from; paths inside are relative to its folder.
        shown_as: how messages name the file; `source` unless given.
    Raises InventoryError with everything that is wrong with it.
    """
    file = shown_as or str(source)
    root = compose(data, file)
    if root is None:
        raise InventoryError([Problem(file, 1, 1, "the inventory is empty", allowed=("version: 1 …",))])
    report = Report(file)
    found = inventory(root, report, source)
    report.raise_if_any()
    return found


def read(path: Path) -> bytes:
    """The bytes of an inventory file. Raises BadInput if it is not a readable regular file of sane size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"cannot read the inventory: {error.strerror}", where=str(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadInput("an inventory must be a regular file", where=str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)

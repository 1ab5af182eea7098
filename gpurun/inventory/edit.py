"""Changes to an inventory file that a person owns: what changes is as small as they would have made it.

An edit is a value; `apply` turns bytes into bytes. The values change in ruamel.yaml's round-trip tree, and
`gpurun.inventory.merge` brings the difference into the text. What comes out is read again and compared with
what the edit says, so that no edit can change a host it does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.check import check
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import fold
from gpurun.inventory.load import parse
from gpurun.inventory.model import Inventory
from gpurun.inventory.problems import InventoryError
from gpurun.inventory.settings import Setting
from gpurun.inventory.tree import Tree


@dataclass(frozen=True)
class SetFields:
    """Gives hosts values of their own, or takes them away; ``rack`` moves them. Idempotent."""

    hosts: tuple[str, ...]
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class AddHosts:
    """New hosts, in one entry, at the end of a rack; the rack is made if there is none of that name."""

    hosts: tuple[str, ...]
    rack: str
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class RemoveHosts:
    """Takes hosts out; their racks stay."""

    hosts: tuple[str, ...]


Edit = SetFields | AddHosts | RemoveHosts


def apply(data: bytes, source: Path, edit: Edit) -> bytes:
    """The file after an edit.

    Raises InventoryError: the file is not valid. BadInput: the edit cannot be made, or what it makes is not valid.
    """
    before = parse(data, source)
    original = data.decode("utf-8")
    tree = Tree(original)
    if isinstance(edit, SetFields):
        tree.set([name for name in edit.hosts if _differs(before, name, edit.settings)], edit.settings)
    elif isinstance(edit, AddHosts):
        present = [name for name in edit.hosts if name in before.by_name]
        if present:
            raise BadInput(f"the inventory has {fold(present)} already", where=str(source))
        tree.add(edit.hosts, edit.rack, edit.settings)
    else:
        tree.remove(edit.hosts)
    after = tree.merged().encode("utf-8")
    settings = None if isinstance(edit, RemoveHosts) else edit.settings
    check(before, _read_again(after, source), edit.hosts, settings)
    return after


def _read_again(after: bytes, source: Path) -> Inventory:
    try:
        return parse(after, source)
    except InventoryError as error:
        said = "; ".join(problem.message for problem in error.problems[:3])
        raise BadInput(f"that would not be valid: {said}", where=str(source)) from error


def _differs(inventory: Inventory, name: str, settings: Sequence[Setting]) -> bool:
    """Whether a host is not yet as the settings say; one that is not there is told about later."""
    host = inventory.by_name.get(name)
    return host is None or any(
        setting.value is None
        or setting.field in PER_HOST
        or setting.value != (host.labels.get(setting.label) if setting.label else getattr(host, setting.field))
        for setting in settings
    )

"""Edits of an inventory file that a user owns: as small as if the user had made them by hand.

An edit is a value; `apply` converts bytes to bytes. It changes the values in ruamel.yaml's round-trip tree, and
`gpurun.inventory.merge` merges the difference into the text. `apply` then parses the result and compares it with the
edit, so that no edit can change a host that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.documents.problems import DocumentError
from gpurun.errors import BadInput
from gpurun.inventory.addresses import shares
from gpurun.inventory.check import check, check_each
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import fold
from gpurun.inventory.load import collector_at_rest, parse
from gpurun.inventory.model import Inventory
from gpurun.inventory.settings import HostSetting
from gpurun.inventory.slices import rack_lines
from gpurun.inventory.tree import InventoryTree


@dataclass(frozen=True)
class SetFields:
    """Set or remove values of hosts; ``rack`` moves the hosts. Idempotent."""

    hosts: tuple[str, ...]
    settings: tuple[HostSetting, ...]


@dataclass(frozen=True)
class AddHosts:
    """Add new hosts in one entry at the end of a rack. Creates the rack if no rack has this name."""

    hosts: tuple[str, ...]
    rack: str
    settings: tuple[HostSetting, ...] = ()


@dataclass(frozen=True)
class RemoveHosts:
    """Remove hosts; their racks stay."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class SetEach:
    """Set values of several hosts at once, such as addresses that they exchange; each host is in one of the edits."""

    edits: tuple[SetFields, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts."""
        return tuple(name for edit in self.edits for name in edit.hosts)


Edit = SetFields | SetEach | AddHosts | RemoveHosts
_SECTION = "racks:\n"


def apply(data: bytes, source: Path, edit: Edit) -> bytes:
    """Return the file after an edit.

    Raises DocumentError: the file is not valid. BadInput: the edit is impossible, or its result is not valid.
    """
    before = parse(data, source)
    if isinstance(edit, AddHosts):
        present = [name for name in edit.hosts if name in before.by_name]
        if present:
            raise BadInput(f"the inventory already has {fold(present)}", where=str(source))
    else:
        missing = [name for name in edit.hosts if name not in before.by_name]
        if missing:
            raise BadInput(f"the inventory has no host {fold(missing)}", where=str(source))
    with collector_at_rest():
        after = _edited(data.decode("utf-8"), before, edit).encode("utf-8")
    result = _read_again(after, source)
    if isinstance(edit, SetEach):
        check_each(before, result, {name: own for each in edit.edits for name, own in _of_each_host(each)})
    else:
        check(before, result, edit.hosts, None if isinstance(edit, RemoveHosts) else edit.settings)
    return after


def _of_each_host(edit: SetFields) -> Iterator[tuple[str, tuple[HostSetting, ...]]]:
    """Return the settings of each host, with its own address of a range of addresses."""
    addresses = {setting.field: shares(setting, edit.hosts) for setting in edit.settings if setting.field in PER_HOST}
    for name in edit.hosts:
        yield (
            name,
            tuple(
                replace(setting, value=addresses[setting.field][name]) if addresses.get(setting.field) else setting
                for setting in edit.settings
            ),
        )


def _edited(text: str, before: Inventory, edit: Edit) -> str:
    """Return the text after an edit, rack by rack where possible."""
    hosts = edit.hosts
    if isinstance(edit, SetFields):
        hosts = tuple(name for name in hosts if _differs(before, name, edit.settings))
    lines = rack_lines(text) if _is_local(edit) else {}
    if not lines:
        return _with_edit(text, edit, hosts)
    if isinstance(edit, AddHosts):
        return _spliced(text, lines.get(edit.rack) or max(lines.values()), edit, hosts)
    by_rack: dict[str, list[str]] = {}
    for name in hosts:
        by_rack.setdefault(before.by_name[name].rack, []).append(name)
    for rack in sorted(by_rack, key=lambda rack: -lines[rack][0]):  # from the end, so that positions stay valid
        text = _spliced(text, lines[rack], edit, by_rack[rack])
    return text


def _spliced(text: str, lines: tuple[int, int], edit: Edit, hosts: Sequence[str]) -> str:
    start, end = lines
    return text[:start] + _with_edit(_SECTION + text[start:end], edit, hosts).removeprefix(_SECTION) + text[end:]


def _is_local(edit: Edit) -> bool:
    """Return True if gpurun can make an edit rack by rack: it moves no host and distributes no addresses."""
    if isinstance(edit, SetEach):
        return False
    settings = () if isinstance(edit, RemoveHosts) else edit.settings
    return not any(setting.field == "rack" or setting.field in PER_HOST for setting in settings)


def _with_edit(text: str, edit: Edit, hosts: Sequence[str]) -> str:
    tree = InventoryTree(text)
    if isinstance(edit, SetEach):
        for each in edit.edits:
            tree.set(each.hosts, each.settings)
    elif isinstance(edit, SetFields):
        tree.set(hosts, edit.settings)
    elif isinstance(edit, AddHosts):
        tree.add(hosts, edit.rack, edit.settings)
    else:
        tree.remove(hosts)
    return tree.merged()


def _read_again(after: bytes, source: Path) -> Inventory:
    try:
        return parse(after, source)
    except DocumentError as error:
        said = "; ".join(problem.message for problem in error.problems[:3])
        raise BadInput(f"the changed inventory would not be valid: {said}", where=str(source)) from error


def _differs(inventory: Inventory, name: str, settings: Sequence[HostSetting]) -> bool:
    """Return True if a host does not yet have the values of the settings."""
    host = inventory.by_name[name]
    return any(
        setting.value is None
        or setting.field in PER_HOST
        or setting.value != (host.labels.get(setting.label) if setting.label else getattr(host, setting.field))
        for setting in settings
    )

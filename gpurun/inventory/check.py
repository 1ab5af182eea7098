"""Check that an edit made exactly the change that the user asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace

from gpurun.errors import BadInput, StateError
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import expand, fold
from gpurun.inventory.model import Host, Inventory
from gpurun.inventory.settings import HostSetting


def check(before: Inventory, after: Inventory, hosts: Iterable[str], settings: tuple[HostSetting, ...] | None) -> None:
    """Raise unless `after` is `before` with these settings on these hosts.

    Args:
        settings: None = the edit removed these hosts.
    Raises BadInput: the edit removes a value that the host inherits. StateError: the edit changed something else. This
    is a fault of gpurun, and the caller must not write the file.
    """
    named = dict.fromkeys(hosts)
    _check_others(before, after, named, set(named) if settings is None else set())
    for name in named if settings is not None else ():
        _check_host(before.by_name.get(name), after.by_name[name], settings or ())
    for setting in settings or ():
        if setting.field in PER_HOST and "[" in setting.text:
            for name, address in zip(named, expand(setting.text), strict=True):
                if getattr(after.by_name[name], setting.field) != address:
                    raise _fault(f"the edit would not set {setting.field} of {name} to {address}")


def check_each(before: Inventory, after: Inventory, settings: Mapping[str, tuple[HostSetting, ...]]) -> None:
    """Like `check`, for settings that differ from host to host; each address is that of one host."""
    _check_others(before, after, settings, set())
    for name, own in settings.items():
        _check_host(before.by_name[name], after.by_name[name], own)
        for setting in own:
            if setting.field in PER_HOST and setting.value is not None:
                have = getattr(after.by_name[name], setting.field)
                if have != setting.value:
                    raise _fault(f"the edit would set {setting.field} of {name} to {have}")


def _check_others(before: Inventory, after: Inventory, named: Collection[str], goes: set[str]) -> None:
    """Raise unless only the named hosts change, and those of `goes` are gone."""
    for name, host in after.by_name.items():
        if name not in named and before.by_name.get(name) != host:
            raise _fault(f"the edit would also change host {name}")
    gone = before.by_name.keys() - after.by_name.keys()
    if gone != goes:
        raise _fault(f"the edit would remove hosts {fold(gone) if gone else '(none)'}")
    if replace(before, hosts=(), racks=()) != replace(after, hosts=(), racks=()):
        raise _fault("the edit would change more than hosts")


def _check_host(before: Host | None, after: Host, settings: tuple[HostSetting, ...]) -> None:
    """Raise unless a host has the values of the settings and no other value changed."""
    free = {setting.field for setting in settings if setting.value is None or setting.field in PER_HOST}
    for setting in settings:
        have = after.labels.get(setting.label) if setting.label else getattr(after, setting.field)
        if setting.label and setting.value is None and have is not None:
            raise BadInput(
                f"label {setting.label} of {after.name} comes from `defaults`; change the label in `defaults`"
            )
        if setting.field not in free and have != setting.value:
            raise _fault(f"the edit would set {setting.field} of {after.name} to {have!r}, not {setting.value!r}")
    if before is None or any(setting.field == "rack" for setting in settings):
        return  # the new rack has other defaults
    changed = free | {setting.field for setting in settings}
    for field in fields(Host):
        if field.name not in changed and getattr(before, field.name) != getattr(after, field.name):
            raise _fault(f"the edit would also change {field.name} of {after.name}")


def _fault(what: str) -> StateError:
    return StateError(
        f"gpurun did not change the inventory because of a bug in gpurun: {what}",
        hint="change the file with `gpurun inventory edit`, and please report the bug",
    )

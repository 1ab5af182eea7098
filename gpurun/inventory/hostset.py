"""Sets of hosts in ClusterShell's syntax: ``gpu-r1-[01-16]``, ``@rack:r1&!@cordoned``.

ClusterShell parses the sets. This module adds gpurun's groups and rejects names that are not host names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupResolver, GroupResolverError, GroupSource, GroupSourceError
from ClusterShell.RangeSet import RangeSetException

from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory

MAX_HOSTS = 100_000
_MAX_CHARACTERS = 1_000_000
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
                   r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*\Z", re.ASCII)  # fmt: skip
_FOLDED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\[\],/-]*\Z", re.ASCII)
_SIMPLE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)\[(\d{1,6})-(\d{1,6})\]([A-Za-z0-9_.-]*)\Z", re.ASCII)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?:/(\d{1,9}))?\Z", re.ASCII)
_SELECTION = re.compile(r"[A-Za-z0-9_.\[\],/@:!&^*?=-]+\Z", re.ASCII)
_SHOWN_NAMES = 5


def is_host_name(text: str) -> bool:
    """Return True if a text is a host name: letters, digits, ``-``, ``_``, dots; never an option or a shell word."""
    return _NAME.match(text) is not None


def expand(folded: str) -> tuple[str, ...]:
    """Return the host names of ``gpu-r1-[01-16]``, in order.

    Raises BadInput: not a range, an invalid host name, or more than MAX_HOSTS names.
    """
    if is_host_name(folded):
        return (folded,)
    simple = _SIMPLE.match(folded)
    if simple:
        names = _simple_range(*simple.groups())
        if names:
            return names
    if not _FOLDED.match(folded):
        raise BadInput(f"{shown(folded)} is not a host name or a range such as 'gpu-r1-[01-16]'")
    _bound(folded)
    names = tuple(_parsed(folded))
    for name in names:
        if not is_host_name(name):
            raise BadInput(f"{shown(name)} is not a host name")
    return names


def _simple_range(prefix: str, first: str, last: str, suffix: str) -> tuple[str, ...]:
    """Expand a range such as ``gpu-r1-[01-16]``. Large inventories have hundreds; ClusterShell takes ten times longer.

    Returns the names that ClusterShell would return, or nothing if ClusterShell must parse the text.
    """
    width = len(first) if len(first) == len(last) else 0
    if (not width and (first[0] == "0" or last[0] == "0")) or int(first) > int(last):
        return ()
    if int(last) - int(first) >= MAX_HOSTS or not is_host_name(prefix + last + suffix):
        return ()
    return tuple(f"{prefix}{number:0{width}}{suffix}" for number in range(int(first), int(last) + 1))


def fold_by_clustershell(names: Iterable[str]) -> str:
    """Return the shortest notation for these hosts, such as ``gpu-r1-[01-06,08-16]``."""
    return str(NodeSet.fromlist(list(names), resolver=_NO_GROUPS))


def quoted(names: Iterable[str]) -> str:
    """Return these hosts, quoted for a shell, because a shell expands ``[01-06]`` as a file name pattern."""
    return shlex.quote(fold_by_clustershell(names))


def select(inventory: Inventory, selection: str, groups: Mapping[str, Iterable[str]] | None = None) -> tuple[str, ...]:
    """Return the hosts of a selection, in the inventory's order.

    Args:
        selection: names and ranges, ``@rack:R``, ``@generation:G``, ``@fabric:F``, ``@label:KEY=VALUE``,
            ``@all`` and the given groups. Operators: ``,`` (union), ``&`` (intersection), ``!`` or ``&!`` (difference),
            ``^`` (symmetric difference).
        groups: more groups by name, such as ``{"cordoned": […]}`` for ``@cordoned``.

    Raises BadInput: invalid syntax, an unknown group, or hosts that the inventory does not have.
    """
    compact = "".join(selection.split())
    if not compact or not _SELECTION.match(compact):
        raise BadInput(
            f"{shown(selection)} is not a host set",
            hint="write a host set such as 'gpu-r1-[01-16]' or '@rack:r1!@lost'",
        )
    _bound(compact)
    compact = compact.replace("&!", "!")
    if compact.startswith("!"):
        compact = "@all" + compact
    resolver = GroupResolver(default_source=_Groups("is", _plain_groups(inventory, groups or {})))
    for name, members in _sources(inventory).items():
        resolver.add_source(_Groups(name, members))
    wanted = set(_parsed(compact, resolver))
    unknown = wanted - inventory.by_name.keys()
    if unknown:
        raise _unknown_hosts(unknown, inventory)
    return tuple(host.name for host in inventory.hosts if host.name in wanted)


def _parsed(text: str, resolver: GroupResolver | None = None) -> Iterator[str]:
    try:
        yield from NodeSet(text, resolver=resolver or _NO_GROUPS)
    except (NodeSetException, RangeSetException, GroupResolverError, GroupSourceError) as error:
        raise BadInput(f"host set {shown(text)}: {error}") from error


def _bound(text: str) -> None:
    """Refuse a set that would not fit in memory, before ClusterShell expands it."""
    if len(text) > _MAX_CHARACTERS:
        raise BadInput(f"the host set has more than {_MAX_CHARACTERS} characters")
    product = 1
    for brackets in _BRACKETS.finditer(text):
        count = 0
        for part in brackets.group(1).split(","):
            found = _RANGE.match(part)
            if not found:
                raise BadInput(f"{shown(text)}: {shown(part)} is not a range such as '01-16'")
            first, last, step = found.groups()
            count += 1 if last is None else max(0, int(last) - int(first)) // max(1, int(step or 1)) + 1
        product *= max(count, 1)
        if product > MAX_HOSTS:
            raise BadInput(f"{shown(text)} names more than {MAX_HOSTS} hosts")


_SHOWN_GROUPS = 20


class _Groups(GroupSource):  # type: ignore[misc]  # ClusterShell has no types
    """Groups in a dictionary, for ClusterShell."""

    def __init__(self, name: str, members: Mapping[str, Iterable[str]]) -> None:
        super().__init__(name)
        self._members = members
        self._prefix = "" if name == "is" else f"{name}:"

    def resolv_map(self, group: str) -> str:
        if group not in self._members:
            known = [f"@{self._prefix}{name}" for name in sorted(self._members)[:_SHOWN_GROUPS]]
            known += [] if self._prefix else ["@rack:NAME", "@generation:NAME", "@fabric:NAME", "@label:KEY=VALUE"]
            known += ["…"] if len(self._members) > _SHOWN_GROUPS else []
            hint = f"the groups are: {', '.join(known)}" if known else f"the inventory has no group @{self._prefix}NAME"
            raise BadInput(f"there is no group @{self._prefix}{shown(group)[1:-1]}", hint=hint)
        return ",".join(self._members[group])

    def resolv_list(self) -> list[str]:
        return list(self._members)

    def resolv_all(self) -> str:
        return ",".join(self._members.get("all", ()))


_NO_GROUPS = GroupResolver(default_source=_Groups("is", {}))


def _plain_groups(inventory: Inventory, groups: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    everything = [host.name for host in inventory.hosts]
    known = inventory.by_name
    return {
        "all": everything,
        **{name: [m for m in members if m in known] for name, members in groups.items()},
    }


def _sources(inventory: Inventory) -> dict[str, dict[str, list[str]]]:
    sources: dict[str, dict[str, list[str]]] = {"rack": {}, "generation": {}, "fabric": {}, "label": {}}
    for rack in inventory.racks:
        sources["rack"][rack.name] = list(rack.hosts)
    for host in inventory.hosts:
        sources["generation"].setdefault(host.generation, []).append(host.name)
        sources["fabric"].setdefault(host.fabric, []).append(host.name)
        for key, value in host.labels.items():
            sources["label"].setdefault(f"{key}={value}", []).append(host.name)
    return sources


def _unknown_hosts(unknown: set[str], inventory: Inventory) -> BadInput:
    folded = fold_by_clustershell(unknown)
    close = get_close_matches(min(unknown), list(inventory.by_name)[:2000], n=1)
    hint = f"did you mean {close[0]}?" if close else "`gpurun inventory list` shows all hosts"
    return BadInput(f"the inventory has no host {shown(folded)}", where=inventory.source or None, hint=hint)

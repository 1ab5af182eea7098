"""Groups of an Ansible inventory: the groups of each host, in the order in which Ansible merges their variables.

Source: Ansible's "Using variables", "Understanding variable precedence", and its ``sort_groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpurun.errors import BadInput
from gpurun.inventory.imports.draft import Draft

MOST_DEPTH = 50

Variables = dict[str, tuple[str, str]]
"""Variable → its text, and its place."""


@dataclass
class Group:
    """One group: its own hosts, its variables with their places, and its child groups."""

    hosts: dict[str, None] = field(default_factory=dict)
    variables: Variables = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)

    @property
    def priority(self) -> int:
        """Among groups of one depth, the variables of the highest priority win. 1 unless the file sets it."""
        text = self.variables.get("ansible_group_priority", ("1", ""))[0]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def lineages(groups: Mapping[str, Group], draft: Draft, file: str) -> dict[str, list[str]]:
    """Return the groups of each host, without ``all``; the variables of later groups win.

    If a group contains itself, the draft gets a note and that containment is ignored.

    Raises:
        BadInput: groups are nested too deeply.
    """
    depths, parents = _depths_and_parents(groups, draft, file)
    above: dict[str, set[str]] = {}

    def rank(name: str) -> tuple[int, int, str]:
        return depths[name], groups[name].priority, name

    found: dict[str, set[str]] = {}
    for name, group in groups.items():
        if not group.hosts:
            continue
        if name not in above:
            above[name] = _reached(name, parents)
        for host in group.hosts:
            found.setdefault(host, set()).update(above[name])
    return {host: sorted(names - {"all"}, key=rank) for host, names in found.items()}


def _reached(name: str, parents: Mapping[str, Iterable[str]]) -> set[str]:
    reached, left = {name}, [name]
    while left:
        new = [parent for parent in parents[left.pop()] if parent not in reached]
        reached.update(new)
        left += new
    return reached


def _depths_and_parents(
    groups: Mapping[str, Group], draft: Draft, file: str
) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Return the length of the longest path from ``all`` to each group, and the direct parents of each group."""
    depths = dict.fromkeys(groups, 1)
    parents: dict[str, set[str]] = {name: set() for name in groups}
    inside = {name: [child for child in group.children if child in groups] for name, group in groups.items()}
    open_ways = dict.fromkeys(groups, 0)
    for children in inside.values():
        for child in children:
            open_ways[child] += 1
    ready = [name for name, count in open_ways.items() if count == 0]
    left = dict.fromkeys(name for name in groups if open_ways[name])
    while ready or left:
        if not ready:  # each remaining group contains itself, or is in such a group
            name = next(iter(left))
            draft.leave(f"group {name} contains itself", file)
            ready.append(name)
        name = ready.pop()
        left.pop(name, None)
        if depths[name] > MOST_DEPTH:
            raise BadInput(f"groups are nested more than {MOST_DEPTH} levels deep", where=file)
        for child in inside[name]:
            if child not in left:  # a cycle
                continue
            parents[child].add(name)
            depths[child] = max(depths[child], depths[name] + 1)
            open_ways[child] -= 1
            if open_ways[child] == 0:
                ready.append(child)
    return depths, parents

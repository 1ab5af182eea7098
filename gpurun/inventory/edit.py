"""Edits of an inventory file that a user owns: as small as if the user had made them by hand.

An edit is a value; `apply` converts bytes to bytes. It finds the entries of the edit's hosts, and changes their text
between the marks of their YAML (`gpurun.inventory.marks`). `apply` then parses the result and compares it with the
edit, so that no edit can change a host that it does not name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import yaml
from yaml.nodes import ScalarNode, SequenceNode

from gpurun.documents.convert import compose_document, convert, convert_node, did_you_mean
from gpurun.documents.plain import DocumentError, shown
from gpurun.errors import BadInput, StateError
from gpurun.inventory import fields
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand
from gpurun.inventory.marks import (
    Changes,
    MarkedNode,
    NewPair,
    TextEdit,
    flow,
    in_double_quotes,
    key_like,
    nested,
    pair_of,
    plain_or_quoted,
)
from gpurun.inventory.model import Host, Inventory
from gpurun.inventory.read import collector_at_rest, parse_inventory
from gpurun.quantities import count

# Parse ``key=value`` words of a command line and check them like the inventory's own values.


_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class HostSetting:
    """One value to set.

    Attributes:
        field: a key of a host, or ``rack``.
        label: name of the label, if the field is ``labels``.
        value: the converted value; None = remove the host's own value, so that the inherited value applies.
        text: the text that the user typed.
    """

    field: str
    value: object
    text: str
    label: str | None = None

    @property
    def yaml(self) -> str:
        """The value as YAML in one line."""
        if self.label is not None:
            return _scalar(self.text, is_text=False)
        if fields.HOST[self.field].item is not None:
            return _listed(_composed(self.text))
        return _scalar(self.text, is_text=not isinstance(self.value, (int, float)) or "B" in self.text)


def parse_settings(words: Iterable[str]) -> tuple[HostSetting, ...]:
    """Parse settings such as ``gpus=8``, ``labels.team=vision``, ``port=`` (remove), ``rack=r2``.

    Raises BadInput: not ``key=value``, an unknown key, an invalid value, a repeated key.
    """
    found: dict[str, HostSetting] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise BadInput(
                f"{shown(word)} is not key=value", hint="write a setting such as gpus=8 or labels.team=vision"
            )
        if key in found:
            raise BadInput(f"{shown(key)} is given twice")
        found[key] = _setting(key, text)
    return tuple(found.values())


def parse_labels(words: Iterable[str]) -> tuple[HostSetting, ...]:
    """Parse label words: ``team=vision`` sets a label, ``team-`` removes it. Raises BadInput."""
    return parse_settings(_label_setting(word) for word in words)


def _label_setting(word: str) -> str:
    if "=" in word:
        return f"labels.{word}"
    if not word.endswith("-"):
        raise BadInput(f"{shown(word)} sets no label", hint="NAME=VALUE sets a label, NAME- removes it")
    return f"labels.{word[:-1]}="


def from_mapping(values: Mapping[str, object]) -> tuple[HostSetting, ...]:
    """Return settings for the values of an importer; labels are a mapping."""
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            words.extend(f"{key}.{name}={text}" for name, text in value.items())
        elif isinstance(value, tuple):
            words.append(f"{key}={[list(v) if isinstance(v, tuple) else v for v in value]}")
        else:
            words.append(f"{key}={value}")
    return parse_settings(words)


def _setting(key: str, text: str) -> HostSetting:
    field, dot, label = key.partition(".")
    if field == "labels" and dot:
        convert(label, fields.LABEL, "labels")
        return HostSetting("labels", convert(text, fields.LABEL_TEXT, key) if text else None, text, label)
    if key == "rack":
        return HostSetting("rack", convert(text, fields.NAME, key), text)
    if key not in fields.HOST or key == "labels":
        allowed = [*(name for name in fields.HOST if name != "labels"), "labels.NAME", "rack"]
        meant = did_you_mean(key, allowed) or f" (allowed: {', '.join(allowed)})"
        raise BadInput(f"unknown key {shown(key)}{meant}")
    kind = fields.HOST[key]
    if not text:
        return HostSetting(key, None, text)
    return HostSetting(key, convert_node(_composed(text), kind, key) if kind.item else convert(text, kind, key), text)


def _resolved(text: str) -> str:
    resolver = yaml.SafeLoader("")
    return str(resolver.resolve(ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]


def _composed(text: str) -> yaml.Node:
    """Parse a value with structure as one line of YAML: ``[0, 1]``, ``0-3``."""
    try:
        node = compose_document(text.encode(), "value")
    except DocumentError as error:
        raise BadInput(f"{shown(text)} is not a YAML value: {error.problems[0].message}") from error
    if node is None:
        raise BadInput(f"{shown(text)} is not a YAML value")
    return node


def _scalar(text: str, *, is_text: bool) -> str:
    """Return the text as YAML: in double quotes if YAML would read it as another type."""
    tag = _resolved(text)
    if tag == _TAG + "null" or (is_text and tag != _TAG + "str"):
        return in_double_quotes(text)
    return plain_or_quoted(text)


def _listed(node: yaml.Node) -> str:
    if isinstance(node, SequenceNode):
        return f"[{', '.join(_listed(child) for child in node.value)}]"
    return _scalar(str(node.value), is_text=False)


# Check that an edit made exactly the change that the user asked for.


def check_edit(
    before: Inventory, after: Inventory, hosts: Iterable[str], settings: tuple[HostSetting, ...] | None
) -> None:
    """Raise unless `after` is `before` with these settings on these hosts.

    Args:
        settings: None = the edit removed these hosts.
    Raises BadInput: the edit removes a value that the host inherits. StateError: the edit changed something else. This
    is a fault of gpurun, and the caller must not write the file.
    """
    named = dict.fromkeys(hosts)
    _check_others(before, after, named, set(named) if settings is None else set())
    if settings is not None and (missing := named.keys() - after.by_name.keys()):
        raise _fault(f"the edit would leave out hosts {fold(missing)}")
    for name in named if settings is not None else ():
        _check_host(before.by_name.get(name), after.by_name[name], settings or ())
    for setting in settings or ():
        if setting.field in PER_HOST and "[" in setting.text:
            for name, address in zip(named, expand(setting.text), strict=True):
                if getattr(after.by_name[name], setting.field) != address:
                    raise _fault(f"the edit would not set {setting.field} of {name} to {address}")


def check_each(before: Inventory, after: Inventory, settings: Mapping[str, tuple[HostSetting, ...]]) -> None:
    """Like `check_edit`, for settings that differ from host to host; each address is that of one host."""
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
    for field in dataclasses.fields(Host):
        if field.name not in changed and getattr(before, field.name) != getattr(after, field.name):
            raise _fault(f"the edit would also change {field.name} of {after.name}")


def _fault(what: str) -> StateError:
    return StateError(
        f"gpurun did not change the inventory because of a bug in gpurun: {what}",
        hint="change the file with `gpurun inventory edit`, and please report the bug",
    )


# Ranges of addresses for ranges of hosts: distribute, split and fold them.


def shares(setting: HostSetting, hosts: Sequence[str]) -> Mapping[str, str]:
    """Map each host to its address from a range. Raises BadInput if the numbers of addresses and hosts differ."""
    if setting.value is None:
        return {}
    addresses = expand(setting.text) if "[" in setting.text else (setting.text,)
    if len(addresses) != len(hosts):
        given = count(len(addresses), "address", "addresses")
        raise BadInput(
            f"{setting.field} {shown(setting.text)} gives {given} for {count(len(hosts), 'host')}",
            hint="give one address for each host, such as 10.0.1.[1-16]",
        )
    return dict(zip(hosts, addresses, strict=True))


def folded_share(share: Mapping[str, str], hosts: Sequence[str]) -> str:
    """Return the addresses of some of the hosts, as one range. Raises BadInput if a range would change their order."""
    addresses = tuple(share[name] for name in hosts)
    if len(addresses) == 1:
        return addresses[0]
    folded = fold(addresses)
    if expand(folded) != addresses:
        raise BadInput(
            f"the addresses of {fold(hosts)} do not follow the order of the hosts; set each address separately"
        )
    return folded


# The edits.


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


# The entries of hosts in the text of an inventory, and the edits of them.


@dataclass(frozen=True)
class _HostEntry:
    """An entry of a rack: the mapping that contains it, its key and value, and the names of its hosts."""

    section: MarkedNode
    key: MarkedNode
    value: MarkedNode
    names: tuple[str, ...]

    def without(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the other hosts of the entry."""
        return tuple(name for name in self.names if name not in names)


class _RacksEdit(TextEdit):
    """Edits of the racks of an inventory: one pass over its text."""

    def entries(self) -> Iterator[_HostEntry]:
        """Return all entries of hosts, in the order of the racks, also those in merged mappings."""
        racks = self.root.get("racks")
        sections: dict[int, MarkedNode] = {}
        for rack in racks.effective().values() if racks is not None else ():
            sections |= {id(section): section for section in self._sections(rack)}
        for section in sections.values():
            for key, value in section.pairs:
                if not key.is_merge:
                    yield _HostEntry(section, key, value, expand(key.value))

    @staticmethod
    def _sections(rack: MarkedNode) -> Iterator[MarkedNode]:
        for holder in rack.merged():
            yield from (hosts.merged() if (hosts := holder.get("hosts")) is not None else ())

    def give_anchors_away(self, hosts: Collection[str]) -> None:
        """Move the anchors in entries of only these hosts, with the values, to their first alias in another entry.

        Then a change of these entries changes no others. Aliases in these entries become values.
        """
        mine = [entry for entry in self.entries() if hosts and not entry.without(hosts)]
        inside = {id(node) for entry in mine for node in entry.value.walk()}
        aliases: dict[int, list[MarkedNode]] = {}
        for node in self.root.walk():
            if node.target is not None and id(node.target) in inside:
                aliases.setdefault(id(node.target), []).append(node)
        for node in (node for entry in mine for node in entry.value.walk() if id(node) in aliases):
            users = aliases[id(node)]
            heir = next((user for user in users if id(user) not in inside), None)
            text = flow(node, inside)
            for user in users[: users.index(heir) + 1] if heir is not None else users:
                self.replace(user.start, user.end, f"&{node.anchor} {text}" if user is heir else text)
            self.drop_anchor(node)

    def changed(self, edits: Mapping[str, SetFields]) -> Iterator[tuple[_HostEntry, dict[tuple[str, ...], Changes]]]:
        """Return the entries that edits of hosts change, and for each the changes of groups of its hosts."""
        distinct = {id(edit): edit for edit in edits.values()}
        addresses = {key: _addresses(edit) for key, edit in distinct.items()}
        for entry in self.entries():
            groups: dict[int, list[str]] = {}
            for name in entry.names:
                if name in edits:
                    groups.setdefault(id(edits[name]), []).append(name)
            found: dict[tuple[str, ...], Changes] = {}
            for key, names in groups.items():
                if changes := _changes(entry.value, distinct[key].settings, addresses[key], names):
                    found[tuple(names)] = changes
            if found:
                yield entry, found

    def changed_hosts(self, edits: Mapping[str, SetFields]) -> set[str]:
        """Return the hosts that edits change."""
        return {name for _, groups in self.changed(edits) for names in groups for name in names}

    def set(self, edits: Mapping[str, SetFields]) -> None:
        """Set or remove values of hosts. Splits an entry if the change concerns only some of its hosts."""
        for entry, groups in self.changed(edits):
            rest = entry.without({name for names in groups for name in names})
            self._split(entry, [(rest, {}), *groups.items()] if rest else [*groups.items()])

    def _split(self, entry: _HostEntry, groups: Sequence[tuple[tuple[str, ...], Changes]]) -> None:
        """Divide an entry into groups of its hosts, each with changes of the values. The first is in the old place."""
        (kept, first), *others = [(part, changes) for names, changes in groups for part in _parts(names, entry.names)]
        self._reduce(entry, kept, first)
        if others:
            copies = [self._copied(entry, names, changes) for names, changes in others]
            self.add_after(entry.section, entry.key, entry.value, copies)

    def _reduce(self, entry: _HostEntry, names: tuple[str, ...], changes: Changes) -> None:
        """Reduce an entry to some of its hosts, and change its values."""
        if names != entry.names:
            self.replace(entry.key.start, entry.key.end, key_like(fold(names), entry.key))
        self.change(entry.key, entry.value, {**_part(entry, names), **changes})

    def _copied(self, entry: _HostEntry, names: tuple[str, ...], changes: Changes) -> NewPair:
        """Return a new entry for some of an entry's hosts, with changes of its values."""
        text = f" {_in_one_line(entry.value)}"
        if not entry.value.is_flow:
            indent = "\n" + " " * (self.column(entry.value.children[0]) - self.column(entry.key))
            text = "".join(f"{indent}{flow(name)}: {flow(each)}" for name, each in entry.value.pairs)
        return _changed_entry(f"{key_like(fold(names), entry.key)}:{text}", entry, {**_part(entry, names), **changes})

    def move(self, racks: Mapping[str, str]) -> None:
        """Move hosts, each with its comments to the end of its new rack."""
        going: dict[str, list[NewPair]] = {}
        has_aliases = any(node.target is not None for node in self.root.walk())
        of_entries = {id(node) for entry in self.entries() for node in entry.value.walk()} if has_aliases else set()
        of_entries |= self._below(racks.values()) if has_aliases else set()
        for entry in self.entries():
            groups: dict[str, list[str]] = {}
            for name in entry.names:
                if name in racks:
                    groups.setdefault(racks[name], []).append(name)
            parts = [(rack, part) for rack, names in groups.items() for part in _parts(tuple(names), entry.names)]
            if parts:
                moved = self._leaving(entry, [part for _, part in parts], of_entries)
                for (rack, _), pair in zip(parts, moved, strict=True):
                    going.setdefault(rack, []).append(pair)
        self._put(going)

    def _below(self, racks: Collection[str]) -> frozenset[int]:
        """Return the nodes with anchors that come after the first of these racks: an alias there cannot name them."""
        holder = self.root.get("racks")
        there = holder.effective() if holder is not None else {}
        ends = [(there[rack].target or there[rack]).end for rack in racks if rack in there]
        first = min(ends, default=len(self.text))
        return frozenset(id(node) for node in self.root.walk() if node.anchor and node.start > first)

    def _leaving(
        self, entry: _HostEntry, groups: Sequence[tuple[str, ...]], of_entries: Collection[int]
    ) -> Iterator[NewPair]:
        """Remove groups of an entry's hosts. Returns an entry for each; the entry's comments go with its last hosts."""
        rest = entry.without({name for names in groups for name in names})
        lines, comments = list[str](), list[str]()
        if rest:
            self._split(entry, [(rest, {})])
        else:
            lines, comments = self.taken(entry.section, entry.key, entry.value)
        keeps_lines = not any(id(node.target) in of_entries for node in entry.value.walk())
        for names in groups:
            key = flow(entry.key) if names == entry.names else key_like(fold(names), entry.key)
            text = f"{key}: {_in_one_line(entry.value, of_entries)}"
            one_line, above = _changed_entry(text, entry, _part(entry, names)).flow, [f"# {each}" for each in comments]
            if not (lines and keeps_lines and names == entry.names):
                lines = [f"{one_line}  {above[0]}"] if len(above) == 1 else [*above, one_line]
            yield NewPair(tuple(lines), one_line, tuple(f"{entry.key.value}: {comment}" for comment in comments))
            comments = []

    def remove(self, hosts: Collection[str]) -> None:
        """Remove hosts from their entries, and entries without hosts from their racks."""
        for entry in self.entries():
            rest = entry.without(hosts)
            if not rest:
                self.delete(entry.section, entry.key, entry.value)
            elif rest != entry.names:
                self._split(entry, [(rest, {})])

    def add(self, edits: Sequence[AddHosts]) -> None:
        """Add new hosts at the ends of racks: one entry for each edit, more if YAML cannot read its key."""
        examples = {rack: self._example(rack) for rack in {edit.rack for edit in edits}}
        new: dict[str, list[NewPair]] = {}
        for edit in edits:
            for part in _parts(edit.hosts):
                key = fold(part)
                entry = TextEdit(f"{key_like(key, examples[edit.rack] if '[' in key else None)}: {{}}")
                name, value = entry.root.pairs[0]
                entry.change(name, value, _changes(value, edit.settings, _addresses(edit), part))
                new.setdefault(edit.rack, []).append(pair_of(entry.result()))
        self._put(new)

    def _example(self, rack: str) -> MarkedNode | None:
        """Return the last key of a rack that is a range: new ranges get its quotes."""
        racks = self.root.get("racks")
        value = racks.effective().get(rack) if racks is not None else None
        section = next(self._sections(value), None) if value is not None else None
        ranges = [key for key, _ in section.pairs if "[" in key.value] if section is not None else []
        return ranges[-1] if ranges else None

    def _put(self, pairs_of: Mapping[str, Sequence[NewPair]]) -> None:
        """Add entries at the ends of racks. Creates the racks that are missing."""
        key, racks = next(((key, value) for key, value in self.root.pairs if key.value == "racks"), (None, None))
        holders = reversed(list(racks.merged())) if racks is not None else ()
        there = {name.value: (name, rack) for holder in holders for name, rack in holder.pairs}
        for rack in pairs_of:
            if rack in there:
                self._put_into(*there[rack], pairs_of[rack])
        in_flow = next((rack.is_flow for _, rack in reversed(there.values()) if rack.children), False)
        new = [
            nested(rack, [nested("hosts", pairs, self._indent, in_flow=in_flow)], self._indent, in_flow=in_flow)
            for rack, pairs in pairs_of.items()
            if rack not in there
        ]
        if new and (key is None or racks is None):
            self.append(self.root, [nested("racks", new, self._indent, in_flow=False)])
        elif new and key is not None and racks is not None:
            mapping = racks.target or racks
            if mapping.kind == "mapping":
                self.append(mapping, new)
            else:
                self.fill_with(key, racks, new, self._indent, in_flow=self.root.is_flow)

    def _put_into(self, key: MarkedNode, rack: MarkedNode, pairs: Sequence[NewPair]) -> None:
        section = next(self._sections(rack), None)
        hosts = next(((name, value) for name, value in rack.pairs if name.value == "hosts"), None)
        if section is not None:
            self.append(section, pairs)
        elif hosts is not None:
            self.fill_with(*hosts, pairs, self._indent, in_flow=rack.is_flow)
        elif rack.children:
            self.append(rack, [nested("hosts", pairs, self._indent, in_flow=rack.is_flow)])
        else:
            self.fill_with(key, rack, [nested("hosts", pairs, self._indent, in_flow=True)], self._indent, in_flow=True)

    @cached_property
    def _indent(self) -> int:
        """The user's indentation, from the first indented line."""
        for line in self.text.splitlines():
            bare = line.lstrip(" ")
            if bare and bare[0] not in "#-" and len(bare) < len(line):
                return max(2, min(len(line) - len(bare), 8))
        return 2


MOST_KEY = 1000
"""YAML reads a key only if its colon comes within 1,024 characters; the key may be in quotes."""


def _parts(names: tuple[str, ...], whole: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return hosts in as many parts as their folded names need as keys.

    Args:
        whole: the hosts of an entry that exists: its key needs no other.
    """
    if names == whole or len(fold(names)) <= MOST_KEY:
        return [names]
    half = len(names) // 2
    return [*_parts(names[:half]), *_parts(names[half:])]


def _addresses(edit: SetFields | AddHosts) -> dict[str, Mapping[str, str]]:
    """Return the address of each host, by field, where an edit gives a range of addresses."""
    return {setting.field: shares(setting, edit.hosts) for setting in edit.settings if setting.field in PER_HOST}


def _in_one_line(value: MarkedNode, resolved: Collection[int] = ()) -> str:
    """Return an entry's value as `flow` does; ``{}`` if there is none."""
    return flow(value, resolved) if value.children or value.kind == "alias" else "{}"


def _changed_entry(text: str, like: _HostEntry, changes: Changes) -> NewPair:
    """Return the entry in a text, which repeats the aliases of another, with changes of its values."""
    anchors = {node.text[1:]: node.target for node in like.value.walk() if node.target is not None}
    copy = TextEdit(text, anchors)
    copy.change(*copy.root.pairs[0], changes)
    return pair_of(copy.result(), anchors)


def _part(entry: _HostEntry, names: Sequence[str]) -> Changes:
    """Return an entry's ranges of addresses for some of its hosts."""
    part: dict[str, str] = {}
    values = entry.value.effective() if len(names) < len(entry.names) else {}
    for field in PER_HOST:
        addresses = expand(values[field].value) if field in values and "[" in values[field].value else ()
        if len(addresses) == len(entry.names):
            of_host = dict(zip(entry.names, addresses, strict=True))
            part[field] = plain_or_quoted(fold([of_host[name] for name in names]))
    return part


def _changes(
    value: MarkedNode, settings: Sequence[HostSetting], addresses: Mapping[str, Mapping[str, str]], names: Sequence[str]
) -> Changes:
    """Return the changes of an entry's value that give some of its hosts these settings.

    Args:
        addresses: what `_addresses` returns.
    """
    has = value.effective()
    changes: dict[str, str | Changes | None] = {}
    labels: dict[str, str | None] = {}
    for setting in settings:
        if setting.field == "rack":
            continue
        text = None if setting.value is None else setting.yaml
        if setting.label is not None:
            labels[setting.label] = text
        elif addresses.get(setting.field):
            changes[setting.field] = plain_or_quoted(folded_share(addresses[setting.field], tuple(names)))
        elif text is not None or setting.field in has:
            changes[setting.field] = text
    own, effective = value.get("labels"), has.get("labels")
    before = {name: flow(each) for name, each in effective.effective().items()} if effective is not None else {}
    after = {name: text for name, text in {**before, **labels}.items() if text is not None}
    if after == before:
        return changes
    is_own = own is not None and own.children
    return {**changes, "labels": None if not after else labels if is_own else _mapping(after)}


def _mapping(pairs: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{key}: {text}' for key, text in pairs.items())}}}"


# The edits of a file.


def apply(data: bytes, source: Path, edit: Edit) -> bytes:
    """Return the file after an edit.

    Raises DocumentError: the file is not valid. BadInput: the edit is impossible, or its result is not valid.
    """
    before = parse_inventory(data, source)
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
    result = before if after == data else _read_again(after, source)
    if isinstance(edit, SetEach):
        check_each(before, result, {name: own for each in edit.edits for name, own in _of_each_host(each)})
    else:
        check_edit(before, result, edit.hosts, None if isinstance(edit, RemoveHosts) else edit.settings)
    return after


def _of_each_host(edit: SetFields) -> Iterator[tuple[str, tuple[HostSetting, ...]]]:
    """Return the settings of each host, with its own address of a range of addresses."""
    addresses = _addresses(edit)
    for name in edit.hosts:
        yield (
            name,
            tuple(
                replace(setting, value=addresses[setting.field][name]) if addresses.get(setting.field) else setting
                for setting in edit.settings
            ),
        )


def _edited(text: str, before: Inventory, edit: Edit) -> str:
    """Return the text after an edit, in at most three passes: anchors, values, racks."""
    if isinstance(edit, AddHosts):
        return with_hosts(text, [edit])
    if isinstance(edit, RemoveHosts):
        text = _pass(text, lambda racks: racks.give_anchors_away(edit.hosts))
        return _pass(text, lambda racks: racks.remove(set(edit.hosts)))
    edits = edit.edits if isinstance(edit, SetEach) else (edit,)
    moves = {name: setting.text for each in edits for setting in each.settings if setting.field == "rack"
             for name in each.hosts if before.by_name[name].rack != setting.text}  # fmt: skip
    changes = {name: each for each in edits for name in _different(each, before)}
    if "&" in text:
        text = _pass(text, lambda racks: racks.give_anchors_away({*racks.changed_hosts(changes), *moves}))
    if changes:
        text = _pass(text, lambda racks: racks.set(changes))
    return _pass(text, lambda racks: racks.move(moves)) if moves else text


def with_hosts(text: str, additions: Sequence[AddHosts]) -> str:
    """Return an inventory's text with new hosts."""
    return _pass(text, lambda racks: racks.add(additions))


def _pass(text: str, edit: Callable[[_RacksEdit], None]) -> str:
    racks = _RacksEdit(text)
    edit(racks)
    return racks.result()


def _different(edit: SetFields, before: Inventory) -> Iterator[str]:
    """Return the hosts that do not have the values of an edit yet; `rack` is no value."""
    for name, settings in _of_each_host(edit):
        host = before.by_name[name]
        if any(
            setting.value is None
            or setting.value != (host.labels.get(setting.label) if setting.label else getattr(host, setting.field))
            for setting in settings
            if setting.field != "rack"
        ):
            yield name


def _read_again(after: bytes, source: Path) -> Inventory:
    try:
        return parse_inventory(after, source)
    except DocumentError as error:
        said = "; ".join(problem.message for problem in error.problems[:3])
        raise BadInput(f"the changed inventory would not be valid: {said}", where=str(source)) from error

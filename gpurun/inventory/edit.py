"""Edits of an inventory file that a user owns: as small as if the user had made them by hand.

An edit is a value; `apply` converts bytes to bytes. It changes the values in ruamel.yaml's round-trip tree, and
`gpurun.inventory.merge` merges the difference into the text. `apply` then parses the result and compares it with the
edit, so that no edit can change a host that it does not name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.convert import compose_document, convert, convert_node, did_you_mean
from gpurun.documents.plain import DocumentError, shown
from gpurun.errors import BadInput, StateError
from gpurun.inventory import fields, merge
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand
from gpurun.inventory.merge import (
    containers,
    flow_map,
    is_flow,
    merge_trees,
    read_tree,
    shared,
    styled_like,
    twin,
    write_tree,
)
from gpurun.inventory.model import Host, Inventory, rack_lines
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
    def tree(self) -> object:
        """The value in the form that roundtrip writes."""
        if self.label is not None:
            return _scalar_tree(self.text, text_kind=False)
        if fields.HOST[self.field].item is not None:
            return _tree(_composed(self.text))
        return _scalar_tree(self.text, text_kind=not isinstance(self.value, (int, float)) or "B" in self.text)


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


def _composed(text: str) -> Node:
    """Parse a value with structure as one line of YAML: ``[0, 1]``, ``0-3``."""
    try:
        node = compose_document(text.encode(), "value")
    except DocumentError as error:
        raise BadInput(f"{shown(text)} is not a YAML value: {error.problems[0].message}") from error
    if node is None:
        raise BadInput(f"{shown(text)} is not a YAML value")
    return node


def _scalar_tree(text: str, *, text_kind: bool) -> str:
    """Return the text as YAML: in quotes if YAML would read it as another type."""
    tag = _resolved(text)
    if tag == _TAG + "null" or (text_kind and tag != _TAG + "str"):
        quoted: str = DoubleQuotedScalarString(text)
        return quoted
    return text


def _tree(node: Node) -> object:
    if isinstance(node, SequenceNode):
        return merge.flow_list([_tree(child) for child in node.value])
    assert isinstance(node, ScalarNode) and not isinstance(node, MappingNode)
    return str(node.value)


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


def with_part(value: CommentedMap, names: tuple[str, ...], chosen: tuple[str, ...]) -> CommentedMap:
    """Reduce an entry's ranges of addresses to those of the chosen hosts. Changes `value`."""
    for field in PER_HOST:
        addresses = expand(str(value[field])) if "[" in str(value.get(field) or "") else ()
        if len(addresses) == len(names):
            part = [at for name, at in zip(names, addresses, strict=True) if name in set(chosen)]
            value[field] = merge.styled_like(fold(part), value[field])
    return value


# The mappings of an inventory in the round-trip tree, and the edits of them.


@dataclass(frozen=True)
class _HostEntry:
    """One entry and some of its hosts: the parent mapping, the key as written, all names, and the chosen names."""

    parent: CommentedMap
    key: str
    names: tuple[str, ...]
    chosen: tuple[str, ...]

    @property
    def rest(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in set(self.chosen))


class InventoryTree:
    """The round-trip tree of an inventory."""

    def __init__(self, original: str) -> None:
        self._original = original
        self._root = read_tree(original.replace("\r\n", "\n"))
        self._indent = _indent_of(original)
        self._base = write_tree(self._root, self._indent)
        self._shared = shared(self._root)
        self._renamed: dict[str, str] = {}
        self._moved: set[str] = set()

    def merged(self) -> str:
        """Return the user's text with the changes."""
        for rack in _merged_values(self._root.get("racks")):
            for holder in _with_merged(rack):
                section = holder.get("hosts")
                if isinstance(section, CommentedMap) and not section and not is_flow(section):
                    holder["hosts"] = None  # "hosts:" keeps its form, with nothing below it
        return merge_trees(self._original, self._base, write_tree(self._root, self._indent), self._renamed, self._moved)

    def set(self, hosts: Sequence[str], settings: Sequence[HostSetting]) -> None:
        """Set or remove values of hosts. Splits an entry if the change concerns only some of its hosts."""
        own = [setting for setting in settings if setting.field != "rack"]
        addresses = {setting.field: shares(setting, hosts) for setting in own if setting.field in PER_HOST}
        if own:
            for whole in self._entries(hosts):
                if not _concerns(own, whole.parent[whole.key]):
                    continue
                entry = self._split(whole)
                mapping = self._own_mapping(entry)
                for setting in own:
                    share = addresses.get(setting.field)
                    tree = folded_share(share, entry.chosen) if share else None
                    self._put(mapping, setting, tree)
        for setting in settings:
            if setting.field == "rack":
                self._move(hosts, setting.text)

    def add(self, hosts: Sequence[str], rack: str, settings: Sequence[HostSetting]) -> None:
        """Add new hosts as one entry at the end of a rack."""
        values = flow_map()
        for setting in settings:
            share = shares(setting, hosts) if setting.field in PER_HOST else None
            self._put(values, setting, folded_share(share, tuple(hosts)) if share else None)
        section = self._rack_hosts(rack)
        section[_key(fold(hosts), section)] = values

    def remove(self, hosts: Sequence[str]) -> None:
        """Remove hosts from their entries, and entries without hosts from their racks."""
        for entry in self._entries(hosts):
            if entry.rest:
                self._shrink(entry)
            else:
                self._delete(entry)

    def _move(self, hosts: Sequence[str], rack: str) -> None:
        section = self._rack_hosts(rack)
        for whole in self._entries(hosts):
            if whole.parent is section:
                continue
            entry = self._split(whole)
            value = self._movable(entry.parent[entry.key])
            self._delete(entry)
            self._moved.add(str(entry.key))
            section[_key(entry.key, section)] = value

    def _movable(self, value: object) -> object:
        """Return an entry's value. Resolves aliases of other entries, whose anchors may now come later."""
        of_entries = {id(node) for node in containers(self._root.get("racks"))}
        sources = list(_with_merged(value))
        if not any(self._shared.get(id(source), (0, ""))[0] in of_entries for source in sources):
            return value
        flat = flow_map()
        for source in sources:
            for key, inner in source.items():
                if key != "<<":
                    flat.setdefault(key, twin(inner, {}))
        return flat

    def _entries(self, hosts: Sequence[str]) -> list[_HostEntry]:
        """Return the entries of these hosts, in the file's order."""
        wanted = set(hosts)
        found = []
        for section in self._sections():
            for key in section:
                if key == "<<":
                    continue
                names = expand(str(key))
                chosen = tuple(name for name in names if name in wanted)
                if chosen:
                    found.append(_HostEntry(section, key, names, chosen))
        missing = wanted - {name for entry in found for name in entry.chosen}
        if missing:
            raise BadInput(f"the inventory has no host {shown(fold(missing))}")
        return found

    def _sections(self) -> list[CommentedMap]:
        """Return the mappings that contain host entries, each once, including merged mappings."""
        sections: dict[int, CommentedMap] = {}
        for rack in _merged_values(self._root.get("racks")):
            for holder in _with_merged(rack):
                for section in _with_merged(holder.get("hosts")):
                    sections[id(section)] = section
        return list(sections.values())

    def _split(self, entry: _HostEntry) -> _HostEntry:
        """Move the chosen hosts into their own entry, directly after the entry of the other hosts."""
        if not entry.rest:
            return entry
        value = entry.parent[entry.key]
        copy = value if id(value) in self._shared else twin(value, self._shared)
        parent, position = entry.parent, list(entry.parent).index(entry.key)
        if isinstance(copy, CommentedMap):
            copy = with_part(copy, entry.names, entry.chosen)
        self._shrink(entry)
        key = styled_like(fold(entry.chosen), entry.key)
        parent.insert(position + 1, key, copy)
        return _HostEntry(parent, key, entry.chosen, entry.chosen)

    def _shrink(self, entry: _HostEntry) -> None:
        """Reduce an entry to the hosts that are not chosen."""
        parent, position = entry.parent, list(entry.parent).index(entry.key)
        value = parent.pop(entry.key)
        if isinstance(value, CommentedMap):
            value = with_part(value, entry.names, entry.rest)
        key = styled_like(fold(entry.rest), entry.key)
        self._renamed[key] = self._renamed.get(entry.key, str(entry.key))
        parent.insert(position, key, value)

    def _own_mapping(self, entry: _HostEntry) -> CommentedMap:
        """Return a mapping that only this entry uses, so that an edit changes no other entry."""
        value = entry.parent[entry.key]
        if not isinstance(value, CommentedMap):
            own = flow_map()
        elif id(value) in self._shared:
            if self._shared[id(value)] == (id(entry.parent), entry.key):
                own = twin(value, self._shared)
            else:
                own = flow_map()
                own["<<"] = value
        else:
            own = value
        entry.parent[entry.key] = own
        return own

    def _put(self, mapping: CommentedMap, setting: HostSetting, share: str | None) -> None:
        if setting.label is not None:
            self._put_label(mapping, setting)
        elif setting.value is None:
            self._inline(mapping, setting.field)
            mapping.pop(setting.field, None)
        else:
            new = setting.tree if share is None else share
            old = mapping.get(setting.field)
            plain = type(new) is str and old is not None  # a value that needs quotes has them already
            mapping[setting.field] = styled_like(str(new), old) if plain else new

    def _put_label(self, mapping: CommentedMap, setting: HostSetting) -> None:
        inherited = next((m["labels"] for m in _with_merged(mapping) if m.get("labels")), None)
        labels = mapping.get("labels")
        if not isinstance(labels, CommentedMap) or id(labels) in self._shared:
            labels = twin(inherited, self._shared) if inherited else flow_map()
        assert isinstance(labels, CommentedMap)
        if setting.value is None:
            self._inline(labels, setting.label or "")
            labels.pop(setting.label, None)
        else:
            labels[setting.label] = setting.tree
        if labels:
            mapping["labels"] = labels
        else:
            mapping.pop("labels", None)

    def _inline(self, mapping: CommentedMap, key: str) -> None:
        """Replace a merge by its values if `key`, which the edit removes, comes from it."""
        sources = list(_with_merged(mapping))[1:]
        if "<<" not in mapping or not any(key in source for source in sources):
            return
        mapping.pop("<<")
        for source in sources:
            for name, value in source.items():
                if name not in mapping and name != "<<":
                    mapping[name] = value if id(value) in self._shared else twin(value, self._shared)

    def _delete(self, entry: _HostEntry) -> None:
        del entry.parent[entry.key]

    def _rack_hosts(self, rack: str) -> CommentedMap:
        """Return the mapping for new hosts of a rack. Creates the mapping, and the rack, if there is none."""
        racks = self._root.get("racks")
        if not isinstance(racks, CommentedMap):
            racks = self._root["racks"] = CommentedMap()
        for holder in _with_merged(racks):
            if rack in holder:
                racks = holder
                break
        else:
            racks[rack] = _like_its_neighbours(racks)
        if not isinstance(racks[rack], CommentedMap):
            racks[rack] = flow_map()
        for holder in _with_merged(racks[rack]):
            if isinstance(holder.get("hosts"), CommentedMap):
                section = holder["hosts"]
                assert isinstance(section, CommentedMap)
                return section
        section = flow_map() if is_flow(racks[rack]) else CommentedMap()
        racks[rack]["hosts"] = section
        return section


def _concerns(settings: Sequence[HostSetting], value: object) -> bool:
    """Return True if a setting changes an entry: it sets a value or removes an existing value."""
    keys = {key for mapping in _with_merged(value) for key in mapping}
    return any(setting.value is not None or setting.field in keys for setting in settings)


def _like_its_neighbours(racks: CommentedMap) -> CommentedMap:
    """Return an empty rack in the style of the last rack."""
    last = next((rack for rack in reversed(list(racks.values())) if isinstance(rack, CommentedMap)), None)
    return flow_map() if last is not None and is_flow(last) else CommentedMap()


def _with_merged(node: object) -> Iterator[CommentedMap]:
    """Return a mapping and the mappings that it merges, highest precedence first."""
    if not isinstance(node, CommentedMap):
        return
    yield node
    merged = node.get("<<")
    for source in merged if isinstance(merged, list) else [merged]:
        yield from _with_merged(source)


def _merged_values(node: object) -> Iterator[object]:
    seen: set[str] = set()
    for mapping in _with_merged(node):
        for key, value in mapping.items():
            if key != "<<" and key not in seen:
                seen.add(key)
                yield value


def _key(text: str, section: CommentedMap) -> str:
    """Return the key of a new entry, with the quotes of the section's other ranges."""
    example = next((key for key in reversed(list(section)) if "[" in str(key)), None)
    return styled_like(text, example if "[" in text else None)


def _indent_of(text: str) -> int:
    """Return the user's indentation, from the first indented line."""
    for line in text.splitlines():
        bare = line.lstrip(" ")
        if bare and bare[0] not in "#-" and len(bare) < len(line):
            return max(2, min(len(line) - len(bare), 8))
    return 2


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
    result = _read_again(after, source)
    if isinstance(edit, SetEach):
        check_each(before, result, {name: own for each in edit.edits for name, own in _of_each_host(each)})
    else:
        check_edit(before, result, edit.hosts, None if isinstance(edit, RemoveHosts) else edit.settings)
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
        return parse_inventory(after, source)
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

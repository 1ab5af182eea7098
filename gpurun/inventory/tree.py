"""The mappings of an inventory in the round-trip tree, and the edits of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap

from gpurun.documents.problems import shown
from gpurun.errors import BadInput
from gpurun.inventory import roundtrip
from gpurun.inventory.addresses import folded_share, shares, with_part
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import expand, fold
from gpurun.inventory.merge import merge
from gpurun.inventory.settings import HostSetting


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
        self._root = roundtrip.read(original.replace("\r\n", "\n"))
        self._indent = _indent_of(original)
        self._base = roundtrip.write(self._root, self._indent)
        self._shared = roundtrip.shared(self._root)
        self._renamed: dict[str, str] = {}
        self._moved: set[str] = set()

    def merged(self) -> str:
        """Return the user's text with the changes."""
        for rack in _merged_values(self._root.get("racks")):
            for holder in _with_merged(rack):
                section = holder.get("hosts")
                if isinstance(section, CommentedMap) and not section and not roundtrip.is_flow(section):
                    holder["hosts"] = None  # "hosts:" keeps its form, with nothing below it
        return merge(self._original, self._base, roundtrip.write(self._root, self._indent), self._renamed, self._moved)

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
        values = roundtrip.flow_map()
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
        of_entries = {id(node) for node in roundtrip.containers(self._root.get("racks"))}
        sources = list(_with_merged(value))
        if not any(self._shared.get(id(source), (0, ""))[0] in of_entries for source in sources):
            return value
        flat = roundtrip.flow_map()
        for source in sources:
            for key, inner in source.items():
                if key != "<<":
                    flat.setdefault(key, roundtrip.twin(inner, {}))
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
        copy = value if id(value) in self._shared else roundtrip.twin(value, self._shared)
        parent, position = entry.parent, list(entry.parent).index(entry.key)
        if isinstance(copy, CommentedMap):
            copy = with_part(copy, entry.names, entry.chosen)
        self._shrink(entry)
        key = roundtrip.styled_like(fold(entry.chosen), entry.key)
        parent.insert(position + 1, key, copy)
        return _HostEntry(parent, key, entry.chosen, entry.chosen)

    def _shrink(self, entry: _HostEntry) -> None:
        """Reduce an entry to the hosts that are not chosen."""
        parent, position = entry.parent, list(entry.parent).index(entry.key)
        value = parent.pop(entry.key)
        if isinstance(value, CommentedMap):
            value = with_part(value, entry.names, entry.rest)
        key = roundtrip.styled_like(fold(entry.rest), entry.key)
        self._renamed[key] = self._renamed.get(entry.key, str(entry.key))
        parent.insert(position, key, value)

    def _own_mapping(self, entry: _HostEntry) -> CommentedMap:
        """Return a mapping that only this entry uses, so that an edit changes no other entry."""
        value = entry.parent[entry.key]
        if not isinstance(value, CommentedMap):
            own = roundtrip.flow_map()
        elif id(value) in self._shared:
            if self._shared[id(value)] == (id(entry.parent), entry.key):
                own = roundtrip.twin(value, self._shared)
            else:
                own = roundtrip.flow_map()
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
            mapping[setting.field] = roundtrip.styled_like(str(new), old) if plain else new

    def _put_label(self, mapping: CommentedMap, setting: HostSetting) -> None:
        inherited = next((m["labels"] for m in _with_merged(mapping) if m.get("labels")), None)
        labels = mapping.get("labels")
        if not isinstance(labels, CommentedMap) or id(labels) in self._shared:
            labels = roundtrip.twin(inherited, self._shared) if inherited else roundtrip.flow_map()
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
                    mapping[name] = value if id(value) in self._shared else roundtrip.twin(value, self._shared)

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
            racks[rack] = roundtrip.flow_map()
        for holder in _with_merged(racks[rack]):
            if isinstance(holder.get("hosts"), CommentedMap):
                section = holder["hosts"]
                assert isinstance(section, CommentedMap)
                return section
        section = roundtrip.flow_map() if roundtrip.is_flow(racks[rack]) else CommentedMap()
        racks[rack]["hosts"] = section
        return section


def _concerns(settings: Sequence[HostSetting], value: object) -> bool:
    """Return True if a setting changes an entry: it sets a value or removes an existing value."""
    keys = {key for mapping in _with_merged(value) for key in mapping}
    return any(setting.value is not None or setting.field in keys for setting in settings)


def _like_its_neighbours(racks: CommentedMap) -> CommentedMap:
    """Return an empty rack in the style of the last rack."""
    last = next((rack for rack in reversed(list(racks.values())) if isinstance(rack, CommentedMap)), None)
    return roundtrip.flow_map() if last is not None and roundtrip.is_flow(last) else CommentedMap()


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
    return roundtrip.styled_like(text, example if "[" in text else None)


def _indent_of(text: str) -> int:
    """Return the user's indentation, from the first indented line."""
    for line in text.splitlines():
        bare = line.lstrip(" ")
        if bare and bare[0] not in "#-" and len(bare) < len(line):
            return max(2, min(len(line) - len(bare), 8))
    return 2

"""Import a source again: merge what it changed since the last import into an inventory that people have edited. Pure.

A three-way merge on the values of hosts: what the source said last time, what it says now, and what the inventory says.
A value that only the source changed is taken; a value that only a person changed stays; where both changed it, the
person's stays and a note says so. Guesses are no values of the source: they never undo what a person or a probe wrote.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from yaml.nodes import Node, ScalarNode

from gpurun.documents.nodes import ProblemReport, compose, entries
from gpurun.errors import BadInput
from gpurun.inventory.edit import AddHosts, Edit, RemoveHosts, SetEach, SetFields, apply
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand, quoted
from gpurun.inventory.imports.compose import grouped, written
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.load import parse
from gpurun.inventory.model import Host, Inventory
from gpurun.inventory.settings import HostSetting
from gpurun.inventory.settings import parse as settings_of
from gpurun.msgspec_types import ready

Said = dict[str, dict[str, str]]
"""What a source said: host → key → text. `rack` is a key, if the source has it."""

_NEEDED = {"gpus": "1", "generation": "unknown"}


@dataclass
class Merged:
    """The result of a merge.

    Attributes:
        after: the new text of the inventory.
        notes: what changed, and what did not, one sentence each.
        said: what the next merge compares the source with.
    """

    after: bytes
    notes: list[str]
    said: bytes


@dataclass
class _Changes:
    gone: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    settings: dict[str, list[HostSetting]] = field(default_factory=dict)
    told: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (title, sentence) → hosts
    said: Said = field(default_factory=dict)

    def tell(self, title: str, sentence: str, host: str) -> None:
        self.told.setdefault((title, sentence), []).append(host)

    def notes(self) -> list[str]:
        return [
            f"{title}: {sentence.replace('{hosts}', fold(hosts)).replace('{quoted}', quoted(hosts))}"
            for (title, sentence), hosts in self.told.items()
        ]


def said_by(draft: Draft) -> bytes:
    """Return what a source says, to keep it for the next import."""
    return msgspec.json.encode({host: _texts(draft, host) for host in draft.values})


def merge(data: bytes, path: Path, draft: Draft, last: bytes | None, stated: Mapping[str, str]) -> Merged:
    """Merge a source into an inventory.

    Args:
        data: the inventory's text, and `path` its file.
        last: what the source said at the last import, as `said_by` or an earlier merge returned it; None = unknown.
        stated: the user's values for new hosts whose source does not say.
    Raises BadInput: the result is not a valid inventory.
    """
    draft = replace(draft, values={name: dict(values) for name, values in draft.values.items()})
    inventory = parse(data, path)
    changes = _compared(inventory, draft, _decoded(last))
    after = data
    for edit in _edits(data, path, inventory, draft, changes, stated):
        after = apply(after, path, edit)
    return Merged(after, [*changes.notes(), *_racks_of(draft, changes)], msgspec.json.encode(changes.said))


def _decoded(last: bytes | None) -> Said | None:
    """Return what the source said last time, without values that this version of gpurun does not know."""
    try:
        found = None if last is None else msgspec.json.decode(last, type=ready(Said))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if found is None:
        return None
    return {host: {key: text for key, text in said.items() if _is_known(key, text)} for host, said in found.items()}


def _is_known(key: str, text: str) -> bool:
    try:
        return bool(text) and _setting(key, text).value is not None
    except BadInput:
        return False


def _texts(draft: Draft, host: str) -> dict[str, str]:
    rack = {"rack": draft.racks[host]} if host in draft.racks else {}
    return {**rack, **{key: setting.text for key, setting in draft.values[host].items()}}


def _compared(inventory: Inventory, draft: Draft, last: Said | None) -> _Changes:
    changes = _Changes()
    for name in draft.values:
        now, before = _texts(draft, name), (last or {}).get(name)
        changes.said[name] = dict(now)
        host = inventory.by_name.get(name)
        if host is not None:
            _compare_host(host, before, now, inventory, changes)
        elif before is None:
            changes.added.append(name)
            changes.tell("added", "{hosts}", name)
        else:
            changes.said[name] = before
            changes.tell(
                "kept",
                "{hosts}: somebody removed these hosts from the inventory, so gpurun does not add these hosts again",
                name,
            )
    for host in inventory.hosts:
        if host.name in draft.values:
            continue
        if last is None:
            changes.tell(
                "kept",
                "{hosts}: the source has no such hosts; to remove: `gpurun inventory remove {quoted}`",
                host.name,
            )
        elif host.name in last:
            changes.gone.append(host.name)
            own = sorted(f"labels.{key}" for key in host.labels if f"labels.{key}" not in last[host.name])
            changes.tell("gone", "{hosts}" + (f", with {', '.join(own)} from the inventory" if own else ""), host.name)
    return changes


def _compare_host(
    host: Host, before: dict[str, str] | None, now: dict[str, str], inventory: Inventory, changes: _Changes
) -> None:
    """Compare each value of one host. Without an earlier import, a value that the inventory has stays."""
    for key in {**(before or {}), **now}:
        old, new = (before or {}).get(key), now.get(key)
        if before is not None and old == new:
            continue
        mine = _of_host(host, key)
        if mine == _value(key, new):
            continue
        if key == "fabric" and new is not None and new not in inventory.fabrics:
            changes.tell(
                "kept", f"{{hosts}}: the inventory has no fabric {new}; add this fabric, then import again", host.name
            )
            _stays(changes, host.name, key, old)
        elif mine == _value(key, old) or (before is None and mine is None):
            changes.settings.setdefault(host.name, []).append(_setting(key, new or ""))
            what = f"another {key}" if key in PER_HOST else f"{key} {_shown(mine)} → {_shown(_value(key, new))}"
            changes.tell("changed", f"{{hosts}}: {what}", host.name)
        elif new is None:
            changes.tell("kept", f"{{hosts}}: {key} stays {_shown(mine)}; the source has no {key} now", host.name)
            _stays(changes, host.name, key, old)
        else:
            was = "says" if before is None else f"said {old}, now" if old is not None else "now says"
            changes.tell(
                "kept",
                f"{{hosts}}: {key} stays {_shown(mine)}; the source {was} {new}. To use {new}: "
                f"`gpurun inventory set {{quoted}} {shlex.quote(f'{key}={new}')}`",
                host.name,
            )
            if before is not None:
                _stays(changes, host.name, key, old)


def _stays(changes: _Changes, host: str, key: str, old: str | None) -> None:
    """Keep what the source said earlier, so that the next import reports the conflict again."""
    if old is None:
        changes.said[host].pop(key, None)
    else:
        changes.said[host][key] = old


def _of_host(host: Host, key: str) -> object:
    label = key.partition(".")[2]
    found = host.labels.get(label) if label else getattr(host, key)
    return None if found == () else found


def _value(key: str, text: str | None) -> object:
    return None if text is None else _setting(key, text).value


def _setting(key: str, text: str) -> HostSetting:
    (found,) = settings_of([f"{key}={text}"])
    return found


def _shown(value: object) -> str:
    return "(none)" if value is None else str(value)


def _edits(
    data: bytes, path: Path, inventory: Inventory, draft: Draft, changes: _Changes, stated: Mapping[str, str]
) -> Iterator[Edit]:
    if changes.gone:
        yield RemoveHosts(tuple(changes.gone))
    if changes.settings:
        yield SetEach(tuple(_together(changes.settings, inventory)))
    if changes.added:
        yield from _additions(data, path, inventory, draft, changes.added, stated)


def _together(changed: Mapping[str, Sequence[HostSetting]], inventory: Inventory) -> Iterator[SetFields]:
    """Join equal settings of hosts, and addresses that follow the order of the names of a rack's hosts."""
    alike: dict[object, list[str]] = {}
    for name, settings in changed.items():
        own = tuple(setting.field for setting in settings if setting.field in PER_HOST)
        others = tuple(setting for setting in settings if setting.field not in PER_HOST)
        alike.setdefault((others, own, own and inventory.by_name[name].rack), []).append(name)
    for names in alike.values():
        ordered = expand(fold(names))
        folded = [_folded([changed[name][at] for name in ordered]) for at in range(len(changed[names[0]]))]
        if all(setting is not None for setting in folded):
            yield SetFields(ordered, tuple(setting for setting in folded if setting is not None))
            continue
        for name in ordered:
            yield SetFields((name,), tuple(changed[name]))


def _folded(settings: Sequence[HostSetting]) -> HostSetting | None:
    """Return one setting for several hosts: equal values, or a range of addresses; None if there is none."""
    first = settings[0]
    texts = tuple(setting.text for setting in settings)
    if set(texts) == {first.text}:
        return first if len(texts) == 1 or first.value is None or first.field not in PER_HOST else None
    if first.field not in PER_HOST or any(":" in text or not text for text in texts):
        return None
    folded = fold(texts)
    return _setting(first.field, folded) if expand(folded) == texts else None


def _additions(
    data: bytes, path: Path, inventory: Inventory, draft: Draft, names: Sequence[str], stated: Mapping[str, str]
) -> Iterator[Edit]:
    """Add hosts with the values of the source; the inventory's defaults apply to the others."""
    top, by_rack = _defaults(data, path)
    racks = draft.guess_racks(names)
    for name in names:
        inherited = {**top, **by_rack.get(racks[name], {})}
        own = draft.values[name]
        if "fabric" in own and own["fabric"].text not in inventory.fabrics:
            raise BadInput(
                f"host {name} is on fabric {own['fabric'].text}, which the inventory does not have", where=str(path),
                hint="add the fabric under `fabrics` with `gpurun inventory edit`, then import again",
            )  # fmt: skip
        for key, text in stated.items():
            if key not in own and inherited.get(key) != text:
                own[key] = _setting(key, text)
        for key, text in _NEEDED.items():
            if key not in own and key not in inherited:
                own[key] = _setting(key, text)
                draft.guess(f"{key} {text} for new hosts: the source does not say")
    for rack in dict.fromkeys(racks.values()):
        inherited = {**top, **by_rack.get(rack, {})}
        defaults = {key: written(key, text) for key, text in inherited.items()}
        members = [name for name in names if racks[name] == rack]
        for hosts, settings in grouped(draft, members, defaults):
            yield AddHosts(hosts, rack, settings)


def _defaults(data: bytes, path: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the plain values of `defaults`, and those of each rack."""
    report = ProblemReport(str(path))
    root = compose(data, str(path))
    top = entries(root, report, "the inventory") if root is not None else {}
    racks = entries(top["racks"][1], report, "racks") if "racks" in top else {}
    of_racks = {name: entries(node, report, name) for name, (_, node) in racks.items()}
    return _plain(top.get("defaults"), report), {
        name: _plain(rack.get("defaults"), report) for name, rack in of_racks.items()
    }


def _plain(pair: tuple[ScalarNode, Node] | None, report: ProblemReport) -> dict[str, str]:
    found = entries(pair[1], report, "defaults") if pair is not None else {}
    return {key: node.value for key, (_, node) in found.items() if isinstance(node, ScalarNode)}


def _racks_of(draft: Draft, changes: _Changes) -> list[str]:
    guessed = [name for name in changes.added if name not in draft.racks]
    return (
        [f"guessed: the racks of {fold(guessed)}; `gpurun inventory set HOSTS rack=R` moves hosts"] if guessed else []
    )

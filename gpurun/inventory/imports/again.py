"""Import a source again, or for the first time: guess what it does not say, and merge it with what people edited.

A three-way merge on the values of hosts: what the source said last time, what it says now, and what the inventory says.
A value that only the source changed is taken; a value that only a person changed stays; where both changed it, the
person's stays and a note says so. Guesses are no values of the source: they never undo what a person or a probe wrote.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.convert import Entries, ProblemReport, compose_document, entries, is_null
from gpurun.documents.plain import DocumentError
from gpurun.errors import BadInput
from gpurun.inventory.edit import (
    AddHosts,
    Edit,
    HostSetting,
    RemoveHosts,
    SetEach,
    SetFields,
    apply,
    parse_settings,
    with_hosts,
)
from gpurun.inventory.edit import parse_settings as settings_of
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand, quoted
from gpurun.inventory.imports.draft import IS_JUMP, Draft
from gpurun.inventory.model import Host, Inventory
from gpurun.inventory.read import parse_inventory
from gpurun.msgspec_types import ready
from gpurun.quantities import count

# Guessed values of an imported inventory, until the hosts themselves have told. Pure.


_IMPORTED = re.compile(r"^# Imported from (.*) by gpurun inventory import\.$", re.MULTILINE)
_COMMENT = re.compile(r"^# Guessed: (gpus|generation) (\S+) for .*\n", re.MULTILINE)
_INTERFACE = re.compile(r"^# Guessed: interface ([^\s:]+).*\n", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults: \{.*\}$", re.MULTILINE)
_OTHERWISE = "otherwise"


@dataclass(frozen=True)
class Guess:
    """A guessed default.

    Attributes:
        key: ``gpus`` or ``generation``.
        value: as YAML has it, without quotes.
        comment: the line that says so.
    """

    key: str
    value: str
    comment: str


def is_imported(text: str) -> bool:
    """Return whether `compose_inventory` wrote an inventory's text, before people edited it."""
    return _IMPORTED.search(text) is not None


def imported_from(text: str) -> str | None:
    """Return the file that an inventory was imported from, as it was written; None if its text does not say."""
    found = _IMPORTED.search(text)
    return found.group(1) if found else None


def guesses(text: str) -> tuple[Guess, ...]:
    """Return the guesses that are still in an inventory's text."""
    found = [Guess(each[1], each[2], each[0]) for each in _COMMENT.finditer(text)]
    return tuple(guess for guess in found if _with_default(text, guess, guess.value) is not None)


def guessed_hosts(text: str, guess: Guess, source: Path) -> tuple[str, ...]:
    """Return the hosts that have a guessed default, and no value of their own.

    Args:
        source: the inventory's file, for messages.
    """
    other = str(int(guess.value) + 1) if guess.value.isdecimal() else _OTHERWISE
    changed = _with_default(text, guess, other)
    if changed is None:
        return ()
    try:
        before, after = parse_inventory(text.encode(), source), parse_inventory(changed.encode(), source)
    except BadInput:
        return ()
    return tuple(
        host.name for host in before.hosts if getattr(host, guess.key) != getattr(after.by_name[host.name], guess.key)
    )


def settled(text: str, guess: Guess, value: str, unknown: Collection[str]) -> str:
    """Return the text with a default that hosts have told.

    Args:
        unknown: hosts with this default that have not told. For them, it stays a guess.
    """
    changed = _with_default(text, guess, value)
    if changed is None:
        return text
    still = f"# Guessed: {guess.key} {value} for {fold(unknown)}, as most others have\n" if unknown else ""
    return changed.replace(guess.comment, still, 1)


def with_interface(text: str, interface: str) -> str:
    """Return the text with the interface that the hosts have, if its interface is a guess; then it is none any more."""
    guess = _INTERFACE.search(text)
    if guess is None:
        return text
    stated = re.compile(rf"(?<=\binterface: ){re.escape(guess[1])}(?=[,}}\s])")
    return stated.sub(lambda _: interface, text.replace(guess[0], "", 1))


def _with_default(text: str, guess: Guess, value: str) -> str | None:
    """Return the text with another value of the default; None if the default is not the guess any more."""
    line = _DEFAULTS.search(text)
    if line is None:
        return None
    stated = re.compile(rf"(?<=[{{ ]){guess.key}: ('?){re.escape(guess.value)}\1(?=[,}}])")
    found = stated.search(line[0])
    if found is None:
        return None
    start, end = line.start() + found.start(), line.start() + found.end()
    is_plain = value.isdecimal() if guess.key == "gpus" else value.replace("-", "").replace("_", "").isalpha()
    return f"{text[:start]}{guess.key}: {value if is_plain else _quoted(value)}{text[end:]}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# Write a draft as a readable inventory file: defaults first, equal hosts folded.


_COMMON = ("generation", "gpus", "user", "port", "gpu_model", "gpu_memory_mib")


def compose_inventory(draft: Draft, given: Mapping[str, str], fabric: Mapping[str, str]) -> str:
    """Return the text of an inventory.

    Args:
        given: the user's values for hosts without a value in the source: ``gpus``, ``generation``, …
        fabric: the keys of the single fabric as YAML: ``kind``, ``interface``, ``hcas``.
    If a required value is in neither, gpurun guesses it and adds a note to the draft.
    """
    racks = draft.guess_racks()
    defaults = _defaults(draft, given)
    names = _fabric_names(draft, str(fabric["kind"]), defaults)
    wires = f"{{{', '.join(f'{key}: {value}' for key, value in fabric.items())}}}"
    lines = [
        f"# Imported from {draft.source.encode('unicode_escape').decode()} by gpurun inventory import.",
        *(f"# Guessed: {guess}" for guess in draft.guessed),
        "version: 1",
        f"defaults: {{{', '.join(f'{key}: {text}' for key, text in defaults.items())}}}",
        "fabrics:",
        *(f"  {name}: {wires}" for name in names),
    ]
    if draft.ssh_config:
        lines.append(f"ssh_config: {_quoted_of_compose(draft.ssh_config)}")
    additions = [
        AddHosts(hosts, rack, settings)
        for rack in dict.fromkeys(racks.values())
        for hosts, settings in grouped(draft, [host for host in draft.values if racks[host] == rack], defaults)
    ]
    return with_hosts("\n".join([*lines, "racks:", ""]), additions)


def _fabric_names(draft: Draft, kind: str, defaults: dict[str, str]) -> list[str]:
    """Return the fabrics that hosts name, or one fabric named by its kind. Adds the most common one to `defaults`."""
    named = Counter(values["fabric"].text for values in draft.values.values() if "fabric" in values)
    if not named:
        return [kind]
    draft.guess(f"kind {kind} for every fabric: {', '.join(named)}")
    if named.total() < len(draft.values):
        named[kind] += len(draft.values)
    defaults["fabric"] = written("fabric", named.most_common(1)[0][0])
    return list(named)


def _quoted_of_compose(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _defaults(draft: Draft, given: Mapping[str, str]) -> dict[str, str]:
    """Return the values of most hosts, and the required values for hosts without a value in the source."""
    defaults = dict(given)
    for key in _COMMON:
        texts = Counter(values[key].text for values in draft.values.values() if key in values)
        missing = [name for name, values in draft.values.items() if key not in values]
        if key in defaults:
            continue
        if texts and (not missing or key in ("gpus", "generation")):
            defaults[key] = texts.most_common(1)[0][0]
            if missing:
                draft.guess(f"{key} {defaults[key]} for {fold(missing)}, as most others have")
        elif key in ("gpus", "generation"):
            defaults[key] = {"gpus": "1", "generation": "unknown"}[key]
            draft.guess(f"{key} {defaults[key]} for every host: the source does not say")
    return {key: written(key, text) for key, text in defaults.items()}


def written(key: str, text: str) -> str:
    """Return a value as YAML has it."""
    (setting,) = parse_settings([f"{key}={text}"])
    plain = isinstance(setting.value, int) or text.replace("-", "").replace("_", "").isalpha()
    return text if plain else _quoted_of_compose(text)


def grouped(
    draft: Draft, hosts: Sequence[str], defaults: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], tuple[HostSetting, ...]]]:
    """Group equal hosts of a rack; fold their addresses if they follow the order of the names."""
    alike: dict[tuple[tuple[HostSetting, ...], tuple[str, ...]], list[str]] = {}
    for host in hosts:
        own = draft.values[host]
        kept = tuple(s for key, s in own.items() if key not in PER_HOST and defaults.get(key) != _written_own(key, s))
        alike.setdefault((kept, tuple(key for key in PER_HOST if key in own)), []).append(host)
    for (settings, addressed), names in alike.items():
        ordered = expand(fold(names))
        folded = _folded_addresses(draft, ordered)
        if folded is not None:
            yield ordered, (*settings, *folded)
            continue
        for name in names:
            own = draft.values[name]
            yield (name,), (*settings, *(own[key] for key in addressed))


def _written_own(key: str, setting: HostSetting) -> str:
    return "" if key.startswith("labels.") else written(key, setting.text)


def _folded_addresses(draft: Draft, names: Sequence[str]) -> tuple[HostSetting, ...] | None:
    """Return the hosts' addresses as ranges; None if they do not form a range."""
    settings: list[HostSetting] = []
    for key in PER_HOST:
        texts = [draft.values[name][key].text for name in names if key in draft.values[name]]
        if not texts:
            continue
        if len(texts) < len(names) or any(":" in text for text in texts):
            return None
        folded = fold(texts) if len(texts) > 1 else texts[0]
        if len(texts) > 1 and list(expand(folded)) != texts:
            return None
        settings.extend(parse_settings([f"{key}={folded}"]))
    return tuple(settings)


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
    inventory = parse_inventory(data, path)
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
    top, by_rack = _defaults_of_again(data, path)
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


def _defaults_of_again(data: bytes, path: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the plain values of `defaults`, and those of each rack."""
    report = ProblemReport(str(path))
    root = compose_document(data, str(path))
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


# Import the machines of SkyPilot's ``ssh_node_pools.yaml`` and of dstack's SSH fleets.


_NAMES = ("ip", "hostname")
_VALUES = {"user": "user", "port": "port", "internal_ip": "fabric_address"}
_KEYS = ("identity_file", "ssh_key", "private_key")
_BY_SSH = "gpurun takes SSH settings from ~/.ssh/config"
_SECRETS = ("password", "ssh_key", "private_key")


def kind_of(data: bytes, file: str) -> str | None:
    """Return ``skypilot`` or ``dstack`` if a YAML file has that form."""
    try:
        root = compose_document(data, file, tags=True)
        top = entries(root, ProblemReport(file), file) if isinstance(root, MappingNode) else {}
    except DocumentError:
        return None
    if _text(top, "type") is not None:
        return "dstack"
    pools = [entries(pool, ProblemReport(file), file) for _, pool in top.values()]
    listed = [isinstance(pool["hosts"][1], SequenceNode) for pool in pools if "hosts" in pool]
    return "skypilot" if any(listed) else None


def read_skypilot(data: bytes, draft: Draft, file: str) -> None:
    """Fill a draft from ``ssh_node_pools.yaml``."""
    reader = _MachineLists(draft, file)
    pools = reader.top(data, "the pools")
    for name, (place, node) in pools.items():
        pool = entries(node, reader.report, f"pool {name}")
        if "hosts" not in pool:
            reader.report.wrong(place, f"pool {name} has no hosts")
        reader.hosts(pool, {"pool": name})
    reader.finish(f"{count(len(pools), 'pool')} as labels")


def read_dstack(data: bytes, draft: Draft, file: str) -> None:
    """Fill a draft from an SSH fleet. Raises BadInput: another configuration of dstack's, or a fleet without hosts."""
    reader = _MachineLists(draft, file)
    top = reader.top(data, "the fleet")
    if _text(top, "type") != "fleet":
        raise BadInput(
            f"a dstack file of type {_text(top, 'type')!r} lists no hosts; import a file of type fleet", where=file
        )
    ssh = entries(top["ssh_config"][1], reader.report, "ssh_config") if "ssh_config" in top else {}
    if "hosts" not in ssh:
        raise BadInput("the dstack fleet has no ssh_config with hosts; gpurun imports only SSH fleets", where=file)
    for key in ("placement", "resources", "blocks", "env"):
        if key in top:
            draft.leave(f"{key}: only dstack has this setting", reader.place(top[key][0]))
    name = _text(top, "name")
    reader.hosts(ssh, {"fleet": name} if name else {})
    reader.finish("")


class _MachineLists:
    """Reads hosts into a draft, and collects the problems of the file."""

    def __init__(self, draft: Draft, file: str) -> None:
        self.report = ProblemReport(file)
        self._draft, self._file = draft, file
        self._jumps: set[str] = set()

    def top(self, data: bytes, what: str) -> Entries:
        root = compose_document(data, self._file, tags=True)
        return {} if root is None else entries(root, self.report, what)

    def place(self, node: Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}"

    def hosts(self, common: Entries, labels: Mapping[str, str]) -> None:
        """Add the hosts of a list; `common` are the values of all of them."""
        if "hosts" not in common:
            return
        listed = common["hosts"][1]
        if not isinstance(listed, SequenceNode):
            self.report.wrong(listed, "hosts must be a list")
            return
        for node in listed.value:
            own: Entries = {}
            if not isinstance(node, ScalarNode):
                own = entries(node, self.report, "a host")
            name = node.value if isinstance(node, ScalarNode) else self._name(node, own)
            if name is None:
                continue
            where = self.place(node)
            if self._draft.host(name, where):
                for label, text in labels.items():
                    self._draft.label(name, label, text, where)
                for key, (place, value) in {**common, **own}.items():
                    self._value(name, key, place, value)

    def _name(self, node: Node, own: Entries) -> str | None:
        name = next((text for key in _NAMES if (text := _text(own, key)) is not None), None)
        if name is None:
            self.report.wrong(node, "the host has neither ip nor hostname")
        return name

    def _value(self, host: str, key: str, place: ScalarNode, value: Node) -> None:
        where = self.place(place)
        if key in (*_NAMES, "hosts"):
            return
        if key in _VALUES and isinstance(value, ScalarNode):
            if not is_null(value):
                self._draft.put(host, _VALUES[key], value.value, where)
        elif key == "proxy_jump":
            found = entries(value, self.report, key) if isinstance(value, MappingNode) else {key: (place, value)}
            self._jumps.add(_text(found, "hostname") or _text(found, key) or "")
            self._draft.leave(f"proxy_jump: {_BY_SSH}", where)
        elif key in _SECRETS:
            self._draft.leave(f"{key}: a secret", where)
        elif key in _KEYS:
            self._draft.leave(f"{key}: {_BY_SSH}", where)
        else:
            self._draft.leave(f"{key}: gpurun's inventory has no such key for hosts", where)

    def finish(self, took: str) -> None:
        self.report.raise_if_any()
        self._draft.leave_out([host for host in self._draft.values if host in self._jumps], IS_JUMP, self._file)
        self._draft.took.append(count(len(self._draft.values), "host") + (f", {took}" if took else ""))


def _text(found: Entries, key: str) -> str | None:
    node = found[key][1] if key in found else None
    return node.value if isinstance(node, ScalarNode) and not is_null(node) else None

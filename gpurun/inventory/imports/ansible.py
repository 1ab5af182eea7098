"""Import Ansible inventories, INI and YAML: hosts, ranges, groups of groups, and their variables.

A group becomes a rack or a generation if its name says so, otherwise a label. Variables with the name of an inventory
field are imported, and also ``ansible_host``, ``ansible_port``, ``ansible_user`` and ``ansible_python_interpreter``.
The import reads ``group_vars`` and ``host_vars`` beside the file. Source: Ansible's "How to build your inventory".
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.convert import ProblemReport, compose_document, entries, is_null
from gpurun.documents.plain import DocumentError, shown
from gpurun.errors import BadInput
from gpurun.inventory import fields
from gpurun.inventory.hostset import MAX_HOSTS
from gpurun.inventory.imports.draft import IS_JUMP, NO_WORKERS, Draft, generation_of, jumps_of, says_gpu
from gpurun.quantities import count

# Groups of an Ansible inventory: the groups of each host, in the order in which Ansible merges their variables.


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


_RANGE = re.compile(r"\[(\w+):(\w+)(?::(\d+))?\]")
_RACK = re.compile(r"(.*[-_.])?(rack|row|leaf|tor|switch)[-_.]?\w*\Z|r\d+\Z", re.IGNORECASE)
_BARE = re.compile(r"[A-Za-z0-9_./!{][A-Za-z0-9_./!{}…@+-]*")
_SECTION = re.compile(r"\[([^\]:]+)(?::(children|vars|hosts))?\]\s*(?:[#;].*)?\Z")
_SAME = {
    "ansible_host": "address",
    "ansible_ssh_host": "address",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_python_interpreter": "python",
    "gpu_count": "gpus",
    "num_gpus": "gpus",
    "gpus_per_node": "gpus",
}
_WAYS = (
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
    "ansible_ssh_private_key_file",
    "ansible_private_key_file",
)
_GENERATION = "generation_"
"""The prefix of generation groups in the output of `gpurun inventory export ansible`."""
_JUMPS = ("bastion", "bastions", "jumphost", "jumphosts")
"""Groups such as kubespray's, whose hosts are jump hosts."""
AS_YAML = "ansible-inventory -i SOURCE --list --yaml > hosts.yml"
_OVER_SSH = ("ssh", "smart", "paramiko", "paramiko_ssh", "")
_TO_TAKE = "; --groups GLOB imports all hosts of the groups that match GLOB"

VariableFiles = Callable[[str], Sequence[tuple[str, bytes]]]
"""Returns the files of ``group_vars/NAME`` or ``host_vars/NAME``, each with its name; later files win."""


@dataclass(frozen=True)
class Meant:
    """The groups that the user selects, as globs. None: decide by the names of groups, and take every host."""

    racks: str | None = None
    groups: str | None = None


BY_NAME = Meant()


@dataclass
class _Source:
    file: str
    groups: dict[str, Group] = field(default_factory=lambda: {"all": Group()})
    hosts: dict[str, Variables] = field(default_factory=dict)
    jumps: set[str] = field(default_factory=set)
    unreached: dict[str, list[str]] = field(default_factory=dict)  # a connection without SSH → hosts

    def direct(self, host: str) -> list[str]:
        """Return the groups that list a host itself, without those that mean no more than that it is there."""
        return [name for name, group in self.groups.items() if host in group.hosts and name not in ("all", "ungrouped")]

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group())

    def add(self, pattern: str, group: str, draft: Draft, where: str) -> tuple[str, ...]:
        """Add the hosts of a pattern such as ``node[01:16]`` to a group."""
        names = tuple(name for name in _expanded(pattern, where) if draft.host(name, where))
        for name in names:
            self.hosts.setdefault(name, {})
            self.group(group).hosts[name] = None
        return names


def read_ini(text: str, draft: Draft, file: str, beside: VariableFiles, meant: Meant = BY_NAME) -> None:
    """Fill a draft from an INI inventory."""
    source = _Source(file)
    group, kind = "all", "hosts"
    for number, line in enumerate(text.splitlines(), 1):
        bare, where = line.strip(), f"{file}:{number}"
        if not bare or bare[0] in "#;":
            continue
        section = _SECTION.match(bare)
        if section:
            group, kind = section.group(1).strip(), section.group(2) or "hosts"
            source.group(group)
        elif bare.startswith("["):
            raise BadInput(f"{shown(bare)} is not a section such as [gpu_nodes]", where=where)
        elif kind == "children":
            source.group(group).children[_words(bare, where)[0]] = None
        elif kind == "vars":
            key, _, value = bare.partition("=")
            source.group(group).variables[key.strip()] = (_unquoted(value.strip()), where)
        else:
            _host_line(bare, "ungrouped" if group == "all" else group, source, draft, where)
    _finish(source, draft, beside, meant)


def read_yaml(data: bytes, draft: Draft, file: str, beside: VariableFiles, meant: Meant = BY_NAME) -> None:
    """Fill a draft from a YAML inventory."""
    source, report = _Source(file), ProblemReport(file)
    root = compose_document(data, file, tags=True)
    if root is not None:
        groups = entries(root, report, "the inventory")
        if "plugin" in groups:
            raise BadInput(
                "the file configures an Ansible plugin and lists no hosts",
                where=_place(groups["plugin"][0], report), hint=f"run `{AS_YAML}`, then import hosts.yml",
            )  # fmt: skip
        for name, (_, node) in groups.items():
            _group(name, node, source, draft, report, 0)
    report.raise_if_any()
    _finish(source, draft, beside, meant)


def _group(name: str, node: Node, source: _Source, draft: Draft, report: ProblemReport, depth: int) -> None:
    if depth > MOST_DEPTH:
        report.wrong(node, f"groups are nested more than {MOST_DEPTH} deep")
        return
    group = source.group(name)
    for part, (key, value) in entries(node, report, f"group {name}").items():
        if part == "hosts":
            for pattern, (place, own) in entries(value, report, f"hosts of {name}").items():
                where = _place(place, report)
                for host in source.add(pattern, "ungrouped" if name == "all" else name, draft, where):
                    source.hosts[host].update(_variables(own, report, f"host {host}"))
        elif part == "vars":
            group.variables.update(_variables(value, report, f"variables of {name}"))
        elif part == "children":
            for child, (_, inside) in entries(value, report, f"children of {name}").items():
                group.children[child] = None
                _group(child, inside, source, draft, report, depth + 1)
        else:
            report.wrong(key, f"unknown key {shown(part)} in group {name}", allowed=("hosts", "vars", "children"))


def _place(node: Node, report: ProblemReport) -> str:
    return f"{report.file}:{node.start_mark.line + 1}"


def _variables(node: Node, report: ProblemReport, what: str) -> Variables:
    found: Variables = {}
    for key, (place, value) in entries(node, report, what).items():
        found[key] = (_text(value), _place(place, report))
        if key == "labels" and isinstance(value, MappingNode):  # the form of gpurun's own export
            del found[key]
            labels = entries(value, report, key)
            found.update({f"labels.{name}": (_text(text), _place(at, report)) for name, (at, text) in labels.items()})
    return found


def _text(node: Node) -> str:
    """Return a variable as text: a list as YAML; a mapping or an encrypted value as a text that no field accepts."""
    if isinstance(node, ScalarNode):
        return "!vault" if node.tag.startswith("!") else ("" if is_null(node) else str(node.value))
    if isinstance(node, SequenceNode):
        return f"[{', '.join(_item(child) for child in node.value)}]"
    assert isinstance(node, MappingNode)
    return "{…}"


def _item(node: Node) -> str:
    """Return a list's item as text in YAML, in quotes if YAML would read anything else."""
    text = _text(node)
    return text if isinstance(node, SequenceNode) or _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _host_line(line: str, group: str, source: _Source, draft: Draft, where: str) -> None:
    pattern, *variables = _words(line, where)
    name, colon, port = pattern.rpartition(":")
    if colon and "[" not in port and "]" not in port and ":" not in name:
        pattern, variables = name, [*variables, f"ansible_port={port}"]
    names = source.add(pattern, group, draft, where)
    for word in variables:
        key, equals, value = word.partition("=")
        if not equals:
            draft.leave(shown(word), where)
        for host in names if equals else ():
            source.hosts[host][key] = (value, where)


def _words(line: str, where: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise BadInput(f"{shown(line)}: {error}", where=where) from error


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _expanded(pattern: str, where: str) -> Iterator[str]:
    """Expand ``node[01:16]`` and ``db-[a:f]``; the end is inclusive, leading zeros count."""
    found = _RANGE.search(pattern)
    if not found:
        yield pattern
        return
    first, last, step = found.group(1), found.group(2), int((found.group(3) or "1")[:6]) or 1
    if first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and len(last) < 9:
        width = len(first) if first.startswith("0") else 0
        middle = [str(n).zfill(width) for n in range(int(first), int(last) + 1, step)[: MAX_HOSTS + 1]]
    elif len(first) == len(last) == 1 and first.isalpha() and last.isalpha():
        middle = [chr(n) for n in range(ord(first), ord(last) + 1, step)]
    else:
        raise BadInput(f"{shown(pattern)} is not a range such as node[01:16]", where=where)
    if len(middle) > MAX_HOSTS:
        raise BadInput(f"{shown(pattern)} names more than {MAX_HOSTS} hosts", where=where)
    for part in middle:
        yield from _expanded(pattern[: found.start()] + part + pattern[found.end() :], where)


def _finish(source: _Source, draft: Draft, beside: VariableFiles, meant: Meant) -> None:
    """Give every host the variables of its groups and its own. As in Ansible, variable files override the inventory."""
    lineage = lineages(source.groups, draft, source.file)
    files = {name: _variables_beside(f"group_vars/{name}", beside) for name in source.groups}
    kinds = {name: _kind(name, meant.racks) for name in source.groups}
    for host, own in source.hosts.items():
        groups = lineage.get(host, [])
        variables: Variables = {}
        for name in ("all", *groups):
            variables.update(source.groups[name].variables)
        for name in ("all", *groups):
            variables.update(files[name])
        variables.update(own)
        variables.update(_variables_beside(f"host_vars/{host}", beside))
        for name in groups:
            _group_says(host, name, kinds[name], draft)
        for key, (text, where) in variables.items():
            _variable(host, key, text, source, draft, where)
    draft.with_gpus |= {host for host, groups in lineage.items() if any(says_gpu(name) for name in groups)}
    for way, hosts in source.unreached.items():
        draft.leave_out(hosts, f"left out, because ansible_connection={way} does not use SSH", source.file)
    _leave_out_jumps(source, lineage, draft)
    _leave_out_others(source, lineage, draft, meant)
    _say_what(source, kinds, draft)


def _leave_out_jumps(source: _Source, lineage: Mapping[str, Sequence[str]], draft: Draft) -> None:
    """Leave out hosts that are only jump hosts: of such a group, or named in another host's arguments for SSH."""
    addressed = {values["address"].text: host for host, values in draft.values.items() if "address" in values}
    named = {addressed.get(name, name) for name in source.jumps} - draft.telling()
    groups = {host for host in draft.values if (own := lineage.get(host)) and set(own).issubset(_JUMPS)}
    draft.leave_out([host for host in draft.values if host in named | groups], IS_JUMP, source.file)


def _leave_out_others(source: _Source, lineage: Mapping[str, Sequence[str]], draft: Draft, meant: Meant) -> None:
    """Leave out hosts that the user did not select; if the user selected none, hosts without GPUs."""
    if meant.groups is not None:
        others = [h for h in draft.values if not any(fnmatchcase(name, meant.groups) for name in lineage.get(h, ()))]
        draft.leave_out(others, f"left out, because no group of the host matches {meant.groups}", source.file)
        return
    draft.leave_out_without_gpus(source.file, _TO_TAKE)
    idle = [h for h in draft.values if (own := source.direct(h)) and all(NO_WORKERS.match(name) for name in own)]
    if not any("gpus" in draft.values[host] for host in idle) and len(idle) < len(draft.values):
        draft.leave_out(idle, f"left out, because the names of the groups suggest no GPUs{_TO_TAKE}", source.file)


def _kind(name: str, racks: str | None) -> str:
    if name in ("all", "ungrouped"):
        return ""
    if fnmatchcase(name, racks) if racks else _RACK.match(name):
        return "rack"
    return "generation" if generation_of(name) or name.startswith(_GENERATION) else "label"


def _group_says(host: str, name: str, kind: str, draft: Draft) -> None:
    where = f"group {name}"
    if kind == "rack":
        draft.put(host, "rack", name, where)
    elif kind == "generation":
        draft.put(host, "generation", generation_of(name) or name.removeprefix(_GENERATION), where)
    elif kind == "label":
        draft.label(host, name, "yes", where)


def _variable(host: str, key: str, text: str, source: _Source, draft: Draft, where: str) -> None:
    key = _SAME.get(key, key)
    if key == "ansible_connection" or key in _WAYS:
        _way(host, key, text, source, draft, where)
    elif "{{" in text or text == "!vault":
        draft.leave(f"{key}: a template or a secret", where)
    elif key == "gpu_type":
        draft.gpu_type(host, text, where)
    elif key == "gpu_model":
        draft.gpu_model(host, text, where)
    elif key.startswith("labels."):
        draft.label(host, key.removeprefix("labels."), text, where)
    elif key == "address" and text == host:
        return
    elif text and (key == "rack" or (key in fields.HOST and key != "labels")):
        draft.put(host, key, text, where)
    elif text and key != "ansible_group_priority":
        draft.leave(f"variable {key}", where)


def _way(host: str, key: str, text: str, source: _Source, draft: Draft, where: str) -> None:
    """Note how Ansible reaches a host: over which jump hosts, or without SSH."""
    if key == "ansible_connection":
        if text not in _OVER_SSH and "{{" not in text:
            source.unreached.setdefault(text, []).append(host)
        return
    source.jumps |= jumps_of(text)
    draft.leave(f"{key}: gpurun takes SSH settings from ~/.ssh/config", where)


def _variables_beside(name: str, beside: VariableFiles) -> Variables:
    found: Variables = {}
    for file, data in beside(name):
        report = ProblemReport(file)
        try:
            root = compose_document(data, file, tags=True)
            told = _variables(root, report, file) if root is not None else {}
        except DocumentError:  # for example an encrypted file
            told = {file: ("!vault", file)}
        report.raise_if_any()
        found.update(told)
    return found


def _say_what(source: _Source, kinds: Mapping[str, str], draft: Draft) -> None:
    draft.took.append(f"{count(len(draft.values), 'host')} in {count(len(source.groups) - 1, 'group')}")
    for kind in ("rack", "generation", "label"):
        names = [name for name, own in kinds.items() if own == kind]
        if names:
            listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            draft.guess(f"groups used as {kind}s: {listed}")

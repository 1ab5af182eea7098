"""Import a Slurm configuration: ``slurm.conf``, with ``topology.conf`` and ``gres.conf`` beside it.

Nodes become hosts, leaf switches racks, GPU types models and generations, partitions and features labels.
Source: slurm.conf(5), topology.conf(5), gres.conf(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand
from gpurun.inventory.imports.draft import A_SLICE, Draft, is_slice
from gpurun.quantities import count

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|\S+)")
_GRES = re.compile(r"gpu(?::([A-Za-z][\w.+-]*|\d+[A-Za-z][\w.+-]*))?(?::(\d+)([KMG]?))?(?:\([^)]*\))?\Z", re.IGNORECASE)
_DEVICES = re.compile(r"/dev/nvidia(?:\[([\d,-]+)\]|(\d+))(?=,|\Z)")
_MAX_INCLUDES = 64
_TAKEN = ("nodename", "nodeaddr", "nodehostname", "gres", "feature", "features", "state")
_STATE = "the inventory records no state; to keep jobs away, use `gpurun inventory cordon`"

ReadBeside = Callable[[str], str | None]
"""Returns the text of a file, by its name in the configuration; None if there is no such file."""


@dataclass(frozen=True)
class _Line:
    """One logical line: its first keyword, all keywords in lower case and as written, and its place."""

    first: str
    pairs: Mapping[str, str]
    where: str
    words: tuple[str, ...] = ()


def read_slurm(text: str, draft: Draft, file: str, beside: ReadBeside) -> None:
    """Fill a draft from a ``slurm.conf``."""
    nodes: dict[str, bool] = {}  # True if Gres lists GPUs
    defaults: dict[str, str] = {}
    partitions: list[_Line] = []
    sets: list[_Line] = []
    for line in _lines(text, file, draft, beside, set()):
        if line.first == "nodename":
            _leave_slurms_own(line, draft)
            if line.pairs["nodename"].upper() == "DEFAULT":
                defaults.update({key: value for key, value in line.pairs.items() if key != "nodename"})
            else:
                _nodes(line, {**defaults, **line.pairs}, draft, nodes)
        elif line.first == "partitionname":
            partitions.append(line)
        elif line.first == "nodeset":
            sets.append(line)
        elif line.first == "downnodes":
            draft.leave(f"DownNodes={line.pairs['downnodes']}: {_STATE}", line.where)
    _gres(beside("gres.conf"), _beside(file, "gres.conf"), draft, nodes)
    draft.with_gpus |= {name for name, has_gpus in nodes.items() if has_gpus}
    draft.leave_out_without_gpus(file, " (Gres)", names_tell=False)
    racks = _topology(beside("topology.conf"), _beside(file, "topology.conf"), draft)
    if beside("topology.yaml") is not None:
        draft.leave(
            "gpurun reads racks only from topology.conf, not from topology.yaml",
            _beside(file, "topology.yaml"),
        )
    _partitions(partitions, _node_sets(sets, draft), {*nodes}, draft)
    draft.took.append(
        f"{count(len(draft.values), 'node')}, {count(racks, 'leaf switch', 'leaf switches')} as racks, "
        f"{count(len(partitions), 'partition')} as labels"
    )


def _beside(file: str, name: str) -> str:
    return str(Path(file).parent / name)


def _lines(text: str, file: str, draft: Draft, beside: ReadBeside, seen: set[str]) -> Iterator[_Line]:
    started, whole = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.partition("#")[0].rstrip()
        started = started if whole else number
        if bare.endswith("\\"):
            whole += bare[:-1] + " "
            continue
        whole, complete = "", whole + bare
        where = f"{file}:{started}"
        words = complete.split(maxsplit=1)
        if len(words) == 2 and words[0].lower() == "include":
            yield from _included(words[1].strip(), where, draft, beside, seen)
            continue
        found = _PAIR.findall(complete)
        pairs = {key.lower(): value.strip('"') for key, value in found}
        if pairs:
            yield _Line(next(iter(pairs)), pairs, where, tuple(key for key, _ in found))


def _included(name: str, where: str, draft: Draft, beside: ReadBeside, seen: set[str]) -> Iterator[_Line]:
    text = beside(name) if name not in seen and len(seen) < _MAX_INCLUDES else None
    if text is None:
        draft.leave(f"cannot include {shown(name)}", where)
        return
    seen.add(name)
    yield from _lines(text, _beside(where.rpartition(":")[0], name), draft, beside, seen)


def _expanded(text: str, draft: Draft, where: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except BadInput as error:
        draft.leave(error.message, where)
        return ()


def _nodes(line: _Line, values: Mapping[str, str], draft: Draft, nodes: dict[str, bool]) -> None:
    names = _expanded(line.pairs["nodename"], draft, line.where)
    addresses = values.get("nodeaddr") or values.get("nodehostname") or ""
    if "[" in addresses or len(names) == 1:
        each = _expanded(addresses, draft, line.where) if "[" in addresses else (addresses,)
    else:
        each = ()
    for position, name in enumerate(names):
        if not draft.host(name, line.where):
            continue
        if len(each) == len(names) and each[position] not in ("", name):
            draft.put(name, "address", each[position], line.where)
        nodes[name] = _gpus(name, values.get("gres", ""), draft, line.where)
        for feature in filter(None, re.split(r"[,&|]", values.get("features", values.get("feature", "")))):
            draft.label(name, feature, "yes", line.where)
    state = values.get("state", "unknown").split("*")[0].lower()
    if state not in ("unknown", "idle", "cloud", "future"):
        draft.leave(f"State={state}: {_STATE}", line.where)


def _leave_slurms_own(line: _Line, draft: Draft) -> None:
    own = [word for word in line.words if word.lower() not in _TAKEN]
    if own:
        draft.leave(f"{', '.join(own)}: only Slurm has these settings", line.where)


def _gpus(name: str, gres: str, draft: Draft, where: str) -> bool:
    """Parse ``gpu:v100:4``, ``gpu:4(S:0-1)``, or several types, of which an inventory accepts only one per host.

    Returns whether the node has GPUs that are no slices.
    """
    total, kinds = 0, []
    for part in filter(None, re.split(r",(?![^(]*\))", gres)):
        found = _GRES.match(part)
        if not found:
            draft.leave(f"Gres={part}", where, name)
            continue
        kind, count, _ = found.groups()
        if kind and is_slice(kind):
            draft.leave(f"Gres={part}: {A_SLICE}", where, name)
            draft.sliced.add(name)
            continue
        total += int(count or 1)
        if kind and int(count or 1):
            kinds.append(kind)
    if total:
        draft.put(name, "gpus", str(total), where)
        draft.sliced.discard(name)
    if kinds:
        draft.gpu_type(name, kinds[0], where)
    for kind in kinds[1:]:
        draft.leave(f"GPUs of several types; gpurun counts {kind} as {kinds[0]}", where, name)
    return total > 0


def _gres(text: str | None, file: str, draft: Draft, nodes: Mapping[str, bool]) -> None:
    """Take types and numbers of GPUs that slurm.conf does not contain."""
    if text is None:
        return
    counts: dict[str, int] = {}
    unnamed = tuple(name for name, has_gpus in nodes.items() if has_gpus) or tuple(nodes)
    for line in _lines(text, file, draft, lambda _: None, set()):
        pairs = line.pairs
        if pairs.get("autodetect", "off").lower() not in ("off", ""):
            draft.leave(
                f"AutoDetect={pairs['autodetect']}: to read GPUs from the hosts: `gpurun inventory probe --write`",
                line.where,
            )
        if pairs.get("name", "").lower() != "gpu":
            continue
        names = _expanded(pairs["nodename"], draft, line.where) if "nodename" in pairs else unnamed
        for name in (name for name in names if name in nodes):
            if is_slice(pairs.get("type", "")) or "multiplefiles" in pairs:
                draft.leave(f"Type={pairs.get('type', '?')}: {A_SLICE}", line.where)
                continue
            counts[name] = counts.get(name, 0) + _devices(pairs)
            if "type" in pairs and not {"gpu_model", "labels.gpu_type"} & draft.values[name].keys():
                draft.gpu_type(name, pairs["type"], line.where)
    for name, devices in counts.items():
        if devices and "gpus" not in draft.values[name]:
            draft.put(name, "gpus", str(devices), file)


def _devices(pairs: Mapping[str, str]) -> int:
    """Return the number of devices on a line of gres.conf."""
    if pairs.get("count", "").isdigit():
        return int(pairs["count"][:6])
    return sum(_numbers(found) for found in _DEVICES.finditer(pairs.get("file", "")))


def _numbers(found: re.Match[str]) -> int:
    """Return how many devices one word such as ``/dev/nvidia[0-3,6]`` names."""
    if found.group(2):
        return 1
    parts = [part.split("-") for part in found.group(1).split(",")]
    if not all(len(part) <= 2 and all(number.isdigit() for number in part) for part in parts):
        return 0
    return sum(int(part[-1][:6]) - int(part[0][:6]) + 1 for part in parts)


def _topology(text: str | None, file: str, draft: Draft) -> int:
    """Import leaf switches (switches with nodes) as racks."""
    racks = 0
    for line in _lines(text or "", file, draft, lambda _: None, set()):
        switch, names = line.pairs.get("switchname"), line.pairs.get("nodes")
        if switch and not names:
            draft.leave(f"switch {switch} is not used as a rack, because it has no nodes", line.where)
        elif not switch:
            draft.leave(f"{line.words[0]}={line.pairs[line.first]}", line.where)
        if not switch or not names:
            continue
        racks += 1
        members = _expanded(names, draft, line.where)
        for name in members:
            if name in draft.values:
                draft.put(name, "rack", switch, line.where)
        others = [name for name in members if name not in draft.values]
        if others:
            draft.leave(f"switch {switch} also has {fold(others)}, which gpurun does not import", line.where)
    return racks


def _node_sets(lines: list[_Line], draft: Draft) -> dict[str, tuple[str, ...]]:
    """Map each node set to its nodes: the named nodes, and the nodes with its feature."""
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        label = f"labels.{line.pairs.get('feature', '')}"
        named = _expanded(line.pairs["nodes"], draft, line.where) if "nodes" in line.pairs else ()
        found[line.pairs["nodeset"]] = (*named, *(name for name, values in draft.values.items() if label in values))
    return found


def _partitions(
    partitions: list[_Line], sets: Mapping[str, tuple[str, ...]], nodes: Collection[str], draft: Draft
) -> None:
    for line in partitions:
        partition, names = line.pairs["partitionname"], line.pairs.get("nodes", "")
        if partition.upper() == "DEFAULT" or not names:
            continue
        everyone = names.upper() == "ALL"
        members = tuple(draft.values) if everyone else _expanded(names, draft, line.where)
        members = tuple(chain.from_iterable(sets.get(name, (name,)) for name in members))
        for name in members:
            if name in draft.values:
                draft.label(name, f"partition.{partition}", "yes", line.where)
        unknown = [name for name in members if name not in nodes]
        if unknown:
            draft.leave(
                f"partition {partition} also has {fold(unknown)}, which no NodeName line names",
                line.where,
            )

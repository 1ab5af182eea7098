"""What the head knows of its copy of a job's outputs, as files of the job's folder that outlive a supervisor.

``outputs.versions`` says which names of the copy hold versions of several hosts (`outputs_versions`). It changes with
the copy. ``outputs.given`` says what hosts got of the copy when the attempt began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.errors import StateError
from gpurun.node.folder.contents import Listed
from gpurun.state import durable
from gpurun.state.path import StatePath
from gpurun.supervisor.outputs_listed import HostOutputs
from gpurun.supervisor.outputs_versions import Given, Version, Versions, is_same, of_host

VERSIONS, GIVEN = "outputs.versions", "outputs.given"


def read_versions(folder: StatePath) -> Versions:
    """Return the versions that the copy holds; none if nothing is known."""
    return versions_of(_read(folder / VERSIONS))


def write_versions(folder: StatePath, versions: Versions) -> None:
    """Record the versions that the copy holds. Durable; writes nothing if they are the same."""
    if versions != read_versions(folder):
        _write(folder / VERSIONS, json_of(versions))


def json_of(versions: Versions) -> Mapping[str, Any]:
    """Return versions as JSON: ``{name: [host, path]}``."""
    return {name: [version.host, version.path] for name, version in versions.items()}


def versions_of(said: object) -> Versions:
    """Return versions of JSON; none if it is damaged."""
    if not isinstance(said, dict):
        return {}
    return {
        name: Version(each[0], each[1])
        for name, each in said.items()
        if isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each)
    }


def write_given(
    folder: StatePath,
    mine: Mapping[str, Listed],
    versions: Versions,
    hosts: Sequence[HostOutputs],
    *,
    is_elastic: bool,
) -> Given:
    """Record what hosts now have of the copy; return it.

    Args:
        mine: what the copy holds.
        hosts: the hosts that received it.
        is_elastic: see `share`.
    """
    changed_ns = {}
    for each in hosts:
        got, _ = of_host(mine, versions, each.host, is_elastic=is_elastic)
        same = (now for path, now in each.entries.items() if path in got and is_same(got[path], now))
        changed_ns[each.host] = max((now.mark[0] for now in same if now.mark), default=0)
    if not mine:
        durable.remove(folder / GIVEN)
        return {}
    entries = [[each.path, each.kind, each.mtime_ns, each.size, each.target] for each in mine.values()]
    known = {"hosts": changed_ns, "versions": json_of(versions), "elastic": is_elastic, "entries": entries}
    _write(folder / GIVEN, known)
    return _given(mine, versions, changed_ns, is_elastic=is_elastic)


def read_given(folder: StatePath) -> Given:
    """Return what hosts had of the copy when the attempt began; nothing if nothing is known."""
    said = _read(folder / GIVEN)
    try:
        entries = (Listed(path, kind, 0, int(t), int(size), (), to) for path, kind, t, size, to in said["entries"])
        mine = {each.path: each for each in entries}
        changed_ns = {host: int(ns) for host, ns in said["hosts"].items()}
        return _given(mine, versions_of(said["versions"]), changed_ns, is_elastic=bool(said["elastic"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _given(mine: Mapping[str, Listed], versions: Versions, changed_ns: Mapping[str, int], *, is_elastic: bool) -> Given:
    given = {}
    for host, ns in changed_ns.items():
        got, names = of_host(mine, versions, host, is_elastic=is_elastic)
        mark = (ns,)
        given[host] = {names.get(path, path): entry._replace(mark=mark) for path, entry in got.items()}
    return given


def _write(path: StatePath, said: Mapping[str, Any]) -> None:
    durable.write_bytes(path, json.dumps(said).encode())


def _read(path: StatePath) -> Any:
    """Return what a file says; None if it is not there, or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, StateError, ValueError, RecursionError):
        return None

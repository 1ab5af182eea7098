"""Plan what the head's copy of a job's outputs should hold, from the hosts' lists. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpurun.jobs.record import OutputsLeft
from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.supervisor.outputs_listed import HostOutputs, Unbrought
from gpurun.supervisor.outputs_room import OutputsRoom

FIRST = 5
"""So many of the files that could not be brought are named."""

IN_THE_WAY = "stays on its host: one host has a folder of this name, another has none"

Origin = tuple[str, list[int]]
"""Which host a file of the head's copy came from, and how it was there: `Listed.marks`."""
Given = Mapping[str, Mapping[str, Listed]]
"""What hosts got back of the head's copy when the attempt began, as it was there then: by host and path."""


@dataclass(frozen=True)
class CopyPlan:
    """The plan of the next copy.

    Attributes:
        made: folders and links, each folder before its content.
        kept: files that stay as they are in the present copy.
        fetched: the files to fetch from each host.
        twins: files that are hard links of a fetched file, and of which one.
        unfit: what does not fit on the head, and what is in a folder where another host has a newer file or link.
    """

    made: Sequence[Listed]
    kept: Sequence[str]
    fetched: Mapping[str, Sequence[Listed]] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    unfit: Sequence[Unbrought] = ()


def plan_copy(
    old: Mapping[str, Listed],
    hosts: Sequence[HostOutputs],
    origins: Mapping[str, Origin],
    *,
    onto: bool,
    late: bool = False,
    given: Given = MappingProxyType({}),
    room: OutputsRoom | None = None,
) -> CopyPlan:
    """Plan how the head's copy becomes what the hosts have.

    Args:
        old: what the present copy holds.
        hosts: in rank order. Of files with the same path the newest is taken; of equally new ones, the first host's. A
            folder is taken before files and links, and these stay on their hosts: no folder's content is dropped.
        origins: the hosts of files in the present copy, as far as known.
        onto: keep what the present copy also has, unless it came from one of these hosts.
        late: the hosts were lost for a while: keep newer files that the present copy has since got from others.
        given: if one host has changed or removed a given file, do not take it back from a host that has not touched it.
        room: the copy's largest size; None = unlimited. Of a file that does not fit, the copy keeps the older version.
    """
    wanted = _wanted(old, {each.host: each.entries for each in hosts}, origins, onto, late, given)
    planner = _Planner(old, origins, room)
    planner.hold(wanted)
    planner.leave_what_folders_replace(hosts, wanted)
    for path in sorted(wanted, key=lambda path: path.replace("/", "\0")):
        planner.add(path, *wanted[path])
    return planner.plan()


class _Planner:
    """Decides entry by entry, each folder before its content."""

    def __init__(self, old: Mapping[str, Listed], origins: Mapping[str, Origin], room: OutputsRoom | None) -> None:
        self._old = old
        self._origins = origins
        self._room = room
        self._made: list[Listed] = []
        self._kept: list[str] = []
        self._fetched: dict[str, list[Listed]] = {}
        self._twins: dict[str, str] = {}
        self._unfit: dict[str, Unbrought] = {}
        self._stays: list[Unbrought] = []
        self._first_of: dict[tuple[str, tuple[int, ...]], str] = {}
        self._folders = {""}

    def hold(self, wanted: Mapping[str, tuple[str, Listed]]) -> None:
        """Count what the next copy has in common with the present one."""
        if self._room is None or not self._room.has_limit:
            return
        for path, (host, entry) in wanted.items():
            if path in self._old and (entry.kind != "file" or self._is_kept(host, entry)):
                self._room.hold(self._old[path])

    def leave_what_folders_replace(
        self, hosts: Sequence[HostOutputs], wanted: Mapping[str, tuple[str, Listed]]
    ) -> None:
        """Report files and links in the place of which the copy has another host's folder."""
        for each in hosts if len(hosts) > 1 else ():
            for path, entry in each.entries.items():
                host, taken = wanted.get(path, ("", entry))
                if host and host != each.host and taken.kind == "dir" != entry.kind:
                    self._stays.append(Unbrought(each.host, path, IN_THE_WAY))

    def add(self, path: str, host: str, entry: Listed) -> None:
        """Plan for one entry of a host."""
        above = path.rpartition("/")[0]
        if above in self._unfit:
            self._leave(path, host, self._unfit[above].why, no_room=self._unfit[above].no_room)
        elif above not in self._folders:
            self._leave(path, host, IN_THE_WAY, no_room=False)
        elif entry.kind == "file":
            self._add_file(path, host, entry)
        elif path not in self._old and (why := self._lacks_room(entry)):
            self._leave(path, host, why)
        else:
            self._made.append(entry)
            self._folders.update([path] if entry.kind == "dir" else [])

    def _add_file(self, path: str, host: str, entry: Listed) -> None:
        if self._is_kept(host, entry):
            self._kept.append(path)
        elif (first := self._first_of.setdefault((host, entry.mark), path)) != path:
            if first in self._unfit:
                self._leave(path, host, self._unfit[first].why, no_room=self._unfit[first].no_room)
            else:
                self._twins[path] = first
        elif why := self._lacks_room(entry):
            self._leave(path, host, why)
        else:
            self._fetched.setdefault(host, []).append(entry)

    def _is_kept(self, host: str, entry: Listed) -> bool:
        return is_kept(self._old, self._origins, host, entry)

    def _lacks_room(self, entry: Listed) -> str:
        return self._room.take(entry) if self._room else ""

    def _leave(self, path: str, host: str, why: str, *, no_room: bool = True) -> None:
        """Record that an entry stays on its host: the copy keeps its present version, if any."""
        self._unfit[path] = Unbrought(host, path, why, no_room=no_room)
        older = self._old.get(path)
        if older is not None and older.kind == "file" and path.rpartition("/")[0] in self._folders:
            self._kept.append(path)
            if self._room:
                self._room.hold(older)

    def plan(self) -> CopyPlan:
        """Return the plan."""
        return CopyPlan(self._made, self._kept, self._fetched, self._twins, (*self._unfit.values(), *self._stays))


def _wanted(
    old: Mapping[str, Listed], said: Given, origins: Mapping[str, Origin], onto: bool, late: bool, given: Given
) -> Mapping[str, tuple[str, Listed]]:
    """Return what the copy should hold, and the host that has it; an empty name means the present copy."""
    wanted: dict[str, tuple[str, Listed]] = {}
    if onto:
        wanted = {path: ("", entry) for path, entry in old.items() if origins.get(path, ("",))[0] not in said}
    touched = {
        path
        for host in said.keys() & given.keys()
        for path, entry in given[host].items()
        if not _is_as_given(entry, said[host].get(path))
    }
    needed: set[str] = set()
    if not wanted and not touched and len(said) == 1:
        return {path: (host, entry) for host, entries in said.items() for path, entry in entries.items()}
    for host, entries in said.items():
        for path in reversed(list(entries)):  # what is in a folder, then the folder
            entry, other = entries[path], wanted.get(path)
            if other is not None and (other[0] or late) and not _replaces(entry, *other):
                continue
            if path in touched and path not in needed and _is_as_given(given.get(host, {}).get(path), entry):
                continue
            wanted[path] = (host, entry)
            needed.add(path.rpartition("/")[0])
    return wanted


def _is_as_given(given: Listed | None, now: Listed | None) -> bool:
    """Return whether a host has not touched an entry since it received it."""
    if given is None or now is None or given.kind != now.kind:
        return False
    return now.kind == "dir" or (now.marks, now.target) == (given.marks, given.target)


def _replaces(entry: Listed, host: str, other: Listed) -> bool:
    """Return whether an entry replaces another host's, or with an empty name the present copy's.

    A folder replaces what is none. If several hosts have a folder, it stays the first one's.
    """
    if entry.kind == other.kind == "dir":
        return False
    if host and "dir" in (entry.kind, other.kind):
        return entry.kind == "dir"
    return entry.mtime_ns > other.mtime_ns


def is_kept(old: Mapping[str, Listed], origins: Mapping[str, Origin], host: str, entry: Listed) -> bool:
    """Return whether the present copy already has this file of a host."""
    if entry.path not in old or old[entry.path].kind != "file":
        return False
    if not host:
        return True
    origin = origins.get(entry.path)
    return origin is not None and origin[0] == host and origin[1] == entry.marks


def lacking(mine: Mapping[str, Listed], theirs: Mapping[str, Listed]) -> list[Listed]:
    """Return what a host needs from the head's copy: entries that it lacks or has an older version of. Folders come
    first.
    """
    sent = []
    passed: set[str] = set()
    for path, entry in mine.items():
        other = theirs.get(path)
        if path.rpartition("/")[0] in passed:
            passed.add(path)
        elif other is not None and other.kind == "dir" != entry.kind:
            continue  # the head does not have what is in the host's folder
        elif other is None or (not is_same(entry, other) and other.mtime_ns <= entry.mtime_ns):
            sent.append(entry)
        elif other.kind != entry.kind:
            passed.add(path)  # what the host has there is newer
    return sent


def is_same(one: Listed, other: Listed) -> bool:
    """Return whether the head and a host have the same file, by size and time."""
    if one.kind != other.kind or one.kind == "dir":
        return one.kind == other.kind
    if one.kind == "link":
        return one.target == other.target
    return (one.size, one.mtime_ns) == (other.size, other.mtime_ns)


def left_of(unbrought: Sequence[Unbrought]) -> OutputsLeft | None:
    """Return the entry of a job's record for outputs that were not copied; None if all were copied."""
    if not unbrought:
        return None
    hosts = tuple(sorted({each.host for each in unbrought if each.is_lost}))
    worst = sorted(unbrought, key=lambda each: (not each.is_lost, each.path))
    return OutputsLeft(len(worst), tuple(each.words for each in worst[:FIRST]), hosts)


def is_changing(unbrought: Iterable[Unbrought]) -> bool:
    """Return whether another try may copy more."""
    return any(each.why == CHANGING for each in unbrought)

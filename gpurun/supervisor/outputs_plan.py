"""What the head's copy of a job's outputs is to hold, decided from what the hosts say they have. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpurun.jobs.record import OutputsLeft
from gpurun.node.contents import CHANGING, Listed
from gpurun.supervisor.outputs_listed import HostOutputs, Unbrought
from gpurun.supervisor.outputs_room import OutputsRoom

FIRST = 5
"""So many of the files that could not be brought are named."""

Origin = tuple[str, list[int]]
"""Which host a file of the head's copy came from, and how it was there: `Listed.marks`."""
Given = Mapping[str, Mapping[str, Listed]]
"""What hosts got back of the head's copy when the attempt began, as it was there then: by host and path."""


@dataclass(frozen=True)
class CopyPlan:
    """How the next copy is made.

    Attributes:
        made: folders and links, each folder before what is in it.
        kept: files that stay as they are in the present copy.
        fetched: files that each host is asked for.
        twins: files that are hard links of a fetched file, and of which one.
        unfit: what the head has no room for.
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
    """Decide how the head's copy becomes what the hosts have.

    Args:
        old: what the present copy holds.
        hosts: in rank order. Of files with the same path the one that was written last is taken, else the first host's.
        origins: where files of the present copy came from, as far as that is known.
        onto: keep what the present copy has besides, unless it came from one of these hosts.
        late: the hosts were lost for a while: what the present copy has since got from others stays, if it is newer.
        given: what one host has changed or removed of it does not come back from another that has not touched it.
        room: what the copy may take; None = anything. Of a file that does not fit, the copy keeps the older version.
    """
    wanted = _wanted(old, {each.host: each.entries for each in hosts}, origins, onto, late, given)
    planner = _Planner(old, origins, room)
    planner.hold(wanted)
    for path in sorted(wanted, key=lambda path: path.replace("/", "\0")):
        planner.add(path, *wanted[path])
    return planner.plan()


class _Planner:
    """Decides entry by entry, each folder before what is in it."""

    def __init__(self, old: Mapping[str, Listed], origins: Mapping[str, Origin], room: OutputsRoom | None) -> None:
        self._old = old
        self._origins = origins
        self._room = room
        self._made: list[Listed] = []
        self._kept: list[str] = []
        self._fetched: dict[str, list[Listed]] = {}
        self._twins: dict[str, str] = {}
        self._unfit: dict[str, Unbrought] = {}
        self._first_of: dict[tuple[str, tuple[int, ...]], str] = {}
        self._folders = {""}

    def hold(self, wanted: Mapping[str, tuple[str, Listed]]) -> None:
        """Count what the next copy has in common with the present one."""
        if self._room is None or not self._room.has_limit:
            return
        for path, (host, entry) in wanted.items():
            if path in self._old and (entry.kind != "file" or self._is_kept(host, entry)):
                self._room.hold(self._old[path])

    def add(self, path: str, host: str, entry: Listed) -> None:
        """Plan for one entry of a host."""
        above = path.rpartition("/")[0]
        if above in self._unfit:
            self._leave(path, host, self._unfit[above].why)
        elif above not in self._folders:
            return  # a later host has something else in the place of its folder
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
                self._leave(path, host, self._unfit[first].why)
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

    def _leave(self, path: str, host: str, why: str) -> None:
        """The head has no room for it: the copy keeps the version that it has, if any."""
        self._unfit[path] = Unbrought(host, path, why, no_room=True)
        older = self._old.get(path)
        if older is not None and older.kind == "file" and path.rpartition("/")[0] in self._folders:
            self._kept.append(path)
            if self._room:
                self._room.hold(older)

    def plan(self) -> CopyPlan:
        """What was decided."""
        return CopyPlan(self._made, self._kept, self._fetched, self._twins, tuple(self._unfit.values()))


def _wanted(
    old: Mapping[str, Listed], said: Given, origins: Mapping[str, Origin], onto: bool, late: bool, given: Given
) -> Mapping[str, tuple[str, Listed]]:
    """What the copy is to hold, and the host that has it; an empty name stands for the present copy."""
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
            if other is not None and (other[0] or late) and not _is_newer(entry, other[1]):
                continue
            if path in touched and path not in needed and _is_as_given(given.get(host, {}).get(path), entry):
                continue
            wanted[path] = (host, entry)
            needed.add(path.rpartition("/")[0])
    return wanted


def _is_as_given(given: Listed | None, now: Listed | None) -> bool:
    """Whether a host has not touched something since it got it."""
    if given is None or now is None or given.kind != now.kind:
        return False
    return now.kind == "dir" or (now.marks, now.target) == (given.marks, given.target)


def _is_newer(entry: Listed, other: Listed) -> bool:
    """Whether an entry takes the place of another host's. A folder that several have stays the one it is."""
    return entry.mtime_ns > other.mtime_ns and not entry.kind == other.kind == "dir"


def is_kept(old: Mapping[str, Listed], origins: Mapping[str, Origin], host: str, entry: Listed) -> bool:
    """Whether the present copy already has this file of a host."""
    if entry.path not in old or old[entry.path].kind != "file":
        return False
    if not host:
        return True
    origin = origins.get(entry.path)
    return origin is not None and origin[0] == host and origin[1] == entry.marks


def lacking(mine: Mapping[str, Listed], theirs: Mapping[str, Listed]) -> list[Listed]:
    """What of the head's copy a host is sent: what it lacks, or has an older version of. Folders come first."""
    sent = []
    passed: set[str] = set()
    for path, entry in mine.items():
        other = theirs.get(path)
        if path.rpartition("/")[0] in passed:
            passed.add(path)
        elif other is None or (not is_same(entry, other) and other.mtime_ns <= entry.mtime_ns):
            sent.append(entry)
        elif other.kind != entry.kind:
            passed.add(path)  # what the host has there is newer
    return sent


def is_same(one: Listed, other: Listed) -> bool:
    """Whether the head and a host have the same, as far as size and time tell."""
    if one.kind != other.kind or one.kind == "dir":
        return one.kind == other.kind
    if one.kind == "link":
        return one.target == other.target
    return (one.size, one.mtime_ns) == (other.size, other.mtime_ns)


def left_of(unbrought: Sequence[Unbrought]) -> OutputsLeft | None:
    """What a job's record says of it; None if everything is here."""
    if not unbrought:
        return None
    hosts = tuple(sorted({each.host for each in unbrought if each.is_lost}))
    worst = sorted(unbrought, key=lambda each: (not each.is_lost, each.path))
    return OutputsLeft(len(worst), tuple(each.words for each in worst[:FIRST]), hosts)


def is_changing(unbrought: Iterable[Unbrought]) -> bool:
    """Whether another try may bring more."""
    return any(each.why == CHANGING for each in unbrought)

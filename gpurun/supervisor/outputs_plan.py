"""Plan what the head's copy of a job's outputs should hold, from the hosts' lists. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpurun.jobs.record import OutputsLeft
from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.supervisor.outputs_listed import HostOutputs, Unbrought
from gpurun.supervisor.outputs_room import OutputsRoom
from gpurun.supervisor.outputs_versions import Given, Origin, Shares, is_as_given, is_same

FIRST = 5
"""So many of the files that could not be brought are named."""

IN_THE_WAY = "stays on its host, because a folder on another host has the same name"


@dataclass(frozen=True)
class CopyPlan:
    """The plan of the next copy.

    Attributes:
        made: folders and links, each folder before its content.
        kept: files that stay as they are in the present copy.
        fetched: the files to fetch from each host.
        twins: files that are hard links of a fetched file, and of which one.
        moved: files of the present copy that get other names: new names, and the present ones.
        unfit: what does not fit on the head, and what is in a folder where another host has a newer file or link.
    """

    made: Sequence[Listed]
    kept: Sequence[str]
    fetched: Mapping[str, Sequence[Listed]] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    unfit: Sequence[Unbrought] = ()


def plan_copy(
    old: Mapping[str, Listed],
    hosts: Sequence[HostOutputs],
    origins: Mapping[str, Origin],
    shares: Shares,
    given: Given,
    *,
    onto: bool,
    late: bool = False,
    room: OutputsRoom | None = None,
) -> CopyPlan:
    """Plan how the head's copy becomes what the hosts have.

    Args:
        old: what the present copy holds.
        hosts: in rank order. A folder is taken before files and links, and these stay on their hosts: no folder's
            content is dropped.
        origins: the hosts of files in the present copy, as far as known.
        shares: what each host gives, by its name in the copy.
        given: if one host has changed or removed a given file, do not take it back from a host that has not touched it.
        onto: keep what the present copy also has, unless it came from one of these hosts.
        late: the hosts were lost for a while: keep newer files that the present copy has since got from others.
        room: the copy's largest size; None = unlimited. Of a file that does not fit, the copy keeps the older version.
    """
    wanted = _wanted(old, shares, origins, onto, late, given)
    planner = _Planner(old, origins, shares.moved, room)
    planner.hold(wanted)
    planner.leave_what_folders_replace(hosts, wanted)
    for path in sorted(wanted, key=lambda path: path.replace("/", "\0")):
        planner.add(path, *wanted[path])
    return planner.plan()


class _Planner:
    """Decides entry by entry, each folder before its content."""

    def __init__(
        self,
        old: Mapping[str, Listed],
        origins: Mapping[str, Origin],
        moved: Mapping[str, str],
        room: OutputsRoom | None,
    ) -> None:
        self._old = old
        self._origins = origins
        self._moving = moved
        self._moved: dict[str, str] = {}
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
        if path in self._moving:
            self._moved[path] = self._moving[path]
        elif self._is_kept(host, entry):
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
        unfit = (*self._unfit.values(), *self._stays)
        return CopyPlan(self._made, self._kept, self._fetched, self._twins, self._moved, unfit)


def _wanted(
    old: Mapping[str, Listed], shares: Shares, origins: Mapping[str, Origin], onto: bool, late: bool, given: Given
) -> Mapping[str, tuple[str, Listed]]:
    """Return what the copy should hold, and the host that has it; an empty name means the present copy."""
    said = shares.hosts
    wanted: dict[str, tuple[str, Listed]] = {}
    if onto:
        wanted = {
            path: ("", entry)
            for path, entry in old.items()
            if origins.get(path, ("",))[0] not in said and path not in shares.ended
        }
    touched = {
        path
        for host in said.keys() & given.keys()
        for path, entry in given[host].items()
        if not is_as_given(entry, said[host].get(path))
    }
    needed: set[str] = set()
    if not wanted and not touched and len(said) == 1 and not shares.versions:
        return {path: (host, entry) for host, entries in said.items() for path, entry in entries.items()}
    for host, entries in said.items():
        for path in reversed(list(entries)):  # what is in a folder, then the folder
            entry, other = entries[path], wanted.get(path)
            if other is not None and (other[0] or late) and not _replaces(entry, *other):
                continue
            if path in touched and path not in needed and is_as_given(given.get(host, {}).get(path), entry):
                continue
            wanted[path] = (host, entry)
            needed.add(path.rpartition("/")[0])
    _add_absent(wanted, old, shares)
    return wanted


def _add_absent(wanted: dict[str, tuple[str, Listed]], old: Mapping[str, Listed], shares: Shares) -> None:
    """Add versions of hosts that are not there, with the folders above them."""
    for name, now in {**{name: name for name in shares.stay}, **shares.moved}.items():
        if now in old and name not in wanted:
            wanted[name] = ("", old[now]._replace(path=name))
            folder = name.rpartition("/")[0]
            while folder and folder not in wanted and folder in old:
                wanted[folder] = ("", old[folder])
                folder = folder.rpartition("/")[0]


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

"""Change the head's copy of a job's outputs once every new file has arrived.

gpurun writes the list of changes durably before it makes the first. So a crash cannot leave half of them: the next
process makes all of them again. Each change can be made twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpurun.jobs.record import OutputsLeft
from gpurun.node.agent.frames import OpError
from gpurun.node.agent.serve import disk_of, reserve_of
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import CHANGING, Listed, Maker, listed
from gpurun.node.job.rules import is_beside
from gpurun.state import durable
from gpurun.state.paths import may_pass
from gpurun.supervisor.outputs.listing import (
    Given,
    HostOutputs,
    Origin,
    Shares,
    Unbrought,
    Version,
    Versions,
    is_as_given,
    is_same,
)

# The space for the head's copy of a job's outputs: the job's ``outputs_limit``, and a reserve of the disk.


ENTRY_BYTES = 4096
"""Each entry counts for a multiple of this: empty files and folders fill a disk, too."""
ASKED_AGAIN_BYTES = 4 << 20
"""After so many bytes the head asks again how much room the disk has. The reserve is far larger."""
NO_ROOM = "does not fit"


def cost_of(size: int) -> int:
    """Return the space for an entry with this many bytes of data."""
    return max(1, -(-size // ENTRY_BYTES)) * ENTRY_BYTES


@dataclass
class _Limit:
    """A limit that a recipe or an inventory sets, and how much of it is left, in bytes."""

    name: str
    size: int
    left: int

    @property
    def words(self) -> str:
        return f"{NO_ROOM}: {self.name} is {_gib(self.size)}"


class OutputsRoom:
    """The space for one copy.

    Args:
        top: a descriptor of the folder in which the copy is made; it must stay open.
        limit: the copy's largest size in bytes; None = unlimited.
        came_before: bytes on disk from an interrupted copy: they are used, or removed before more arrives.
        workdir_limit: the same limit for what ranks wrote beside their code, which counts for `limit`, too.
    """

    def __init__(self, top: int, limit: int | None, came_before: int = 0, *, workdir_limit: int | None = None) -> None:
        self._top = top
        self._outputs = [_Limit("outputs_limit", limit, limit)] if limit is not None else []
        self._beside = [*self._outputs]
        if workdir_limit is not None:
            self._beside.append(_Limit("workdir_limit", workdir_limit, workdir_limit))
        free, disk = disk_of(top)
        self._reserve = reserve_of(disk)
        self._new = free + came_before - self._reserve
        self._unasked = 0

    @property
    def has_limit(self) -> bool:
        """Return whether kept files count."""
        return bool(self._beside)

    def hold(self, entry: Listed) -> None:
        """Count an entry that the present copy has and the next one keeps: it takes no more of the disk."""
        self._use(entry, cost_of(entry.data))

    def take(self, entry: Listed) -> str:
        """Count an entry that should arrive; return why it must not, "" if it may."""
        cost = cost_of(entry.data)
        for limit in self._limits(entry):
            if cost > limit.left:
                return limit.words
        if cost > self._new:
            return self._over_disk
        self._use(entry, cost)
        self._new -= cost
        return ""

    def refuses(self, entry: Listed, came: int, more: int) -> str:
        """Return why no more of a file's content may be written, "" if it may.

        Args:
            came: bytes of it that have arrived, including those to write now.
            more: bytes to write now.
        """
        for limit in self._limits(entry):
            if cost_of(came) - cost_of(entry.data) > max(0, limit.left):
                return limit.words
        if not more:
            return ""
        cost = cost_of(more)
        if cost > self._unasked:
            free = disk_of(self._top)[0] - self._reserve
            if more > free:
                return self._over_disk
            self._unasked = min(free, ASKED_AGAIN_BYTES)
        self._unasked -= cost
        return ""

    def end(self, entry: Listed, came: int) -> None:
        """After a file has arrived, count what it has beyond its host's list."""
        self._use(entry, max(0, cost_of(came) - cost_of(entry.data)))

    def _limits(self, entry: Listed) -> Sequence[_Limit]:
        return self._beside if is_beside(entry.path) else self._outputs

    def _use(self, entry: Listed, size: int) -> None:
        for limit in self._limits(entry):
            limit.left -= size

    @property
    def _over_disk(self) -> str:
        return f"{NO_ROOM}: the head keeps {_gib(self._reserve)} of its disk free"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.4g} MiB"


# Plan what the head's copy of a job's outputs should hold, from the hosts' lists. No I/O.


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


CHANGES, DRAFT = b"changes", b"changes.new"
SYNCED_ONE_BY_ONE = 100

Change = Mapping[str, Any]
"""``{"rm": path}``; ``{"put": path}``, a file or folder that has arrived; ``{"twin": path, "of": path}``; a folder or
link (`Listed.header`); or ``{"version": name, "of": path, "host": host}``, a fact about the copy (`Version`)."""


def changes_of(old: Mapping[str, Listed], plan: CopyPlan, brought: Collection[str]) -> list[Change]:
    """Return the changes that turn the present copy into the planned one.

    Args:
        old: the entries of the present copy.
        brought: planned and moved files that have arrived. Of the others, the present content stays if it is a file.
    """
    made = {entry.path: entry for entry in plan.made}
    fetched = [*(entry.path for wanted in plan.fetched.values() for entry in wanted), *plan.moved]
    stay = {path for path in (*fetched, *plan.twins) if path in old and old[path].kind == "file"}
    twins = {path: first for path, first in plan.twins.items() if first in brought}
    files = {*plan.kept, *(path for path in fetched if path in brought), *twins, *stay}
    touched: set[str] = set()
    removed = [
        path
        for path in old
        if path not in made and path not in files and _is_folder(made, _above(path)) and _is_folder(old, _above(path))
    ]
    put = dict.fromkeys(_highest(old, path) for path in fetched if path in brought)
    changed = {entry.path for entry in plan.made if not _is_as_it_was(old.get(entry.path), entry)}
    for path in (*removed, *put, *twins, *changed):
        touched.add(_above(path))
    return [
        *({"rm": path} for path in removed),
        *({"put": path} for path in put),
        *(
            entry.header()
            for entry in plan.made
            if entry.path in changed or (entry.kind == "dir" and entry.path in touched)
        ),
        *({"twin": path, "of": first} for path, first in twins.items()),
    ]


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _is_folder(entries: Mapping[str, Listed], path: str) -> bool:
    return not path or (path in entries and entries[path].kind == "dir")


def _highest(old: Mapping[str, Listed], path: str) -> str:
    """Return what arrives with a file: the file, or the highest folder above it that does not exist yet."""
    while not _is_folder(old, _above(path)):
        path = _above(path)
    return path


def _is_as_it_was(old: Listed | None, entry: Listed) -> bool:
    if old is None or old.kind != entry.kind:
        return False
    if entry.kind == "link":
        return old.target == entry.target and entry.mtime_ns in (0, old.mtime_ns)
    return (old.mode, old.mtime_ns) == (entry.mode, entry.mtime_ns)


def write_changes(arriving: int, changes: Sequence[Change]) -> None:
    """Write the list of changes durably. From now on they will be made, even after a crash."""
    below.remove_entry(arriving, DRAFT)
    descriptor = below.create_file(arriving, DRAFT)
    try:
        for piece in contents.packed((change, b"") for change in map(dict, changes)):
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(DRAFT, CHANGES, src_dir_fd=arriving, dst_dir_fd=arriving)
    durable.sync_open_folder(arriving)


def read_changes(arriving: int) -> list[Change]:
    """Return the written changes that were not all made; none if there are none."""
    try:
        descriptor = below.open_file(arriving, CHANGES)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:  # noqa: PTH123
        try:
            return [frame.header for frame in contents.unpacked(iter(lambda: file.read(1 << 20), b""))]
        except OpError as error:
            raise OSError(errno.EIO, error.message) from error


def make(changes: Sequence[Change], top: int, arrived: below.Cursor) -> Iterator[tuple[str, OSError]]:
    """Make the changes; yield those that the file system refuses, with the reasons. The copy is durable at the end.

    Args:
        top: a descriptor of the copy.
        arrived: the location of the arrived files.

    Raises:
        OSError: the disk is full or broken.
    """
    changes = [change for change in changes if "version" not in change]
    with Maker(top) as maker:
        for change in changes:
            path = _path(change)
            try:
                _make(change, below.parts_of(path), maker, arrived)
            except OSError as error:
                if may_pass(error):
                    raise  # other errors concern one name
                if "rm" not in change:
                    yield path, error
        maker.close_folders()
    _sync(changes, top)


def of_versions(versions: Versions) -> list[Change]:
    """Return the changes that record which versions the copy then holds."""
    return [{"version": name, "of": version.path, "host": version.host} for name, version in versions.items()]


def versions_in(changes: Sequence[Change]) -> Versions:
    """Return the versions that the changes record."""
    return {
        str(change["version"]): Version(str(change["host"]), str(change["of"]))
        for change in changes
        if "version" in change
    }


def _path(change: Change) -> str:
    return next(str(change[kind]) for kind in ("rm", "put", "twin", "p") if kind in change)


def _make(change: Change, parts: below.Parts, maker: Maker, arrived: below.Cursor) -> None:
    if "rm" in change:
        with suppress(FileNotFoundError):
            below.remove_entry(maker.cursor.at(parts[:-1]), parts[-1])
    elif "put" in change:
        _put(parts, maker, arrived)
    elif "twin" in change:
        _twin(below.parts_of(change["of"]), parts, maker)
    elif change["k"] == "dir":
        maker.folder(listed(dict(change)))
    else:
        maker.link(listed(dict(change)))


def _put(parts: below.Parts, maker: Maker, arrived: below.Cursor) -> None:
    above = maker.cursor.at(parts[:-1])
    try:
        source = arrived.at(parts[:-1])
        os.stat(parts[-1], dir_fd=source, follow_symlinks=False)
    except FileNotFoundError:
        return  # it was put there before a crash
    try:
        os.rename(parts[-1], parts[-1], src_dir_fd=source, dst_dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            raise
        below.remove_entry(above, parts[-1])
        os.rename(parts[-1], parts[-1], src_dir_fd=source, dst_dir_fd=above)


def _twin(of: below.Parts, parts: below.Parts, maker: Maker) -> None:
    first = os.dup(maker.cursor.at(of[:-1]))
    try:
        above = maker.cursor.at(parts[:-1])
        below.remove_entry(above, parts[-1])
        below.link_file(first, of[-1], above, parts[-1])
    finally:
        os.close(first)


def _sync(changes: Sequence[Change], top: int) -> None:
    """Sync every folder with a changed name, and those with changed modes and times."""
    paths = {_above(_path(change)) for change in changes}
    paths |= {_path(change) for change in changes if change.get("k") == "dir"}
    if len(paths) > SYNCED_ONE_BY_ONE:
        durable.sync_file_system(top)
        return
    durable.sync_open_folder(top)
    with below.Cursor(top, below.READ) as cursor:
        for path in sorted(paths - {""}):
            try:
                durable.sync_open_folder(cursor.at(below.parts_of(path)))
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was refused

"""Change the head's copy of a job's outputs once every new file has arrived.

gpurun writes the list of changes durably before it makes the first. So a crash cannot leave half of them: the next
process makes all of them again. Each change can be made twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpurun.node.agent.call import OpError
from gpurun.node.folder import batches, below
from gpurun.node.folder.contents import Listed, listed
from gpurun.node.folder.making import Maker
from gpurun.state import syncing
from gpurun.state.path import may_pass
from gpurun.supervisor.outputs_plan import CopyPlan
from gpurun.supervisor.outputs_versions import Version, Versions

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


def write(arriving: int, changes: Sequence[Change]) -> None:
    """Write the list of changes durably. From now on they will be made, even after a crash."""
    below.remove(arriving, DRAFT)
    descriptor = below.create(arriving, DRAFT)
    try:
        for piece in batches.packed((change, b"") for change in map(dict, changes)):
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(DRAFT, CHANGES, src_dir_fd=arriving, dst_dir_fd=arriving)
    syncing.sync_open_folder(arriving)


def read(arriving: int) -> list[Change]:
    """Return the written changes that were not all made; none if there are none."""
    try:
        descriptor = below.open_file(arriving, CHANGES)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:  # noqa: PTH123
        try:
            return [frame.header for frame in batches.unpacked(iter(lambda: file.read(1 << 20), b""))]
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
            below.remove(maker.cursor.at(parts[:-1]), parts[-1])
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
        below.remove(above, parts[-1])
        os.rename(parts[-1], parts[-1], src_dir_fd=source, dst_dir_fd=above)


def _twin(of: below.Parts, parts: below.Parts, maker: Maker) -> None:
    first = os.dup(maker.cursor.at(of[:-1]))
    try:
        above = maker.cursor.at(parts[:-1])
        below.remove(above, parts[-1])
        below.link_file(first, of[-1], above, parts[-1])
    finally:
        os.close(first)


def _sync(changes: Sequence[Change], top: int) -> None:
    """Sync every folder with a changed name, and those with changed modes and times."""
    paths = {_above(_path(change)) for change in changes}
    paths |= {_path(change) for change in changes if change.get("k") == "dir"}
    if len(paths) > SYNCED_ONE_BY_ONE:
        syncing.sync_file_system(top)
        return
    syncing.sync_open_folder(top)
    with below.Cursor(top, below.READ) as cursor:
        for path in sorted(paths - {""}):
            try:
                syncing.sync_open_folder(cursor.at(below.parts_of(path)))
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was refused

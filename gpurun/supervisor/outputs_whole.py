"""Generations of a job's outputs: whole states of the head's copy, beside it, as hard links.

``outputs.whole/NUMBER`` holds one: its files in ``outputs``, and ``about.json``. The highest number is the newest.
While gpurun makes or removes one, its name is ``new``, which nobody reads.

The head's copy replaces files and never changes them. So links to them stay as they are, and take room only once the
copy has newer files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.jobs.usage import measure
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.making import Maker
from gpurun.state import syncing
from gpurun.state.path import StatePath
from gpurun.supervisor.outputs_arriving import NEW as ARRIVED
from gpurun.supervisor.outputs_changes import Change, changes_of, of_versions
from gpurun.supervisor.outputs_known import json_of, versions_of
from gpurun.supervisor.outputs_listed import COPIED
from gpurun.supervisor.outputs_plan import CopyPlan
from gpurun.supervisor.outputs_versions import Versions

NAME, NEW, OUTPUTS, ABOUT = b"outputs.whole", b"new", b"outputs", b"about.json"
MOST_ABOUT_BYTES = 64 << 20


@dataclass(frozen=True)
class About:
    """What is known of a generation.

    Attributes:
        at_s: when gpurun found it whole, by the head's wall clock.
        step: the last step that the program had said it saved; None = it never said.
        logs: names of logs in the head's copy, which are no part of it.
        versions: those that the head's copy held, with its logs.
    """

    at_s: float
    step: int | None = None
    logs: tuple[str, ...] = ()
    versions: Versions = field(default_factory=dict)

    def as_json(self) -> Mapping[str, Any]:
        """Return it as JSON; `_about` reads it."""
        return {**vars(self), "versions": json_of(self.versions)}


def keep(home: int, path: Path, about: About) -> None:
    """Make the head's copy the newest generation, and remove older ones. Durable at the end.

    Args:
        home: a descriptor of the job's folder; `path`: its path.

    Raises:
        OSError: the disk is full or broken, or its file system makes no hard links; the older generation stays.
    """
    with ExitStack() as stack:
        with suppress(FileExistsError):
            os.mkdir(NAME, dir_fd=home)
        folder = _opened(stack, below.open_folder(home, NAME))
        below.remove(folder, NEW)
        os.mkdir(NEW, dir_fd=folder)
        new = _opened(stack, below.open_folder(folder, NEW))
        os.mkdir(OUTPUTS, dir_fd=new)
        live = _opened(stack, below.open_folder(home, OUTPUTS, below.READ))
        _link(live, _opened(stack, below.open_folder(new, OUTPUTS)), without=frozenset(about.logs))
        with os.fdopen(below.create(new, ABOUT), "w", encoding="ascii") as file:
            json.dump(about.as_json(), file)
            os.fchmod(file.fileno(), 0o644)
        syncing.sync_tree(path / os.fsdecode(NAME) / os.fsdecode(NEW))
        before = _numbers(folder)
        os.rename(NEW, b"%d" % (max(before, default=0) + 1), src_dir_fd=folder, dst_dir_fd=folder)
        syncing.sync_open_folder(folder)
        syncing.sync_open_folder(home)
        _remove(folder, before)


def forget(home: int) -> bool:
    """Remove all generations. Idempotent. Returns whether there was one."""
    try:
        folder = below.open_folder(home, NAME)
    except FileNotFoundError:
        return False
    try:
        numbers = _numbers(folder)
        _remove(folder, numbers)
    finally:
        os.close(folder)
    below.remove(home, NAME)
    return bool(numbers)


def newest(home: int) -> tuple[int, About] | None:
    """Return the newest generation: its number, and what is known of it; None if there is none."""
    try:
        folder = below.open_folder(home, NAME)
    except OSError:
        return None
    try:
        number = max(_numbers(folder), default=None)
        return None if number is None else (number, _about(folder, number))
    finally:
        os.close(folder)


def beside(path: StatePath) -> int:
    """Return the bytes on disk that a job's generations take beside the head's copy."""
    used = measure(path / os.fsdecode(NAME))
    return used.total + sum(each.size for each in used.linked.values() if each.names == each.of)


def back(home: int, number: int, about: About, arriving: int, versions: Versions) -> list[Change]:
    """Bring a generation's files to where copies arrive, and return the changes that make the head's copy what it is.

    The copy keeps its logs.

    Args:
        arriving: a descriptor of the folder of arriving files, which has none.
        versions: those of the copy.
    """
    with ExitStack() as stack:
        top = b"%s/%d/%s" % (NAME, number, OUTPUTS)
        tree = home
        for part in top.split(b"/"):
            tree = _opened(stack, below.open_folder(tree, part, below.READ))
        whole = {entry.path: entry for entry in contents.entries(tree, force=True) if entry.kind in COPIED}
        try:
            live = _opened(stack, below.open_folder(home, OUTPUTS, below.READ))
            old = {entry.path: entry for entry in contents.entries(live, force=True) if entry.kind in COPIED}
        except FileNotFoundError:
            old = {}
        plan = _plan(old, whole, about.logs)
        put = [entry.path for entry in plan.fetched[""]]
        os.mkdir(ARRIVED, 0o700, dir_fd=arriving)
        to = stack.enter_context(below.Cursor(_opened(stack, below.open_folder(arriving, ARRIVED)), below.CHANGE))
        source = stack.enter_context(below.Cursor(tree, below.READ))
        for path in put:
            parts = below.parts_of(path)
            for depth in range(1, len(parts)):
                with suppress(FileExistsError):
                    os.mkdir(parts[depth - 1], 0o700, dir_fd=to.at(parts[: depth - 1]))
            below.link_file(source.at(parts[:-1]), parts[-1], to.at(parts[:-1]), parts[-1])
        kept = {*whole, *plan.kept}
        of_logs = {name: versions[name] for name in about.logs if name in versions}
        now = {name: version for name, version in {**about.versions, **of_logs}.items() if name in kept}
        return [*changes_of(old, plan, put), *of_versions(now)]


def _plan(old: Mapping[str, Listed], whole: Mapping[str, Listed], logs: Collection[str]) -> CopyPlan:
    """Return the plan of a copy that holds a generation, and of the present copy its logs."""
    wanted = dict(whole)
    for path in logs:
        if path in old and old[path].kind == "file" and path not in whole:
            above = [path.rsplit("/", depth)[0] for depth in range(1, path.count("/") + 1)]
            if all(wanted.get(folder, old[folder]).kind == "dir" for folder in above):
                wanted |= {folder: wanted.get(folder, old[folder]) for folder in above}
                wanted[path] = old[path]
    files = [entry for entry in wanted.values() if entry.kind == "file"]
    kept = [each.path for each in files if each.path in old and old[each.path].mark[1:] == each.mark[1:]]
    stays = frozenset(kept)
    made = sorted((each for each in wanted.values() if each.kind != "file"), key=lambda each: each.path.split("/"))
    return CopyPlan(made, kept, {"": [each for each in files if each.path not in stays]})


def _link(live: int, tree: int, *, without: frozenset[str]) -> None:
    """Link everything of the head's copy below another folder. Reads no file's status: links have the same one.

    The caller holds the lock of the copy, so a name stays the file that it is.
    """
    with Maker(tree) as maker, below.Cursor(live, below.READ) as cursor:
        for entry in contents.names(live):
            if entry.kind == "dir":
                maker.folder(entry)
            elif entry.kind == "link":
                maker.link(entry)
            elif entry.kind == "file" and entry.path not in without:
                *above, name = entry.path.encode("utf-8", "surrogateescape").split(b"/")
                source, dest = cursor.at(tuple(above)), maker.cursor.at(tuple(above))
                os.link(name, name, src_dir_fd=source, dst_dir_fd=dest, follow_symlinks=False)
        maker.close_folders()


def _numbers(folder: int) -> list[int]:
    return [int(name) for name in below.names_in(folder) if name.isdigit()]


def _remove(folder: int, numbers: Collection[int]) -> None:
    """Remove generations: each gets the name that nobody reads first, so that no crash leaves half of one."""
    for number in numbers:
        below.remove(folder, NEW)
        os.rename(b"%d" % number, NEW, src_dir_fd=folder, dst_dir_fd=folder)
    below.remove(folder, NEW)


def _about(folder: int, number: int) -> About:
    """Read what is known of a generation; of a damaged file, nothing."""
    with ExitStack() as stack:
        try:
            inner = _opened(stack, below.open_folder(folder, b"%d" % number))
            with os.fdopen(below.open_file(inner, ABOUT), encoding="ascii", errors="replace") as file:
                said = json.loads(file.read(MOST_ABOUT_BYTES))
            step = said["step"]
            logs, versions = tuple(map(str, said["logs"])), versions_of(said.get("versions"))
            return About(float(said["at_s"]), None if step is None else int(step), logs, versions)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return About(0.0)


def _opened(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor

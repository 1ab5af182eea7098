"""Keep the last whole copy of a running gang's outputs: look, decide, link."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpurun.errors import StateError
from gpurun.jobs.folder import JobFolder, measure
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import Listed, Maker
from gpurun.quantities import duration
from gpurun.state import durable
from gpurun.state.paths import StatePath
from gpurun.supervisor.outputs.arriving import NEW as ARRIVED
from gpurun.supervisor.outputs.listing import (
    COPIED,
    Given,
    HostOutputs,
    Unbrought,
    Version,
    Versions,
    is_same,
    names_of,
    of_host,
)
from gpurun.supervisor.outputs.plan import Change, CopyPlan, changes_of, of_versions

# Decide when the head's copy of a job's outputs is one whole state of its program: a generation. No I/O, no clock.


REST_S = 5.0
"""So long nothing may change around a copy, unless the program says that it has saved."""
LOG_LOOKS, LOG_S = 5, 120.0
"""A log has changed in each of so many looks, for so long."""
SMALL_BYTES, REWRITTEN_S = 1 << 20, 600.0
"""A smaller file may be a log even if it is written anew each time, such as a summary. A larger one may be a log only
if it has only grown for so long. One that is always replaced by a rename is whole whenever it is copied.
"""

Where = tuple[str, str]
"""A host, and a path in its outputs."""


@dataclass(frozen=True)
class Restless:
    """A file that changed in the last looks.

    Attributes:
        since_s: the first of these looks.
        looks: how many they are.
    """

    since_s: float
    looks: int


@dataclass(frozen=True)
class OutputsSeen:
    """What all looks until now say. A value: `looked` returns the next one.

    Attributes:
        at_s: the time of the last look.
        hosts: what each host listed then.
        rest_s: for each host, the look since which nothing but logs has changed.
        restless: files that changed in the last look.
        rewritten: when large files were last written and had not grown: these are no logs.
        replaced: files that were replaced by others of the same name between the last two looks.
    """

    at_s: float = 0.0
    hosts: Mapping[str, HostOutputs] = field(default_factory=dict)
    rest_s: Mapping[str, float] = field(default_factory=dict)
    restless: Mapping[Where, Restless] = field(default_factory=dict)
    rewritten: Mapping[Where, float] = field(default_factory=dict)
    replaced: Set[Where] = frozenset()

    def looked(self, at_s: float, hosts: Sequence[HostOutputs]) -> OutputsSeen:
        """Return these looks and a new one.

        Args:
            at_s: a time before the hosts made their lists, later than the look before.
            hosts: all hosts of the gang that have outputs.
        """
        there = {each.host: each for each in hosts}
        restless: dict[Where, Restless] = {}
        rewritten = {where: s for where, s in self.rewritten.items() if _is_in(there, where)}
        changed: dict[str, set[str]] = {}
        replaced = set()
        for now in hosts:
            before = self.hosts.get(now.host)
            changed[now.host] = set(_changed(before, now))
            for path in changed[now.host]:
                where = now.host, path
                seen = self.restless.get(where, Restless(at_s, 0))
                restless[where] = Restless(seen.since_s, seen.looks + 1)
                old, new = before.entries.get(path) if before else None, now.entries.get(path)
                if old is None or new is None or not old.kind == new.kind == "file":
                    continue
                if old.mark[1:] != new.mark[1:]:
                    replaced.add(where)
                elif new.size <= old.size and old.size > SMALL_BYTES and new.mtime_ns != old.mtime_ns:
                    rewritten[where] = at_s
        looks = OutputsSeen(at_s, there, {}, restless, rewritten, replaced)
        return replace(looks, rest_s={host: self._rest_s(host, paths, looks) for host, paths in changed.items()})

    def _rest_s(self, host: str, changed: Set[str], now: OutputsSeen) -> float:
        """Return since when a host rests, after the next look `now`."""
        before_s = self.rest_s.get(host)
        if before_s is None or now.hosts.keys() != self.hosts.keys() or not changed <= now.logs_of(host):
            return now.at_s
        if self.logs_of(host) <= changed:
            return before_s
        return max(before_s, self.at_s)  # what was a log has rested since the look before

    @property
    def logs(self) -> frozenset[Where]:
        """Return the files that are logs."""
        return frozenset(
            where
            for where, seen in self.restless.items()
            if seen.looks >= LOG_LOOKS
            and self.at_s - seen.since_s >= LOG_S
            and self.at_s - self.rewritten.get(where, -math.inf) >= REWRITTEN_S
            and _is_in(self.hosts, where)
        )

    def logs_of(self, host: str) -> Set[str]:
        """Return the paths of a host's logs."""
        return {path for whose, path in self.logs if whose == host}

    @property
    def rested_s(self) -> float:
        """Return for how long nothing but logs has changed, as far as the looks show."""
        return min((self.at_s - since_s for since_s in self.rest_s.values()), default=0.0)

    @property
    def is_at_rest(self) -> bool:
        """Return whether every host has rested for long enough, or said that it has saved."""
        return bool(self.hosts) and all(
            self.at_s - since_s >= REST_S or self._is_declared(host) for host, since_s in self.rest_s.items()
        )

    @property
    def has_files(self) -> bool:
        """Return whether a host has more than folders: before a job has saved anything, there is no generation."""
        return any(entry.kind != "dir" for each in self.hosts.values() for entry in each.entries.values())

    def is_whole(self, copied_s: float) -> bool:
        """Return whether a copy is whole.

        Args:
            copied_s: the look whose lists the copy was made from. It brought everything but logs.
        """
        return self.has_files and max(self.rest_s.values(), default=0.0) <= copied_s < self.at_s and self.is_at_rest

    @property
    def is_one_file(self) -> bool:
        """Return whether the outputs, but for logs, are one file that the program has replaced as a whole.

        Such a file is whole whenever it is copied: another inode took its name after its last write, as its times or
        `gpurun_runtime.checkpointed` say.
        """
        logs = self.logs
        files = [
            (host, entry)
            for host, listed in self.hosts.items()
            for path, entry in listed.entries.items()
            if entry.kind != "dir" and (host, path) not in logs
        ]
        if len(files) != 1 or files[0][1].kind != "file":
            return False
        host, entry = files[0]
        is_new = (host, entry.path) in self.replaced
        return is_new and (entry.mtime_ns < _changed_ns(entry) or self._is_declared(host))

    def _is_declared(self, host: str) -> bool:
        """Return whether a host's ranks said that their work is saved, after its last change. By the host's clock.

        Not if another host's have saved a later step: these may be about to write it.
        """
        said = self.hosts[host].declared
        if said is None or said.step != self.step:
            return False
        logs, entries = self.logs_of(host), self.hosts[host].entries
        return all(_changed_ns(entry) <= said.at_ns for path, entry in entries.items() if path not in logs)

    @property
    def step(self) -> int | None:
        """Return the last step that the program said it has saved."""
        said = [each.declared.step for each in self.hosts.values() if each.declared is not None]
        return max(said, default=None)


def is_complete(unbrought: Sequence[Unbrought], logs: frozenset[Where]) -> bool:
    """Return whether a copy has brought everything but logs that can ever come."""
    return all((each.host, each.path) in logs or not (each.may_come or each.no_room) for each in unbrought)


def same_state(one: OutputsSeen, other: OutputsSeen) -> bool:
    """Return whether two looks show the same state but for logs of the later one."""
    if set(one.hosts) != set(other.hosts):
        return False
    logs = other.logs
    return not any(
        (now.host, path) not in logs for now in other.hosts.values() for path in _changed(one.hosts[now.host], now)
    )


def _changed(before: HostOutputs | None, now: HostOutputs) -> Iterator[str]:
    """Yield what is not as it was, with what is gone. A folder's times do not count: what it holds does."""
    old = before.entries if before is not None else {}
    if old is now.entries:
        return
    for path, entry in now.entries.items():
        other = old.get(path)
        if other is not entry and (other is None or not _is_untouched(other, entry)):
            yield path
    yield from (path for path in old if path not in now.entries)


def _is_untouched(one: Listed, other: Listed) -> bool:
    if one.kind != other.kind or one.kind == "dir":
        return one.kind == other.kind
    return (one.marks, one.mode, one.target) == (other.marks, other.mode, other.target)


def _is_in(hosts: Mapping[str, HostOutputs], where: Where) -> bool:
    return where[0] in hosts and where[1] in hosts[where[0]].entries


def _changed_ns(entry: Listed) -> int:
    """Return when an entry changed last. Renames and removals show in the times of folders."""
    return max([entry.mtime_ns, *entry.mark[:1]])


# What the head knows of its copy of a job's outputs, as files of the job's folder that outlive a supervisor.


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
        durable.remove_file(folder / GIVEN)
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


# Generations of a job's outputs: whole states of the head's copy, beside it, as hard links.


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


def keep_generation(home: int, path: Path, about: About) -> None:
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
        below.remove_entry(folder, NEW)
        os.mkdir(NEW, dir_fd=folder)
        new = _opened(stack, below.open_folder(folder, NEW))
        os.mkdir(OUTPUTS, dir_fd=new)
        live = _opened(stack, below.open_folder(home, OUTPUTS, below.READ))
        _link(live, _opened(stack, below.open_folder(new, OUTPUTS)), without=frozenset(about.logs))
        with os.fdopen(below.create_file(new, ABOUT), "w", encoding="ascii") as file:
            json.dump(about.as_json(), file)
            os.fchmod(file.fileno(), 0o644)
        durable.sync_tree(path / os.fsdecode(NAME) / os.fsdecode(NEW))
        before = _numbers(folder)
        os.rename(NEW, b"%d" % (max(before, default=0) + 1), src_dir_fd=folder, dst_dir_fd=folder)
        durable.sync_open_folder(folder)
        durable.sync_open_folder(home)
        _remove(folder, before)


def forget_generations(home: int) -> bool:
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
    below.remove_entry(home, NAME)
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
        below.remove_entry(folder, NEW)
        os.rename(b"%d" % number, NEW, src_dir_fd=folder, dst_dir_fd=folder)
    below.remove_entry(folder, NEW)


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


NEVER_S = 300.0
"""A gang whose outputs have not rested for so long is told."""


class Keeper:
    """Keeps generations of one job's outputs. But for `look`, whoever calls it holds the lock of the outputs.

    Args:
        limit: the largest size of copy and generation together, in bytes; None = as much as the disk can hold.

    Attributes:
        looks: what all looks at the running gang say.
        is_kept: the state of the last look is a generation.
    """

    def __init__(self, folder: JobFolder, limit: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._copied_s = -math.inf
        self._left: Sequence[Unbrought] = ()
        self._kept: OutputsSeen | None = None
        self._rested_s: float | None = None
        self._told: set[str] = set()
        self._notes: list[str] = []
        self.looks = OutputsSeen()
        self.is_kept = False

    def look(self, at_s: float, hosts: Sequence[HostOutputs]) -> bool:
        """Take a look at all hosts of the gang into account; return whether the head's copy is whole and not kept yet.

        Args:
            at_s: as for `OutputsSeen.looked`.
        """
        looks = self.looks = self.looks.looked(at_s, hosts)
        self.is_kept = self._kept is not None and same_state(self._kept, looks) and self._kept.logs == looks.logs
        if self.is_kept or looks.rested_s >= REST_S or self._rested_s is None:
            self._rested_s = at_s if hosts else None
        elif at_s - self._rested_s >= NEVER_S:
            self.say(
                "never",
                f"some output changes at least every {duration(REST_S)}, so the head has no whole copy of the "
                "newest outputs: call gpurun_runtime.checkpointed(step) after each save, or save less often",
            )
        return not self.is_kept and looks.is_whole(self._copied_s) and is_complete(self._left, looks.logs)

    @property
    def next_look_s(self) -> float | None:
        """Return in how many seconds another look may find the copy whole; None if the last look need not be followed.

        A copy that was made at rest needs only a look after it.
        """
        if self.is_kept or not self.looks.has_files:
            return None
        return 0.0 if self._copied_s >= self.looks.at_s and self.looks.is_at_rest else REST_S

    @property
    def has_one_file(self) -> bool:
        """Return whether the copy that was just made is one file that is always whole (`OutputsSeen.is_one_file`)."""
        looks = self.looks
        return self._copied_s == looks.at_s and looks.is_one_file and is_complete(self._left, looks.logs)

    def keep(self, versions: Versions) -> None:
        """Make the head's copy, which is whole, the newest generation. If the disk refuses, say so.

        Args:
            versions: those of the copy.
        """
        names = {host: names_of(host, versions) for host in self.looks.hosts}
        logs = tuple(sorted({names[host].get(path, path) for host, path in self.looks.logs}))
        home = self._folder.path.open_folder()
        try:
            keep_generation(home, self._folder.path.plain, About(time.time(), self.looks.step, logs, versions))
        except OSError as error:
            self.say("kept", f"the head could not keep a whole copy of the outputs: {error.strerror or error}")
            return
        finally:
            os.close(home)
        self._kept, self.is_kept = self.looks, True
        if logs:
            more = f" and {len(logs) - 3} others" if len(logs) > 3 else ""
            self.say(
                "logs",
                f"the job changes {', '.join(map(repr, logs[:3]))}{more} all the time: a restart gets the "
                "newest copy of such a file, and all other outputs from a moment when none of them changed",
            )

    def begin(self) -> None:
        """The head's copy is about to change."""
        self._copied_s = -math.inf

    def copied(self, look_s: float, left: Sequence[Unbrought]) -> None:
        """The head's copy now holds what all hosts had at a look, but for `left`."""
        self._copied_s, self._left = look_s, left

    def make_room(self, left: Sequence[Unbrought]) -> bool:
        """Remove the generation if the newest copy needs its room, or both together exceed the limit.

        Args:
            left: what the newest copy has not brought.

        Returns:
            Whether it was removed.
        """
        home = self._folder.path.open_folder()
        try:
            has_one = newest(home) is not None
            if not has_one or not (any(each.no_room for each in left) or self._is_over_limit()):
                return False
            forget_generations(home)
        finally:
            os.close(home)
        self._kept, self.is_kept = None, False
        self.say(
            "room", "gpurun removed the last whole copy of the outputs, because the newest outputs need its disk space"
        )
        return True

    def _is_over_limit(self) -> bool:
        if self._limit is None:
            return False
        live = measure(self._folder.path / "outputs")
        used = live.total + sum(each.size for each in live.linked.values())
        return used + beside(self._folder.path) > self._limit

    def forget(self) -> None:
        """Remove the generation: the head's copy is whole."""
        self._kept, self.is_kept = None, False
        home = self._folder.path.open_folder()
        try:
            forget_generations(home)
        finally:
            os.close(home)

    def say(self, what: str, text: str) -> None:
        """Note something once."""
        if what not in self._told:
            self._told.add(what)
            self._notes.append(text)

    def notes(self) -> Sequence[str]:
        """Return what to tell people. Each note comes once."""
        notes, self._notes = self._notes, []
        return notes

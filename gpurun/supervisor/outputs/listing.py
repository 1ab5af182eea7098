"""Decide which name in the head's copy the files of each host get. No I/O.

Several hosts may have files of one name. The same content counts once. If it differs, the first host in rank order gets
the name, and what each other host has is kept as ``NAME.HOST``. These are the *versions* of a path: the head remembers
whose they are, so that a restart gives each host its own version under the path's name. A version of a host that has
left the gang stays until the hosts that are there have removed the path.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpurun.errors import HostFailure
from gpurun.msgspec_types import ready
from gpurun.node.agent import frames
from gpurun.node.agent.frames import OpError
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import CHANGING, MOST, Listed, Rows, listed
from gpurun.remote.agent import Agent

# List hosts' outputs of a job, and check the lists.


COPIED = ("file", "dir", "link")
SILENCE_S = 120.0
"""A host that sends nothing for so long hangs."""
LIST_LIMIT_S = 3600.0
"""No list takes longer."""
MOST_LISTED_BYTES = 512 << 20
"""No list of outputs is longer."""
MOST_LISTED = 2_000_000
"""Nor has it more entries: the head needs up to 1 KiB of memory for each."""
LEAST_ROWS = 16
"""Fewer rows cost less than telling the host that they are known."""

_Number = Annotated[int, Meta(ge=-MOST, le=MOST)]
_Size = Annotated[int, Meta(ge=0, le=MOST)]
_Name = Annotated[str, Meta(min_length=1, max_length=255)]
_Row = tuple[_Name, Annotated[int, Meta(ge=0, le=0o777)], _Number, _Size, _Number, _Number, _Number]
_Rows = list[_Row]


@dataclass(frozen=True)
class Unbrought:
    """Something that a host has and the head does not have.

    Attributes:
        is_lost: it has content that is only on the host.
        no_room: it does not fit on the head.
    """

    host: str
    path: str
    why: str
    is_lost: bool = True
    no_room: bool = False

    @property
    def may_come(self) -> bool:
        """Return whether another try may copy it: the copy was interrupted, or the file was being changed."""
        return not self.path or self.why == CHANGING

    @property
    def words(self) -> str:
        """Describe it for people. The name may have any bytes, and the host's error any text."""
        shown = self.path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        text = f"{shown[-100:]!r} {self.why}" if self.path else f"{self.host}: {self.why}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class KnownRows:
    """Rows of a list as a host sent them, and their SHA-256."""

    sha: str
    entries: tuple[Listed, ...]


@dataclass(frozen=True)
class Declared:
    """The last `gpurun_runtime.checkpointed` of a host's ranks, and when it came, by the host's clock."""

    step: int
    at_ns: int


@dataclass(frozen=True)
class HostOutputs:
    """One host's list of its outputs.

    Attributes:
        entries: by path; each folder before its content.
        rows: the parts of its list that need not travel again while they are the same.
        declared: what its ranks said they have saved; None = nothing.
    """

    host: str
    entries: Mapping[str, Listed]
    unbrought: tuple[Unbrought, ...] = ()
    rows: Mapping[Rows, KnownRows] = field(default_factory=dict, compare=False, repr=False)
    declared: Declared | None = field(default=None, compare=False)


def list_outputs(
    agent: Agent, job: str, *, force: bool = False, before: HostOutputs | None = None
) -> HostOutputs | None:
    """Return the list of a host's outputs of a job; None if it has no folder of them.

    Args:
        force: the gang has ended: also look into folders whose modes keep their owner out.
        before: its earlier list.

    Raises:
        HostFailure: it fails, hangs or lies.
    """
    present, deadline, declared = True, time.monotonic() + LIST_LIMIT_S, None
    rows = {} if before is None else before.rows
    asked = (({"in": folder, "at": at, "sha": known.sha}, b"") for (folder, at), known in rows.items())
    stream = agent.stream(
        "outputs.list", payload_in=contents.packed(asked) if rows else None, silence_s=SILENCE_S, job=job, force=force
    )

    def pieces() -> Iterator[bytes]:
        nonlocal present, declared
        size = 0
        for reply in stream:
            if not reply.payload:
                present = isinstance(reply.value, dict) and bool(reply.value.get("present"))
                said = reply.value.get("declared") if isinstance(reply.value, dict) else None
                declared = Declared(*said) if said else None
            size += len(reply.payload)
            if size > MOST_LISTED_BYTES or time.monotonic() > deadline:
                raise HostFailure(
                    "the host's list of outputs is too long, or takes too long to arrive", host=agent.host
                )
            yield reply.payload

    try:
        found = outputs_of(agent.host, contents.unpacked(pieces()), rows)
    except OpError as error:
        raise HostFailure(f"the host's list of outputs is damaged: {error.message}", host=agent.host) from error
    return replace(found, declared=declared) if present else None


def outputs_of(host: str, said: Iterable[frames.Frame], known: Mapping[Rows, KnownRows]) -> HostOutputs:
    """Check a host's list.

    Raises:
        HostFailure: no folder can have this list, so the host lies, or its agent is broken.
    """
    listing = _Listing(host)
    for frame in said:
        if len(listing.entries) + len(listing.unbrought) > MOST_LISTED:
            raise HostFailure(f"the host has more than {MOST_LISTED:,} files and folders of outputs", host=host)
        try:
            if "in" in frame.header:
                listing.add_rows(frame, known)
            else:
                listing.add(listed(dict(frame.header)))
        except OpError as error:
            raise HostFailure(
                f"the host sent a list of outputs that no folder can have: {error.message}", host=host
            ) from error
    return HostOutputs(host, listing.entries, tuple(listing.unbrought), listing.rows)


class _Listing:
    """One host's list while it arrives."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.entries: dict[str, Listed] = {}
        self.unbrought: list[Unbrought] = []
        self.rows: dict[Rows, KnownRows] = {}

    def add(self, entry: Listed) -> None:
        """Add an entry that is not a row."""
        if entry.kind not in COPIED:
            self.unbrought.append(Unbrought(self._host, entry.path, entry.why, is_lost=entry.kind == "unreadable"))
            return
        self._needs_folder(entry.path.rpartition("/")[0], entry.path)
        if entry.path in self.entries:
            raise OpError("refused", f"the list names the path {entry.path!r:.200} twice")
        self.entries[entry.path] = entry

    def add_rows(self, frame: frames.Frame, known: Mapping[Rows, KnownRows]) -> None:
        """Add files of one folder."""
        folder, at = frame.header["in"], frame.header.get("at")
        if not isinstance(folder, str) or type(at) is not int:
            raise OpError("refused", f"the list has invalid rows for the folder {folder!r:.200}")
        self._needs_folder(folder, folder)
        if "same" in frame.header:
            if (folder, at) not in known:
                raise OpError(
                    "refused", f"the list refers to earlier rows of {folder!r:.200}, but the head has no such rows"
                )
            rows = known[folder, at]
        else:
            rows = KnownRows(hashlib.sha256(frame.payload).hexdigest(), tuple(_files(folder, frame.payload)))
        count = len(self.entries)
        self.entries.update((entry.path, entry) for entry in rows.entries)
        if len(self.entries) != count + len(rows.entries):
            raise OpError("refused", f"the list has a name in {folder!r:.200} twice")
        if len(rows.entries) >= LEAST_ROWS:
            self.rows[folder, at] = rows

    def _needs_folder(self, folder: str, path: str) -> None:
        if folder and (folder not in self.entries or self.entries[folder].kind != "dir"):
            raise OpError("refused", f"the list names {path!r:.200} without its folder")


def _files(folder: str, payload: bytes) -> Iterator[Listed]:
    """Yield the files in rows.

    Raises:
        OpError: ``refused``: no folder can have such files.
    """
    above = f"{folder}/" if folder else ""
    is_near = len(above) < below.LONGEST // 8
    for name, mode, mtime_ns, size, ctime_ns, inode, stored in _rows(payload):
        path = above + name
        if not (is_near and name.isascii()) or "/" in name or "\0" in name or name in (".", ".."):
            below.parts_of(path)
            if "/" in name:
                raise OpError("refused", f"{name!r:.200} is not a file name")
        yield Listed(path, "file", mode, mtime_ns, size, (ctime_ns, inode), stored=stored)


def _rows(payload: bytes) -> _Rows:
    try:
        return msgspec.json.decode(payload, type=ready(_Rows))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # names that are not UTF-8, or no rows
    try:
        said: Any = json.loads(payload)
        return msgspec.convert(said, ready(_Rows))
    except (ValueError, RecursionError) as error:
        raise OpError("refused", f"the rows are malformed: {error}"[:300]) from None


LONGEST_NAME = 255
"""No file system of hosts takes a longer name, in bytes."""
LONGEST_HOST = 64
"""So much of a host's name, in bytes, is part of a long name."""

PAST = "\0"
"""Ends the host of a version of the past: no host has such a name, so nobody gets it back, and it stays.

Otherwise a host that comes back would begin with an older checkpoint than the others.
"""

Origin = tuple[str, list[int]]
"""Which host a file of the head's copy came from, and how it was there: `Listed.marks`."""
Given = Mapping[str, Mapping[str, Listed]]
"""What hosts got back of the head's copy when the attempt began: by host and by name in the head's copy. Its mark is
the last change of any of it there, by the host's clock."""
Sums = Mapping[tuple[str, str], tuple[list[int], str]]
"""Marks and SHA-256 of files, by host and path."""
Entries = Mapping[str, Listed]


@dataclass(frozen=True)
class Version:
    """What one host has at a path at which other hosts have other content.

    Attributes:
        host: its name; with `PAST` behind it if others have written the path since, in an attempt without this host.
    """

    host: str
    path: str


Versions = Mapping[str, Version]
"""Versions by name in the head's copy. The first host's name is the path itself."""


@dataclass(frozen=True)
class Shares:
    """What each host gives to the head's copy.

    Attributes:
        hosts: what each host gives, by name in the copy.
        versions: of all paths of which the copy holds several versions.
        moved: versions of hosts that are not there, whose name another now needs: new names, and the present ones.
        stay: versions of hosts that are not there, which stay.
        ended: versions of the present copy that do not stay as they are.
        doubtful: files of equal size whose content must be compared, by host.
    """

    hosts: Mapping[str, Entries]
    versions: Versions = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    stay: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    doubtful: Mapping[str, Sequence[str]] = field(default_factory=dict)


def share(
    old: Entries,
    hosts: Sequence[HostOutputs],
    origins: Mapping[str, Origin],
    *,
    versions: Versions = MappingProxyType({}),
    given: Given = MappingProxyType({}),
    sums: Sums = MappingProxyType({}),
    late: bool = False,
    is_elastic: bool = False,
) -> Shares:
    """Decide what each host gives to the head's copy, and under which names.

    Args:
        old: what the present copy holds.
        hosts: in rank order.
        origins: the hosts of files in the present copy, as far as known.
        versions: those of the present copy.
        given: what a host was given and has not touched is not its own content.
        sums: contents that were compared.
        late: see `plan_copy`: what is older than the present copy's is a version.
        is_elastic: ranks move between hosts. The newest file gets the name, and every host gets that one back.
    """
    said = {each.host: each.entries for each in hosts}
    sharing = _Sharing(old, said, origins, versions, given, sums, is_elastic=is_elastic)
    for path in sharing.paths(late=late):
        if late:
            sharing.decide_late(path)
        else:
            sharing.decide(path)
    return sharing.shares()


def is_as_given(given: Listed | None, now: Listed | None) -> bool:
    """Return whether a host has not touched an entry since it received it."""
    if given is None or now is None or given.kind != now.kind:
        return False
    if now.kind != "file":
        return now.target == given.target
    return (now.size, now.mtime_ns) == (given.size, given.mtime_ns) and now.mark[:1] <= given.mark[:1]


def is_same(one: Listed, other: Listed) -> bool:
    """Return whether two entries are the same file, by size and time."""
    if one.kind != other.kind or one.kind == "dir":
        return one.kind == other.kind
    if one.kind == "link":
        return one.target == other.target
    return (one.size, one.mtime_ns) == (other.size, other.mtime_ns)


def of_host(
    mine: Entries, versions: Versions, host: str, *, is_elastic: bool = False
) -> tuple[Entries, Mapping[str, str]]:
    """Return what a host gets of the head's copy: the files at its paths, and the names of its own versions by path."""
    own = {} if is_elastic else names_of(host, versions)
    names = {path: name for path, name in own.items() if name in mine}
    given = {name: entry for name, entry in mine.items() if name not in versions or name == versions[name].path}
    given |= {path: mine[name]._replace(path=path) for path, name in names.items()}
    return given, names


def names_of(host: str, versions: Versions) -> Mapping[str, str]:
    """Return the names of a host's versions, by path."""
    return {version.path: name for name, version in versions.items() if version.host == host}


def candidates(path: str, host: str) -> Iterator[str]:
    """Yield names for a host's version of a path, best first. None is longer than a file system takes."""
    folder, slash, name = path.rpartition("/")
    host = host.rstrip(PAST)
    for number in range(1, 1 << 30):
        ending = f".{host}" if number == 1 else f".{host}.{number}"
        if len(name.encode("utf-8", "surrogateescape")) + len(ending.encode()) > LONGEST_NAME:
            short = host.encode()[:LONGEST_HOST].decode("utf-8", "ignore")
            ending = f".{short}" if number == 1 else f".{short}.{number}"
        kept = name.encode("utf-8", "surrogateescape")[: LONGEST_NAME - len(ending.encode())]
        yield f"{folder}{slash}{_whole_letters(kept, name)}{ending}"


def _whole_letters(kept: bytes, name: str) -> str:
    """Return the beginning of a name without half of a letter at its end."""
    text = kept.decode("utf-8", "surrogateescape")
    while not name.startswith(text):
        text = text[:-1]
    return text


class _Sharing:
    """Decides path by path."""

    def __init__(
        self,
        old: Entries,
        said: Mapping[str, Entries],
        origins: Mapping[str, Origin],
        versions: Versions,
        given: Given,
        sums: Sums,
        *,
        is_elastic: bool,
    ) -> None:
        self._old = old
        self._said = said
        self._origins = origins
        self._before = {name: version for name, version in versions.items() if name in old}
        self._given = given
        self._sums = sums
        self._is_elastic = is_elastic
        self._hosts: dict[str, Entries] = dict(said)
        self._changed: dict[str, dict[str, Listed]] = {}
        self._versions: dict[str, Version] = {}
        self._moved: dict[str, str] = {}
        self._stay: set[str] = set()
        self._doubtful: dict[str, list[str]] = {}
        self._written: set[str] = set()
        self._taken: dict[str, Version] = {}
        self._known: dict[str, dict[str, str]] = {}
        for name, version in self._before.items():
            self._known.setdefault(version.path, {})[version.host] = name

    def paths(self, *, late: bool) -> Collection[str]:
        """Return the paths to decide: those that several hosts have, or that have versions."""
        found = dict.fromkeys(self._known)
        once: set[str] = set(self._old) if late else set()
        for entries in self._said.values() if late or len(self._said) > 1 else ():
            for path, entry in entries.items():
                if entry.kind == "dir":
                    continue
                if path in once:
                    found[path] = None
                else:
                    once.add(path)
        return found

    def decide(self, path: str) -> None:
        """Decide for the hosts of a running gang, or of one that has ended."""
        there = {host: entries[path] for host, entries in self._said.items() if path in entries}
        known = self._known.get(path, {})
        counting = [host for host, entry in there.items() if self._counts(host, entry, known)]
        absent = {
            host: name
            for host, name in known.items()
            if host not in counting and (host in there or not self._removed(host, name))
        }
        if any(entry.kind == "dir" for entry in there.values()):
            self._keep_absent(path, absent, is_free=False)
            return
        if not counting:
            if known and not any(
                self._removed(host, known.get(host, path)) for host in self._said if host not in there
            ):
                self._stay.add(path)
                self._keep_absent(path, absent)
            return
        if not all(self._is_untouched(host, there[host], known.get(host, "")) for host in counting):
            self._written.add(path)
        for host in [host for host in there if host not in counting]:
            self._rename(host, path, None)
        if self._is_elastic:
            counting.sort(key=lambda host: -there[host].mtime_ns)
        first = counting[0]
        names = {first: path}
        for host in counting[1:]:
            if self._is_equal(first, host, path):
                self._rename(host, path, None)
            else:
                names[host] = self._name(path, host, known)
                self._rename(host, path, names[host])
        self._keep_absent(path, absent, names, is_free=False)

    def decide_late(self, path: str) -> None:
        """Decide for a host that was lost for a while: what others have written since keeps the name."""
        known = self._known.get(path, {})
        names: dict[str, str] = {}
        for host, entries in self._said.items():
            entry, name = entries.get(path), known.get(host, path)
            mine = self._old.get(name)
            if entry is None or entry.kind == "dir" or mine is None or mine.kind == "dir":
                continue
            if is_same(mine, entry) or self._is_untouched(host, entry, name):
                self._rename(host, path, None)
            elif (host not in known and (known or entry.mtime_ns < mine.mtime_ns)) or name != path:
                names[host] = self._name(path, host, known)
                self._rename(host, path, names[host])
        self._keep_absent(path, {host: name for host, name in known.items() if host not in names}, names)

    def _keep_absent(
        self,
        path: str,
        absent: Mapping[str, str],
        present: Mapping[str, str] = MappingProxyType({}),
        *,
        is_free: bool = True,
    ) -> None:
        """Keep versions of hosts that are not there; record all versions if there are several.

        Args:
            present: names of the versions of hosts that are there.
            is_free: the path's own name stays with the host that has it.
        """
        names = dict(present)
        for host, name in absent.items():
            if is_free if name == path else not self._is_taken(name, host, path):
                names[host] = name
                self._stay.add(name)
            else:
                names[host] = self._name(path, host, {})
                self._moved[names[host]] = name
        if any(name != path for name in names.values()):
            self._versions |= {name: Version(host, path) for host, name in names.items()}

    def _removed(self, host: str, name: str) -> bool:
        """Return whether a host that is there had an entry in this attempt and no longer has it."""
        return host in self._said and (
            self._origins.get(name, ("",))[0] == host or name in self._given.get(host, MappingProxyType({}))
        )

    def _counts(self, host: str, entry: Listed, known: Mapping[str, str]) -> bool:
        """Return whether what a host has is its own: it has changed it, or got its own version."""
        return (host in known and not self._is_elastic) or not self._is_untouched(host, entry)

    def _is_untouched(self, host: str, entry: Listed, name: str = "") -> bool:
        return is_as_given(self._given.get(host, MappingProxyType({})).get(name or entry.path), entry)

    def _is_equal(self, first: str, host: str, path: str) -> bool:
        """Return whether two hosts have the same content at a path; ask for sums if sizes do not tell.

        Times tell nothing: a program may have set them, or unpacked an archive.
        """
        one, other = self._said[first][path], self._said[host][path]
        if not one.kind == other.kind == "file" or one.size != other.size:
            return one.kind == other.kind == "link" and one.target == other.target
        if one.size == 0:
            return True
        sums = []
        for whose, entry in ((first, one), (host, other)):
            marks, sha = self._sums.get((whose, path), ([], ""))
            if marks == entry.marks:
                sums.append(sha)
            elif path not in self._doubtful.setdefault(whose, []):
                self._doubtful[whose].append(path)
        return len(sums) == 2 and sums[0] == sums[1]

    def _name(self, path: str, host: str, known: Mapping[str, str]) -> str:
        """Return a free name for a host's version: the present one if it can."""
        name = known.get(host, path)
        if name == path or self._is_taken(name, host, path):
            name = next(name for name in candidates(path, host) if not self._is_taken(name, host, path))
        self._taken[name] = Version(host, path)
        return name

    def _is_taken(self, name: str, host: str, path: str) -> bool:
        """Return whether a name in the copy belongs to something else than a host's version of a path."""
        is_there = name in self._taken or name in self._old
        if is_there and self._taken.get(name, self._before.get(name)) != Version(host, path):
            return True
        return any(name in entries for entries in self._said.values())

    def _rename(self, host: str, path: str, name: str | None) -> None:
        """Give a host's entry another name in the copy; None: the copy does not need it."""
        if host not in self._changed:
            self._hosts[host] = self._changed[host] = dict(self._said[host])
        entry = self._changed[host].pop(path)
        if name is not None:
            self._changed[host][name] = entry._replace(path=name)

    def _with_past(self) -> Versions:
        """Return the versions; those of hosts outside this attempt, at paths that it has written, are of the past."""
        if self._is_elastic or not self._given:
            return self._versions
        known = set(self._versions.values())
        made = dict(self._versions)
        for name, version in self._versions.items():
            if version.path in self._written and version.host not in {*self._said, *self._given}:
                past = Version(version.host.rstrip(PAST) + PAST, version.path)
                while past in known - {version}:
                    past = Version(past.host + PAST, past.path)
                known.add(past)
                made[name] = past
        return made

    def shares(self) -> Shares:
        """Return the decisions."""
        ended = self._before.keys() - self._stay
        return Shares(
            self._hosts, self._with_past(), self._moved, frozenset(self._stay), frozenset(ended), self._doubtful
        )

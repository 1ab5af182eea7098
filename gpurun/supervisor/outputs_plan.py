"""What the head's copy of a job's outputs is to hold, decided from what the hosts say they have. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpurun.errors import HostFailure
from gpurun.jobs.record import OutputsLeft
from gpurun.node.call import OpError
from gpurun.node.contents import Listed, listed
from gpurun.node.making import CHANGING

FIRST = 5
"""So many of the files that could not be brought are named."""
COPIED = ("file", "dir", "link")

Origin = tuple[str, list[int]]
"""Which host a file of the head's copy came from, and how it was there: `Listed.marks`."""


@dataclass(frozen=True)
class Unbrought:
    """Something that a host has and the head has not.

    Attributes:
        is_lost: it has a content, which is on the host alone.
    """

    host: str
    path: str
    why: str
    is_lost: bool = True

    @property
    def may_come(self) -> bool:
        """Whether another try may bring it: the copy broke off, or the file was being changed."""
        return not self.path or self.why == CHANGING

    @property
    def words(self) -> str:
        """For people. The name may have any bytes, and the host may say anything."""
        shown = self.path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        text = f"{shown[-100:]!r} {self.why}" if self.path else f"{self.host}: {self.why}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class HostOutputs:
    """What one host says its copy holds.

    Attributes:
        entries: by path; each folder before what is in it.
    """

    host: str
    entries: Mapping[str, Listed]
    unbrought: tuple[Unbrought, ...] = ()

    @property
    def newest_ns(self) -> int:
        """When the last of its entries was written, by the host's clock; 0 if there are none."""
        return max((entry.mtime_ns for entry in self.entries.values()), default=0)


def outputs_of(host: str, headers: Iterable[Mapping[str, Any]]) -> HostOutputs:
    """Check what a host says.

    Raises:
        HostFailure: there can be no such folder, so the host lies, or its agent is broken.
    """
    entries: dict[str, Listed] = {}
    unbrought = []
    for header in headers:
        try:
            entry = listed(dict(header))
        except OpError as error:
            raise HostFailure(f"its list of outputs is impossible: {error.message}", host=host) from error
        if entry.kind not in COPIED:
            unbrought.append(Unbrought(host, entry.path, entry.why, is_lost=entry.kind == "unreadable"))
            continue
        folder = entry.path.rpartition("/")[0]
        if entry.path in entries or (folder and (folder not in entries or entries[folder].kind != "dir")):
            raise HostFailure(f"its list of outputs is impossible: {entry.path!r:.200} cannot be there", host=host)
        entries[entry.path] = entry
    return HostOutputs(host, entries, tuple(unbrought))


@dataclass(frozen=True)
class CopyPlan:
    """How the next copy is made.

    Attributes:
        made: folders and links, each folder before what is in it.
        kept: files that stay as they are in the present copy.
        fetched: files that each host is asked for.
        twins: files that are hard links of a fetched file, and of which one.
    """

    made: Sequence[Listed]
    kept: Sequence[str]
    fetched: Mapping[str, Sequence[Listed]] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)


def plan_copy(
    old: Mapping[str, Listed], hosts: Sequence[HostOutputs], origins: Mapping[str, Origin], *, onto: bool
) -> CopyPlan:
    """Decide how the head's copy becomes what the hosts have.

    Args:
        old: what the present copy holds.
        hosts: of entries with the same path, the last host's is taken.
        origins: where files of the present copy came from, as far as that is known.
        onto: keep what the present copy has besides, unless it came from one of these hosts.
    """
    said = {each.host for each in hosts}
    wanted: dict[str, tuple[str, Listed]] = {}
    if onto:
        wanted = {path: ("", entry) for path, entry in old.items() if origins.get(path, ("",))[0] not in said}
    for each in hosts:
        wanted.update((path, (each.host, entry)) for path, entry in each.entries.items())
    made: list[Listed] = []
    kept: list[str] = []
    fetched: dict[str, list[Listed]] = {}
    twins: dict[str, str] = {}
    first_of: dict[tuple[str, tuple[int, ...]], str] = {}
    folders = {""}
    for path in sorted(wanted, key=lambda path: path.split("/")):
        host, entry = wanted[path]
        if path.rpartition("/")[0] not in folders:
            continue  # a later host has something else in the place of its folder
        if entry.kind != "file":
            made.append(entry)
            folders.update([path] if entry.kind == "dir" else [])
        elif is_kept(old, origins, host, entry):
            kept.append(path)
        elif (first := first_of.setdefault((host, entry.mark), path)) != path:
            twins[path] = first
        else:
            fetched.setdefault(host, []).append(entry)
    return CopyPlan(made, kept, fetched, twins)


def is_kept(old: Mapping[str, Listed], origins: Mapping[str, Origin], host: str, entry: Listed) -> bool:
    """Whether the present copy already has this file of a host."""
    if entry.path not in old or old[entry.path].kind != "file":
        return False
    return not host or origins.get(entry.path) == (host, entry.marks)


def lacking(mine: Mapping[str, Listed], theirs: Mapping[str, Listed]) -> list[Listed]:
    """What of the head's copy a host is sent: what it lacks, or has an older version of. Folders come first."""
    sent = []
    passed: set[str] = set()
    for path, entry in mine.items():
        other = theirs.get(path)
        if path.rpartition("/")[0] in passed:
            passed.add(path)
        elif other is None or (not _is_same(entry, other) and other.mtime_ns <= entry.mtime_ns):
            sent.append(entry)
        elif other.kind != entry.kind:
            passed.add(path)  # what the host has there is newer
    return sent


def _is_same(one: Listed, other: Listed) -> bool:
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

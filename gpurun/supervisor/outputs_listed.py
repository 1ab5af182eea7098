"""List hosts' outputs of a job, and check the lists."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpurun.errors import HostFailure
from gpurun.msgspec_types import ready
from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.folder import batches, below
from gpurun.node.folder.contents import CHANGING, MOST, Listed, listed
from gpurun.node.folder.listings import Rows
from gpurun.remote.agent import Agent

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
        "outputs.list", payload_in=batches.packed(asked) if rows else None, silence_s=SILENCE_S, job=job, force=force
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
        found = outputs_of(agent.host, batches.unpacked(pieces()), rows)
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

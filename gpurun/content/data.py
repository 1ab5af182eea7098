"""Data sets: pinned by their digest at submit, copied to hosts once for each content, shared by jobs."""

from __future__ import annotations

import os
import posixpath
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpurun.content.export import default_folder
from gpurun.content.store import Stored
from gpurun.content.tree import DigestMemory, FolderTree, changed, digest_unchanged, scan, unreadable
from gpurun.content.workdir import Code
from gpurun.errors import BadInput, GpurunError, HostFailure
from gpurun.jobs.spec import DataSource
from gpurun.jobs.store import JobStore
from gpurun.node.agent.frames import OpError
from gpurun.node.folder import below
from gpurun.node.folder.below import ContentDigest, Entry, Found, blocks, digest_of, walk
from gpurun.node.transfer import sets
from gpurun.node.transfer.spool import Blob, ChunkHashes, FilesBlob, ManyFiles, stored_of
from gpurun.remote import Fleet
from gpurun.remote.agent import bad_answer
from gpurun.state import caches

# A folder of the head as a data set: its content, and how gpurun sends it without a copy.


FOLDER_MODE, FILE_MODE, PROGRAM_MODE = 0o555, 0o444, 0o555
CHANGED = "the data changed after gpurun read it"
HINT = "try again when no program writes to the data"


class DataFolder(FolderTree):
    """A folder as a data set, as it was when gpurun read it."""

    @property
    def changed(self) -> GpurunError:
        """Return the error if the folder has changed."""
        return BadInput(CHANGED, where=str(self.top), hint=HINT)

    @classmethod
    def of_workdir(cls, top: Path) -> DataFolder:
        """Return a workdir as it is now, without what git ignores.

        Raises:
            BadInput, HostNotReady: as `scan`.
        """
        found = scan(top)
        return cls(found.top, found.entries, found.memory)

    def blob(self, name: str, hashes: bytes) -> FilesBlob:
        """Return all contents one after the other, for sending. Receivers refuse content that has changed since."""
        top = below.open_top(str(self.top))
        files = [(entry.path, entry.size) for entry in self.entries if entry.kind == "file"]
        return _SourceBlob(name, hashes, ManyFiles(top, files), os.dup(top), complete=True)

    def chunk_hashes(self) -> bytes:
        """Return the SHA-256 of each chunk of `blob`, one after the other.

        Raises:
            BadInput: a file has changed, or cannot be read.
        """
        chunks, top = ChunkHashes(), below.open_top(str(self.top))
        try:
            with below.Cursor(top) as cursor:
                for entry in self.entries:
                    if entry.kind == "file":
                        self._add(cursor, entry, chunks)
        finally:
            os.close(top)
        return chunks.hashes()

    def _add(self, cursor: below.Cursor, entry: Entry, chunks: ChunkHashes) -> None:
        """Add a file's bytes."""
        parts, whole = below.parts_of(entry.path), ContentDigest(like=entry.digest)
        try:
            descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1])
            try:
                for zeros, piece in blocks(descriptor, status.st_size):
                    whole.add(zeros, piece)
                    chunks.skip(zeros)
                    chunks.add(piece)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unreadable(OSError(error.errno, error.strerror), self.top / entry.path) from None
        if (str(whole), whole.size) != (entry.digest, entry.size):
            self.memory.forget()  # or it remembers wrongly
            raise changed(self.top / entry.path, HINT)


class _SourceBlob(FilesBlob):
    """A missing or shortened file reads as zeros, so its chunks do not match the announced hashes."""

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:
        try:
            count = super()._read_at(descriptor, view, position)
        except OSError:
            count = 0
        if count == 0:
            view[:] = bytes(len(view))
        return count or len(view)


def read_folder(top: Path) -> DataFolder:
    """Read a folder as a data set. The user's cache keeps digests of files that have not changed.

    Raises:
        BadInput: the path is not a folder; or the folder holds a socket, FIFO or device, a link that leads out of it,
            something unreadable, or more entries than hosts take.
        HostNotReady: its file system does not answer.
    """
    try:
        resolved = top.resolve()
        memory = DigestMemory(resolved, "data")
        descriptor = below.open_top(str(resolved))
        try:
            entries = [_entry(resolved, found, memory) for found in walk(descriptor)]
        finally:
            os.close(descriptor)
        memory.keep()
    except OSError as error:
        raise unreadable(error, top, "gpurun cannot read the data") from None
    if len(entries) > sets.MOST_ENTRIES:
        raise BadInput(
            f"the folder holds {len(entries):,} files, folders and links; "
            f"a data set can hold at most {sets.MOST_ENTRIES:,}",
            where=str(top), hint="pack the files into archives, or mount a folder of each host with host:/path",
        )  # fmt: skip
    return DataFolder(resolved, entries, memory)


def _entry(top: Path, found: Found, memory: DigestMemory) -> Entry:
    path, status = below.text_of_path(found.parts), found.status
    if status is None:
        raise BadInput(f"gpurun cannot read the data: {found.why}", where=f"{top}/{path}")
    kind = below.kind_of(status.st_mode)
    if kind == "dir":
        return Entry(path, kind, FOLDER_MODE, status.st_mtime_ns)
    if kind == "link":
        target = os.fsdecode(os.readlink(found.parts[-1], dir_fd=found.above))
        if _leads_out(path, target):
            raise BadInput(
                f"the link points to {target}, which is outside the data set, so gpurun would not copy "
                f"{target} to hosts",
                where=f"{top}/{path}",
                hint="replace the link by a copy of the target, or make the target a second data set",
            )  # fmt: skip
        return Entry(path, kind, 0, target=target)
    if kind != "file":
        raise BadInput(
            f"the path is a {kind}; a data set can hold only files, folders and links", where=f"{top}/{path}"
        )
    mode = PROGRAM_MODE if status.st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH) else FILE_MODE
    digest = memory.digest(path, status, partial(_digest, top, found, status))
    return Entry(path, kind, mode, status.st_mtime_ns, status.st_size, digest)


def _leads_out(path: str, target: str) -> bool:
    """Return whether a link's target is outside the folder, judged by names alone."""
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return target.startswith("/") or meant == ".." or meant.startswith("../")


def _digest(top: Path, found: Found, status: os.stat_result) -> str:
    descriptor = below.open_file(found.above, found.parts[-1])
    try:
        digest = digest_unchanged(descriptor, status)
    finally:
        os.close(descriptor)
    if digest is None:
        raise changed(top / below.text_of_path(found.parts), HINT)
    return digest


def hashes_of(tree: DataFolder) -> bytes:
    """Return the SHA-256 of each chunk of a set's blob, one after the other. Reads the files once for each content.

    Raises:
        BadInput: a file has changed.
    """
    known = known_hashes(tree.digest)
    if known is None:
        known = tree.chunk_hashes()
        if (kept := caches.cache_room(os.environ, "data")) is not None:
            caches.keep_cache(caches.cache_file(kept, tree.digest), known)
    return known


def known_hashes(digest: str) -> bytes | None:
    """Return the cached result of `hashes_of` for a set of this digest, if there is one."""
    kept = caches.cache_room(os.environ, "data")
    return None if kept is None else caches.read_cache(caches.cache_file(kept, digest))


# A data set that gpurun can send: from a folder on the head, or from a host that has the set.


SILENCE_S, DESCRIBE_LIMIT_S = 60.0, 3600.0


@dataclass(frozen=True)
class DataContent:
    """A data set, and the machines that have it.

    Attributes:
        entries: the packed list of what the set holds.
        hashes: the hashes of the chunks of the set's blob.
        made: makes the blob that the head sends.
        fleet: reaches the holders, and all hosts that lack the set.
        holders: hosts that have the set, the preferred host first.
        changed: the error if the head has other content than announced; None = only hosts have the set.
    """

    digest: str
    size: int
    entries: bytes
    hashes: bytes
    made: Callable[[], Blob]
    fleet: Fleet
    holders: Sequence[str]
    changed: GpurunError | None = None

    @property
    def stored(self) -> int:
        """Return how many bytes a host receives and stores: all but whole chunks of zeros."""
        return stored_of(self.hashes, self.size)

    @property
    def is_on_head(self) -> bool:
        """Return whether the head has read the set itself. Then the hashes are right."""
        return self.changed is not None

    @property
    def announced(self) -> Stored:
        """Return the set's blob, for `Relay.announce`. Hosts know the hashes already."""
        return _AnnouncedData(self.digest, self.size, b"", default_folder(), self.made)


@dataclass(frozen=True)
class _AnnouncedData(Stored):
    made: Callable[[], Blob]

    def open(self) -> Blob:
        """Open the blob for sending."""
        return self.made()


class _AbsentBlob(Blob):
    """A blob that the head does not have. No chunk that it returns matches an announced hash."""

    def __init__(self, digest: str, size: int, hashes: bytes) -> None:
        super().__init__(digest, size, hashes, -1, complete=True)

    def _read_at(self, descriptor: int, view: memoryview, position: int) -> int:  # noqa: ARG002
        view[:] = bytes(len(view))
        return len(view)


def content_of_folder(tree: DataFolder, fleet: Fleet, holders: Sequence[str]) -> DataContent:
    """Return a set that is on the head.

    Raises:
        BadInput: the folder has changed.
    """
    entries, hashes = sets.packed(tree.entries), hashes_of(tree)
    return DataContent(
        tree.digest, tree.size, entries, hashes, lambda: tree.blob(tree.digest, hashes), fleet, holders, tree.changed
    )


def content_of_code(code: Code | DataFolder, fleet: Fleet, holders: Sequence[str]) -> DataContent:
    """Return the code of a job. Its name has its times, too.

    Raises:
        BadInput, StateError: it has changed, or is damaged.
    """
    digest, hashes = code.timed_digest, code.chunk_hashes()
    return DataContent(
        digest, code.size, sets.packed(code.entries), hashes, lambda: code.blob(digest, hashes), fleet, holders,
        code.changed,
    )  # fmt: skip


def content_of_host(fleet: Fleet, holder: str, digest: str, check: Callable[[], object] = lambda: None) -> DataContent:
    """Return a set that only hosts have, as `holder` describes it. The described content must have the set's digest.

    Args:
        check: called repeatedly; raises to stop.

    Raises:
        RemoteOpFailed: the host describes another set, or none.
        HostFailure: it does not describe the set in time.
    """
    entries = _described(fleet, holder, digest, sets.ENTRIES, check)
    hashes = _described(fleet, holder, digest, sets.HASHES, check)
    try:
        listed = sets.unpacked(entries)
        size = sum(entry.size for entry in listed)
        blob = _AbsentBlob(digest, size, hashes)
    except OpError as error:
        raise bad_answer(holder, f"data.manifest: {error.message}") from None
    if digest_of(listed) != digest:
        raise bad_answer(holder, "the host's answer to data.manifest describes another data set")
    return DataContent(digest, size, entries, hashes, lambda: blob, fleet, [holder])


def _described(fleet: Fleet, holder: str, digest: str, part: str, check: Callable[[], object]) -> bytes:
    found, deadline = bytearray(), time.monotonic() + DESCRIBE_LIMIT_S
    with fleet.agents[holder].stream("data.manifest", digest=digest, part=part, silence_s=SILENCE_S) as pieces:
        for piece in pieces:
            check()
            found += piece.payload
            if len(found) > sets.MOST_DESCRIBED_BYTES:
                raise bad_answer(
                    holder,
                    f"the host's answer to data.manifest has more than {sets.MOST_DESCRIBED_BYTES} bytes of {part}",
                )
            if time.monotonic() > deadline:
                raise HostFailure(
                    f"the host did not list the files of a data set within {DESCRIBE_LIMIT_S:g} s", host=holder
                )
    return bytes(found)


# Pin data sets at submit: record the digest of each, and find on the head the content with this digest later.


@dataclass(frozen=True)
class Pins:
    """Data sets that jobs of a state directory pin by their digest."""

    home: Path

    def pin(self, sources: Iterable[DataSource]) -> dict[DataSource, DataSource]:
        """Return each source, and the same source with the digest of its current content.

        Computes and caches here everything that later steps need of the contents, so that no GPU waits for it.

        Raises:
            BadInput: a source is missing, cannot be read, or changes while gpurun reads it.
        """
        return {source: self._pinned(source) for source in dict.fromkeys(sources)}

    def _pinned(self, source: DataSource) -> DataSource:
        if source.kind == "host":
            return source
        tree = read_folder(self.folder_of(source))
        hashes_of(tree)
        path = source.path
        if source.kind == "job":
            job, _, below = path.partition(":")
            path = f"{JobStore(self.home).find(job).id}:{below}"
        caches.note_sites(tree.digest, source=path)
        return replace(source, path=path, digest=tree.digest, size_bytes=tree.size)

    def folder_of(self, source: DataSource) -> Path:
        """Return the folder of the head that a source names.

        Raises:
            BadInput: it names a job that has not ended, or a path that is not in the job's outputs.
        """
        if source.kind != "job":
            return Path(source.path)
        job, _, below = source.path.partition(":")
        folder = JobStore(self.home).find(job)
        if not folder.record().state.ended:
            raise BadInput(
                "the job has not ended, so its outputs can still change",
                job=folder.id,
                hint=f"wait for the job with: gpurun wait {folder.id}",
            )
        top = folder.outputs.parent.resolve() / folder.outputs.name  # not followed if it is a link
        meant = (top / below.removeprefix("outputs").strip("/")).resolve()
        if not meant.is_relative_to(top):  # by a link that the job's program or owner has made
            raise BadInput("the path leads to a place outside the job's outputs", where=source.path)
        if not meant.is_dir():
            raise BadInput(
                "the job's outputs on the head have no folder with this path",
                where=source.path,
                hint=f"copy the outputs to the head with: gpurun outputs {folder.id}",
            )
        return meant

    def as_pinned(self, source: DataSource) -> DataFolder | None:
        """Return the folder of the head if its content is still the one pinned at submit; else None."""
        try:
            tree = read_folder(self.folder_of(source))
        except BadInput:
            return None
        return tree if tree.digest == source.digest else None

    def jobs_by_digest(self) -> dict[str, list[str]]:
        """Return the data sets of jobs that have not ended, each with its jobs."""
        found: dict[str, list[str]] = {}
        for job_id, job in JobStore(self.home).live_jobs(lambda _: None).items():
            for digest in job.wants.data_digests if job.wants is not None and not job.record.state.ended else ():
                found.setdefault(digest, []).append(job_id)
        return found

    def wanted_digests(self) -> frozenset[str]:
        """Return the digests of data sets of jobs that have not ended."""
        return frozenset(self.jobs_by_digest())

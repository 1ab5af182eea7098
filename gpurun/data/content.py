"""A data set that gpurun can send: from a folder on the head, or from a host that has the set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpurun.data.folder import CHANGED, HINT, DataFolder, hashes_of
from gpurun.errors import BadInput, GpurunError, HostFailure
from gpurun.images.export import default_folder
from gpurun.images.store import Stored
from gpurun.images.tree import Entry, digest_of
from gpurun.node.agent.call import OpError
from gpurun.node.data import data_store
from gpurun.node.transfer.spool import Blob, stored_of
from gpurun.remote import Fleet
from gpurun.remote.agent import bad_answer

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
        folder: the set's folder on the head; "" = only hosts have the set.
    """

    digest: str
    size: int
    entries: bytes
    hashes: bytes
    made: Callable[[], Blob]
    fleet: Fleet
    holders: Sequence[str]
    folder: str = ""

    @property
    def stored(self) -> int:
        """Return how many bytes a host receives and stores: all but whole chunks of zeros."""
        return stored_of(self.hashes, self.size)

    @property
    def is_on_head(self) -> bool:
        """Return whether the head has read the set itself. Then the hashes are right."""
        return bool(self.folder)

    @property
    def announced(self) -> Stored:
        """Return the set's blob, for `Relay.announce`. Hosts know the hashes already."""
        return _AnnouncedData(self.digest, self.size, b"", default_folder(), self.made)

    @property
    def changed(self) -> GpurunError:
        """Return the error for a folder of the head that has other content than announced."""
        return BadInput(CHANGED, where=self.folder, hint=HINT)


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
    entries, hashes = data_store.packed(entry.as_json() for entry in tree.entries), hashes_of(tree)
    return DataContent(
        tree.digest, tree.size, entries, hashes, lambda: tree.blob(tree.digest, hashes), fleet, holders, str(tree.top)
    )


def content_of_host(fleet: Fleet, holder: str, digest: str, check: Callable[[], object] = lambda: None) -> DataContent:
    """Return a set that only hosts have, as `holder` describes it. The described content must have the set's digest.

    Args:
        check: called repeatedly; raises to stop.

    Raises:
        RemoteOpFailed: the host describes another set, or none.
        HostFailure: it does not describe the set in time.
    """
    entries = _described(fleet, holder, digest, data_store.ENTRIES, check)
    hashes = _described(fleet, holder, digest, data_store.HASHES, check)
    try:
        listed = [Entry(*row) for row in data_store.unpacked(entries)]
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
            if len(found) > data_store.MOST_DESCRIBED_BYTES:
                raise bad_answer(
                    holder,
                    f"the host's answer to data.manifest has more than {data_store.MOST_DESCRIBED_BYTES} "
                    f"bytes of {part}",
                )
            if time.monotonic() > deadline:
                raise HostFailure(
                    f"the host did not list the files of a data set within {DESCRIBE_LIMIT_S:g} s", host=holder
                )
    return bytes(found)

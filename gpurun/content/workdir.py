"""Copy a job's code from the head to every host, byte for byte; send only what changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpurun import faults
from gpurun.content import seats
from gpurun.content.chain import Want
from gpurun.content.export import default_folder
from gpurun.content.relay import Relay
from gpurun.content.ship import chains_of
from gpurun.content.store import LayerStore, Stored
from gpurun.content.tree import FileTree
from gpurun.errors import GpurunError, HostUnreachable, StateError
from gpurun.jobs.folder import CODES
from gpurun.msgspec_types import ready
from gpurun.node.agent import frames
from gpurun.node.folder.below import Entry
from gpurun.node.transfer.spool import CHUNK
from gpurun.remote import Agent, Fleet, Results
from gpurun.remote.agent import bad_answer
from gpurun.state import durable
from gpurun.state.paths import StatePath, state_error

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory


# A job's code as it was at submit: one file in the job's folder, which every attempt and every join reads.


Entries = list[Entry]


def write_code(path: StatePath, tree: FileTree) -> None:
    """Write a new file and sync it. Its name is durable once its folder is synced.

    Raises:
        BadInput: a file changed while it was read, or cannot be read.
        StateError: it cannot be written, for example because the disk is full.
    """
    first = json.dumps(tree.entries).encode() + b"\n"
    with os.fdopen(path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        try:
            for piece in _pieces(first, tree):
                durable.write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        except OSError as error:
            raise state_error(error, path, "written") from error


def _pieces(first: bytes, tree: FileTree) -> Iterator[bytes]:
    yield first
    for digest in tree.files:
        yield from tree.content(digest)


def kept_code(path: StatePath) -> Callable[[StatePath], None]:
    """Return a function that gives another job this code: by a hard link, or by a copy."""

    def add(new: StatePath) -> None:
        try:
            path.link(new)
        except StateError:  # a file system without links, or with too many of this file
            write_code(new, Code(path))

    return add


class Code(FileTree):
    """The code that a job keeps.

    Args:
        digest: what the job was submitted with; "" = whatever is there.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is damaged, or has another digest.
    """

    def __init__(self, path: StatePath, digest: str = "") -> None:
        self._path = path
        with path.reader(linked=True) as file:
            try:
                first = file.readline()
            except OSError as error:
                raise state_error(error, path, "read") from error
        try:
            super().__init__(msgspec.convert(json.loads(first), ready(Entries)))
        except (ValueError, RecursionError):
            raise self._damaged("gpurun cannot read the list of files") from None
        if digest and self.digest != digest:
            raise self._damaged("the list of files differs from the submitted list")
        ends = accumulate((entry.size for entry in self.files.values()), initial=len(first))
        self._starts = dict(zip(self.files, ends, strict=False))

    def content(self, digest: str) -> Iterator[bytes]:
        """Yield the content of one of `files`.

        Raises:
            StateError: it is damaged.
        """
        descriptor = self._path.open_file(os.O_RDONLY, linked=True)
        try:
            yield from self._content(descriptor, digest)
        finally:
            os.close(descriptor)

    def compare(self, tree: FileTree) -> None:
        """Read both to their ends.

        Raises:
            BadInput: a file of the tree changed after its scan, or cannot be read.
            StateError: this is not the tree's code, apart from times, or it cannot be read.
        """
        if _untimed(self) != _untimed(tree):
            raise self._damaged("the list of files differs from the submitted list")
        descriptor, is_same = self._path.open_file(os.O_RDONLY, linked=True), True
        try:
            for digest, start in self._starts.items():
                at = start
                for piece in tree.content(digest):  # its end tells a change of the tree from damage here
                    is_same = is_same and self._read(descriptor, len(piece), at) == piece
                    at += len(piece)
        finally:
            os.close(descriptor)
        if not is_same:
            raise self._damaged("it differs from the submitted files")

    def _content(self, descriptor: int, digest: str) -> Iterator[bytes]:
        seen, at, left = hashlib.sha256(), self._starts[digest], self.files[digest].size
        while left and (piece := self._read(descriptor, min(CHUNK, left), at)):
            seen.update(piece)
            at, left = at + len(piece), left - len(piece)
            yield piece
        if f"sha256:{seen.hexdigest()}" != digest:
            raise self._damaged(f"the file {self.files[digest].path!r} differs from the submitted file")

    def _read(self, descriptor: int, size: int, at: int) -> bytes:
        try:
            return os.pread(descriptor, size, at)
        except OSError as error:
            raise state_error(error, self._path, "read") from error

    def _damaged(self, why: str) -> StateError:
        return StateError(
            f"the job's copy of its code is damaged: {why}", where=str(self._path), hint="submit the job again"
        )


def _untimed(tree: FileTree) -> list[Entry]:
    return [entry._replace(mtime_ns=0) for entry in tree.entries]


class CodeStore:
    """The code of a user's jobs: each content once. Jobs, sweeps and campaigns have hard links to its file.

    A name in the store keeps no code: `JobStore.sweep` removes the names of files that have no other name. So a process
    that is killed at any step leaves at most a second copy of the code.
    """

    def __init__(self, home: Path) -> None:
        self._folder = StatePath(home) / "jobs" / f"{CODES}{os.getuid()}"

    def add(self, path: StatePath, tree: FileTree) -> None:
        """Give a new job this code: by a hard link to the stored file, else by a new file, which is then stored.

        Compares the stored file with the tree first: a damaged file is replaced, for the jobs that come from now on.

        Raises:
            BadInput, StateError: as `write_code`.
        """
        digest = tree.digest
        if self._link(digest, tree, path):
            return
        write_code(path, tree)
        faults.point()
        with suppress(FileNotFoundError, StateError):  # a file system without links: each job has its copy
            with suppress(FileExistsError):
                self._folder.mkdir(0o700)
            if _is_mine_alone(self._folder):
                self._keep(digest, path)

    def _link(self, digest: str, tree: FileTree, path: StatePath) -> bool:
        """Link the stored file, if there is one and it is sound. No longer offers one that cannot be used."""
        kept = self._folder / digest.removeprefix("sha256:")
        try:
            if not _is_mine_alone(self._folder):
                return False
            Code(kept).compare(tree)
            kept.link(path)
        except FileNotFoundError:
            return False
        except StateError:
            with suppress(FileNotFoundError, StateError):
                kept.unlink()
            return False
        return True

    def _keep(self, digest: str, path: StatePath) -> None:
        """Store a job's file; if another submission was quicker, let the job have that one's."""
        try:
            path.link(self._folder / digest.removeprefix("sha256:"))
        except FileExistsError:
            quicker = path.sibling(f"{path.name}.new")
            if self._link(digest, Code(path), quicker):
                quicker.rename(path)


def _is_mine_alone(folder: StatePath) -> bool:
    """Return whether a folder is this user's, and nobody else can write there. Raises FileNotFoundError."""
    found = folder.stat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


# Up to here each host is sent its own over its SSH channel: a chain takes longer to set up than that takes.
DIRECT_BYTES = 2 << 20
LIMIT_S = 6 * 3600.0
_MAKE_LIMIT_S = 600.0


Told = Callable[[str, int, int], object]
"""Receives how many bytes a host has, of how many."""


def sync_workdir(
    fleet: Fleet, folders: Mapping[str, str], tree: FileTree, *, inventory: Inventory | None,
    told: Told = lambda *_: None,
) -> Results[int]:  # fmt: skip
    """Make a folder on every host the same as `tree`: content, modes, times and links.

    Copies links as links. Sends a host only contents that it never had; large ones go through a chain of hosts.
    Idempotent.

    Args:
        folders: host → absolute folder there. It belongs to gpurun alone: entries that are not in `tree` are removed.
        tree: a folder on the head as it is now, or a job's copy.
        inventory: racks of hosts and how they reach each other; None = unknown.
        told: called by one thread at a time, and only for so many bytes that a person may wait for them.

    Returns:
        Bytes sent to each host.

    Raises:
        BadInput: a file of the folder changed while it was sent.
        StateError: the job's copy is damaged.
    """
    digests = list(tree.files)
    asked = fleet.map(lambda agent: _lacking(agent, digests), folders)
    failed = dict(asked.failed)
    sent = dict.fromkeys(asked.ok, 0)
    lacking = {host: found for host, found in asked.ok.items() if found}
    union = list(dict.fromkeys(digest for found in lacking.values() for digest in found))
    size = sum(tree.files[digest].size for digest in union)
    if size <= DIRECT_BYTES or len(lacking) == 1:
        how = told if size > DIRECT_BYTES else lambda *_: None
        added = fleet.map(lambda agent: _send(agent, tree, lacking[agent.host], how), lacking)
        sent.update(added.ok)
        failed.update(added.failed)
    elif lacking:
        failed.update(_send_through_chains(fleet, tree, lacking, union, inventory, told))
        sent.update(dict.fromkeys(lacking, size))
    made = fleet.map(
        lambda agent: agent.call("tree.make", dest=folders[agent.host], entries=tree.entries, timeout_s=_MAKE_LIMIT_S),
        [host for host in asked.ok if host not in failed],
    )
    failed.update(made.failed)
    return Results(
        {host: sent[host] for host in folders if host not in failed},
        {host: failed[host] for host in folders if host in failed},
    )


def _lacking(agent: Agent, digests: Sequence[str]) -> list[str]:
    """Return the contents that a host lacks, each once.

    Raises:
        RemoteOpFailed: it names others.
    """
    found = dict.fromkeys(agent.call("tree.lacking", digests=digests).value)
    if not found.keys() <= set(digests):
        raise bad_answer(agent.host, "the host's answer to tree.lacking names content that gpurun did not ask for")
    return list(found)


def _send(agent: Agent, tree: FileTree, digests: Sequence[str], told: Told) -> int:
    """Send contents directly to one host; return the number of bytes."""
    sent, size = 0, sum(tree.files[digest].size for digest in digests)

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for digest in digests:
            for piece in tree.content(digest):
                sent += len(piece)
                told(agent.host, sent, size)
                yield frames.encode({"d": digest}, piece)
            yield frames.encode({"d": digest, "end": True})

    for _ in agent.stream("tree.add", payload_in=pieces()):
        pass
    return sent


def _send_through_chains(
    fleet: Fleet,
    tree: FileTree,
    lacking: Mapping[str, Sequence[str]],
    union: Sequence[str],
    inventory: Inventory | None,
    told: Told,
) -> dict[str, GpurunError]:
    """Send all contents that any host lacks as one blob through these hosts; return the hosts that failed."""
    with closing(LayerStore(default_folder())) as store:
        pack = store.put(piece for digest in union for piece in tree.content(digest))
        return _send_pack(fleet, tree, lacking, union, inventory, pack, told)


def _send_pack(
    fleet: Fleet,
    tree: FileTree,
    lacking: Mapping[str, Sequence[str]],
    union: Sequence[str],
    inventory: Inventory | None,
    pack: Stored,
    told: Told,
) -> dict[str, GpurunError]:
    ends = accumulate(tree.files[digest].size for digest in union)
    index = [
        [digest, end - tree.files[digest].size, tree.files[digest].size]
        for digest, end in zip(union, ends, strict=True)
    ]
    wants = [Want(host, seats.rack_of(inventory, host), (pack.digest,)) for host in lacking]
    relay = Relay(
        fleet, chains_of(inventory, wants, {pack.digest: pack.size}), seats.options_for(inventory, lacking),
        told=lambda host, received: told(host, received, pack.size),
    )  # fmt: skip
    try:
        _bring(relay, pack)
        unpacked = fleet.map(
            lambda agent: agent.call(
                "tree.unpack", transfer=relay.transfer, pack=pack.digest, index=index, timeout_s=_MAKE_LIMIT_S
            ),
            relay.hosts,
        )
        return {**relay.failed, **unpacked.failed}
    finally:
        relay.close()


def _bring(relay: Relay, pack: Stored) -> None:
    relay.open()
    relay.announce(pack)
    deadline = time.monotonic() + LIMIT_S
    while not relay.finished([pack.digest]):
        if time.monotonic() > deadline:
            raise HostUnreachable(f"sending the workdir took longer than {LIMIT_S:g} s")
        relay.step()

"""A job's code: the folder on the head, byte for byte on every host."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpurun.errors import BadInput
from gpurun.remote import Agent, Fleet, Results

PIECE_BYTES = 128 << 10


def sync_workdir(fleet: Fleet, folders: Mapping[str, str], local_dir: Path) -> Results[int]:
    """Make a folder on every host the same as `local_dir`: content, modes and links.

    Args:
        folders: host → absolute folder there, which belongs to gpurun alone: what is in it and not in `local_dir` goes.
        local_dir: a folder on the head. Links in it may not lead out of it.

    Returns:
        Bytes sent to each host.

    Raises:
        BadInput: `local_dir` is no readable folder.
    """
    if not local_dir.is_dir():
        raise BadInput("the workdir is no folder", where=str(local_dir))

    def send(agent: Agent) -> int:
        target = folders[agent.host]
        agent.call("files.rmtree", path=target)
        sent = 0

        def pieces() -> Iterator[bytes]:
            nonlocal sent
            for piece in _tar(local_dir):
                sent += len(piece)
                yield piece

        for _ in agent.stream("files.untar", payload_in=pieces(), dest=target):
            pass
        return sent

    return fleet.map(send, folders)


class _Sink(io.RawIOBase):
    """Collects what tarfile writes until it is taken."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def _tar(folder: Path) -> Iterator[bytes]:
    """The folder as a tar stream, in pieces."""
    sink = _Sink()
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            try:
                info = archive.gettarinfo(str(path), str(path.relative_to(folder)))
                if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                    continue  # sockets and the like belong to no job
                if not info.isreg():
                    archive.addfile(info)
                    continue
                with path.open("rb") as file:
                    archive.addfile(info, file)
            except OSError as error:
                raise BadInput(f"cannot be read: {error.strerror}", where=str(path)) from None
            if len(sink.data) >= PIECE_BYTES:
                yield bytes(sink.data)
                sink.data.clear()
    yield bytes(sink.data)

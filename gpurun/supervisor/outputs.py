"""A job's outputs: kept on the head between attempts, on the first host while one runs.

``outputs:`` of a recipe is a folder in the container that survives a restart, wherever the gang then runs. It is
brought to the head when an attempt ends and sent to the next one's first host, where rank 0 reads it.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpurun.errors import GpurunError, HostFailure
from gpurun.jobs import durable
from gpurun.launch.docker import AUTOTUNE_FILE
from gpurun.node.archive import ChunkReader, extract
from gpurun.remote.agent import Agent
from gpurun.supervisor.ends import failed
from gpurun.supervisor.job import SupervisedJob

PIECE_BYTES = 1 << 20


def send_outputs(job: SupervisedJob) -> None:
    """Give the first host what earlier attempts left.

    Raises:
        GangEnd: the host failed.
    """
    if job.spec.outputs is None:
        return
    _settle(job)
    if not job.folder.outputs.is_dir():
        return
    first = job.hosts[0]
    dest = job.accounts[first].outputs_folder(job.lease.job)
    try:
        for _ in job.links.agent(first).stream("files.untar", dest=dest, payload_in=_tar(job.folder.outputs)):
            pass
    except GpurunError as error:
        raise failed(error) from error


def collect_outputs(job: SupervisedJob) -> bool:
    """Bring the outputs to the head and remove them from the hosts; True when there is nothing left to bring.

    What an earlier attempt left on the head is replaced only by a whole newer copy, which a power loss does not take
    back: it is the only one once the hosts' are removed.
    """
    if job.spec.outputs is None:
        return True
    first = job.hosts[0]
    try:
        found = job.links.agent(first).call("gang.outputs", job=job.lease.job).value
        if found["files"]:
            _fetch(job, found["path"])
    except HostFailure as error:
        job.note(f"the outputs could not be brought from {first} yet: {error.message}")
        return False
    results = job.links.each(lambda agent: _remove(agent, job.lease.job))
    return not results.failed


def collect_autotune(job: SupervisedJob) -> None:
    """Keep what Horovod's autotune found, if it ran; to lose it only costs time."""
    if not job.spec.horovod.autotune:
        return
    first = job.hosts[0]
    with suppress(HostFailure):
        folder = job.links.agent(first).call("gang.outputs", job=job.lease.job).value["run"]
        found = job.links.agent(first).call("files.read", path=f"{folder}/{AUTOTUNE_FILE}", max_bytes=1 << 22)
        durable.write_bytes(job.folder.path / AUTOTUNE_FILE, found.payload)


def _remove(agent: Agent, job: str) -> None:
    path = agent.call("gang.outputs", job=job).value["path"]
    agent.call("files.rmtree", path=path)


def _fetch(job: SupervisedJob, path: str) -> None:
    arriving = job.folder.path / "outputs.arriving"
    shutil.rmtree(arriving, ignore_errors=True)
    stream = job.links.agent(job.hosts[0]).stream("files.tar", path=path)
    pieces = (reply.payload for reply in stream if reply.payload)
    with tarfile.open(fileobj=io.BufferedReader(ChunkReader(pieces)), mode="r|") as archive:
        extract(archive, str(arriving))
    durable.sync_tree(arriving)
    replaced = _settle(job)
    shutil.rmtree(replaced, ignore_errors=True)
    if job.folder.outputs.exists():
        job.folder.outputs.rename(replaced)
    arriving.rename(job.folder.outputs)
    durable.sync_folder(job.folder.path)
    shutil.rmtree(replaced, ignore_errors=True)


def _settle(job: SupervisedJob) -> Path:
    """Where outputs lie that are being replaced; they are put back if a crash came before the newer ones."""
    replaced = job.folder.path / "outputs.replaced"
    if replaced.is_dir() and not job.folder.outputs.exists():
        replaced.rename(job.folder.outputs)
    return replaced


class _Pieces(io.RawIOBase):
    """What a tar file writes, kept until it is taken."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self.taken += piece
        return len(piece)

    def take(self) -> bytes:
        piece, self.taken = bytes(self.taken), bytearray()
        return piece


def _tar(folder: Path) -> Iterator[bytes]:
    """A folder as a tar stream, names relative to it."""
    sink = _Pieces()
    with tarfile.open(fileobj=sink, mode="w|", bufsize=PIECE_BYTES) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
            if len(sink.taken) >= PIECE_BYTES:
                yield sink.take()
    yield sink.take()

"""A job's outputs: on the first host while an attempt runs, with a copy on the head that follows it.

``outputs:`` of a recipe is a folder in the container that survives a restart, wherever the gang then runs. It is
brought to the head now and then, so that a first host that dies takes little with it, and when the attempt ends; and
sent to the next one's first host, where rank 0 reads it.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpurun.errors import GpurunError, HostFailure
from gpurun.launch.docker import AUTOTUNE_FILE
from gpurun.node.archive import ChunkReader, Listing, extract, forget, inside
from gpurun.node.call import OpError
from gpurun.remote.agent import Agent
from gpurun.state import durable
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


def collect_outputs(job: SupervisedJob) -> set[str]:
    """Bring the outputs to the head and remove them from the hosts. Idempotent.

    What the head has is replaced only by a whole newer copy, which a power loss does not take back: it is the only one
    once the hosts' are removed. Of a host that cannot be reached the head keeps what it has.

    Returns:
        The hosts that may still have some: a copy broke off, or the host did not answer.
    """
    if job.spec.outputs is None:
        return set()
    hosts = _writers(job)
    answering = [host for host in hosts if job.links.is_open(host)]
    try:
        if folders := output_folders(job, answering):
            copy_outputs(job, folders, onto=len(answering) < len(hosts))
    except HostFailure as error:
        job.note(f"the outputs could not be brought from {error.host} yet: {error.message}")
        return set(hosts)
    results = job.links.each(lambda agent: _remove(agent, job.lease.job))
    return set(results.failed)


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


def _writers(job: SupervisedJob) -> Sequence[str]:
    """The hosts that may have outputs: rank 0 is on the first, in an elastic gang on another if it is lost there."""
    return job.hosts[:1] if job.spec.min_gpus is None else job.members


def output_folders(job: SupervisedJob, hosts: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """(host, folder) wherever there are outputs, the last one written to last.

    Args:
        hosts: which are asked; None = all that may have some.

    Raises:
        HostFailure: one of them does not say.
    """
    asked = job.links.each(
        lambda agent: agent.call("gang.outputs", job=job.lease.job).value, _writers(job) if hosts is None else hosts
    )
    for error in asked.failed.values():
        raise error
    written = sorted((said["newest"], host) for host, said in asked.ok.items() if said["newest"] is not None)
    return [(host, asked.ok[host]["path"]) for _, host in written]


def copy_outputs(
    job: SupervisedJob,
    folders: Sequence[tuple[str, str]],
    *,
    onto: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Replace the head's copy by what (host, folder) have; of files with the same name the last host's is kept.

    Only what has changed since the last copy is sent. A file that changes while it is read stays as it was in the last
    copy, or out: the head never has a torn one.

    Args:
        onto: keep what the head has besides.

    Raises:
        HostFailure: a host failed, or it was cancelled; the copy that was there stays.
    """
    arriving = job.folder.path.plain / "outputs.arriving"
    shutil.rmtree(arriving, ignore_errors=True)
    if onto and job.folder.outputs.is_dir():
        shutil.copytree(job.folder.outputs, arriving, symlinks=True, copy_function=os.link)
    arriving.mkdir(exist_ok=True)
    copied = {}
    for host, path in folders:
        known = job.outputs_copied.get(host, {}) if len(folders) == 1 and not onto else {}
        try:
            copied[host] = _copy(job, host, path, arriving, known, cancelled)
        except (OpError, tarfile.TarError) as error:
            raise HostFailure(f"what it sent is no folder of outputs: {error}", host=host) from error
    durable.sync_tree(arriving)
    replaced = _settle(job)
    shutil.rmtree(replaced, ignore_errors=True)
    if job.folder.outputs.exists():
        job.folder.outputs.rename(replaced)
    arriving.rename(job.folder.outputs)
    durable.sync_folder(job.folder.path)
    shutil.rmtree(replaced, ignore_errors=True)
    job.outputs_copied = copied


def _copy(
    job: SupervisedJob, host: str, path: str, arriving: Path, known: Listing, cancelled: Callable[[], bool]
) -> Listing:
    """Make `arriving` what the folder on the host is; how its files were, but for those that were being changed."""
    known = {name: marks for name, marks in known.items() if _link_old(job, arriving, name)}
    agent = job.links.agent(host)
    read: Listing = {}

    def pieces() -> Iterator[bytes]:
        for reply in agent.stream("files.tar", path=path, known=known):
            if cancelled():
                raise HostFailure("the copy was cancelled", host=host)
            if reply.payload:
                yield reply.payload
            elif reply.value:
                read.update(reply.value["listing"])

    stream = pieces()
    with tarfile.open(fileobj=io.BufferedReader(ChunkReader(stream)), mode="r|") as archive:
        extract(archive, str(arriving))
    for _ in stream:
        pass  # what comes after the tar's end
    after = agent.call("files.list", path=path).value
    for name in known.keys() - read.keys():
        forget(inside(str(arriving), name))
    changing = [name for name, marks in read.items() if after.get(name) != marks]
    for name in changing:
        forget(inside(str(arriving), name))
        _link_old(job, arriving, name)
    return {name: marks for name, marks in read.items() if name not in changing}


def _link_old(job: SupervisedJob, arriving: Path, name: str) -> bool:
    """Give a file of the copy that is there its place in the next one; files are replaced, never written to."""
    old, new = job.folder.outputs / name, inside(str(arriving), name)
    if not old.is_file() or old.is_symlink():
        return False
    os.link(old, new)
    return True


def _settle(job: SupervisedJob) -> Path:
    """Where outputs lie that are being replaced; they are put back if a crash came before the newer ones."""
    replaced = job.folder.path.plain / "outputs.replaced"
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

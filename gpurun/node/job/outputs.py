"""List, read, write and remove a job's outputs on this host. A container may change them at the same time."""

import errno
import hashlib
import os
from typing import Any, Dict, Generator, Iterator, Optional, Tuple

from gpurun.node.agent.call import Call, OpError, OpReply
from gpurun.node.folder import batches, beginnings, below, contents, listings
from gpurun.node.folder.batches import Item
from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.node.folder.making import Maker, Receiver
from gpurun.node.job import job_lock, job_parts, layer, rank_progress
from gpurun.node.job.layer_rules import BESIDE, is_beside
from gpurun.node.job.written import Tops, written_folder


def listing(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return the list of the outputs, as a stream of frames (`gpurun.node.folder.listings`).

    The payload is a sequence of frames: rows that the reader has.

    Args:
        force: the gang has ended: also look into folders whose modes keep their owner out.

    Returns:
        ``{"present", "declared"}``: False if the job has no outputs here; see `rank_progress.declared`. It is read
            before the list is made, so the list shows each change before it.
    """
    said = rank_progress.declared(job)
    try:
        tops = Tops(job, below.READ if force else 0)
    except FileNotFoundError:
        return {"present": False, "declared": said}
    with tops:
        known = listings.known_rows(batches.unpacked(call.chunks()))
        for piece in batches.packed(tops.told(known)):
            yield OpReply(None, piece)
    return {"present": True, "declared": said}


def read(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return the content of files, as a stream of frames (`gpurun.node.folder.contents`), in the requested order.

    The payload is a sequence of frames ``{"p": path}``. The first file has the number 0. ``marks``, ``at`` and ``sha``
    describe the beginning of the file that the reader has (`gpurun.node.folder.beginnings.Begun`).
    """
    for piece in batches.packed(_contents(call, job, force)):
        yield OpReply(None, piece)


def _contents(call: Call, job: str, force: bool) -> Iterator[Item]:
    with Tops(job, below.READ if force else 0) as tops:
        for number, frame in enumerate(batches.unpacked(call.chunks())):
            parts = below.parts_of(frame.header.get("p"))
            try:
                descriptor, status = below.open_regular(*tops.at(parts), force=force)
            except OSError as error:
                replaced = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EAGAIN)
                yield {"n": number, "gone": CHANGING if replaced else str(error.strerror)}, b""
                continue
            try:
                yield from contents.content(number, descriptor, status, beginnings.begun(frame.header), not force)
            except OSError as error:
                yield {"n": number, "gone": str(error.strerror)}, b""
            finally:
                os.close(descriptor)


def sums(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return digests of files, as a stream of frames, in the requested order: so that hosts' files can be compared.

    The payload is a sequence of frames ``{"p": path}``. The answers are ``{"n", "sha", "marks"}``: the digest of the
    content (a hole counts as such) and the marks of the file. Without ``sha``, the file changed meanwhile or cannot be
    read. Frames with ``n`` alone are signs of life.
    """
    for piece in batches.packed(_sums(_contents(call, job, force))):
        yield OpReply(None, piece)


def _sums(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the digests of contents, each once it ends, and signs of life."""
    digest, marks = hashlib.sha256(), []  # type: Any, Any
    for header, payload in items:
        digest.update(b"hole:%d;" % header["skip"] if "skip" in header else payload)
        marks = header.get("marks", marks)
        if "gone" in header or header.get("after", marks) != marks:
            yield {"n": header["n"], "marks": []}, b""
        elif "whole" in header or "after" in header:
            yield {"n": header["n"], "marks": header.get("whole", marks), "sha": digest.hexdigest()}, b""
        else:
            yield {"n": header["n"]}, b""
            continue
        digest, marks = hashlib.sha256(), []


def write(call: Call, job: str, attempt: int) -> Dict[str, Any]:
    """Create entries in the outputs. Keeps entries that the payload does not name.

    Handles each piece under the job's lock, and only while the job's folder belongs to the attempt.

    The payload is a sequence of frames: entries (`gpurun.node.folder.contents.Listed`), each file's followed by its
    content.

    Returns:
        ``{"files"}``: how many were written.

    Raises:
        OpError: ``refused``, ``corrupt``: the payload is not such a sequence; ``fenced``: the attempt has ended here.
    """
    files = 0
    with _Makers(call, job, attempt) as makers:
        entry: Optional[Listed] = None
        receiver: Optional[Receiver] = None
        for header, payload in batches.unpacked(_while_owned(call, job, attempt)):
            if "p" in header:
                entry, receiver = makers.make(contents.listed(header))
            elif entry is None or receiver is None:
                raise OpError("refused", "the head sent content that belongs to no file")
            elif receiver.take(entry, header, payload) == "":
                files, entry = files + 1, None
        with job_lock.held_by(call, job, attempt):
            makers.close_folders()
    return {"files": files}


class _Makers:
    """Create entries in the folders of a job's outputs. A context manager."""

    def __init__(self, call: Call, job: str, attempt: int) -> None:
        folders = [job_parts.outputs_folder(job)]
        with job_lock.held_by(call, job, attempt):
            self._opened = [below.open_top(folders[0], make=True, need=below.CHANGE)]
            if os.path.isdir(written_folder(job)):
                folders.append(written_folder(job))
                self._opened.append(below.open_top(folders[1], need=below.CHANGE))
        scratch = [below.open_top(os.path.dirname(folder)) for folder in folders]
        self._makers = [Maker(top, beside) for top, beside in zip(self._opened, scratch)]
        self._receivers = [Receiver(maker) for maker in self._makers]
        self._opened += scratch

    def make(self, entry: Listed) -> Tuple[Optional[Listed], Receiver]:
        """Create a folder or link; return a file's entry, whose content follows, and its receiver."""
        which = int(is_beside(entry.path) and len(self._makers) > 1)
        if which:
            if entry.path == BESIDE:
                return None, self._receivers[1]
            entry = entry._replace(path=entry.path[len(BESIDE) + 1 :])
        return _make(self._makers[which], entry), self._receivers[which]

    def close_folders(self) -> None:
        """Set the folders' modes and times."""
        for maker in self._makers:
            maker.close_folders()

    def __enter__(self) -> "_Makers":
        return self

    def __exit__(self, *_: object) -> None:
        for maker in self._makers:
            maker.__exit__()
        for descriptor in self._opened:
            os.close(descriptor)


def _while_owned(call: Call, job: str, attempt: int) -> Iterator[bytes]:
    """Yield the payload in pieces. The caller handles each piece under the lock; the wait for a piece is not under
    it.
    """
    for piece in call.chunks():
        with job_lock.held_by(call, job, attempt):
            yield piece


def _make(maker: Maker, entry: Listed) -> Optional[Listed]:
    """Create a folder or link; return a file's entry, whose content follows."""
    if entry.kind == "file":
        return entry
    if entry.kind not in ("dir", "link"):
        raise OpError("refused", "%r is a %s" % (entry.path, entry.kind))
    if entry.kind == "dir":
        maker.folder(entry)
    else:
        maker.link(entry)
    return None


def remove(call: Call, job: str, attempt: int, empties: bool = False) -> None:
    """Remove the job's outputs, unless they belong to an attempt later than this one. Idempotent.

    Args:
        empties: keep the folders, which then get other outputs.
    """
    with job_lock.held(call, job, required=False):
        if job_lock.owner(job) > attempt:
            return
        layer.free_work(job)
        kept = [folder for folder in (job_parts.outputs_folder(job), written_folder(job)) if os.path.isdir(folder)]
        for folder in (job_parts.kept_layer(job), job_parts.outputs_folder(job)):
            below.remove_path(folder)
        for folder in kept if empties else ():
            os.makedirs(folder, mode=0o700)


OPS = {"list": listing, "read": read, "sums": sums, "write": write, "remove": remove}

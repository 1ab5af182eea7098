"""List, read, write and remove a job's outputs on this host. A container may change them at the same time."""

import errno
import hashlib
import os
from typing import Any, Dict, Generator, Iterator, Optional

from gpurun.node.agent.call import Call, OpError, OpReply
from gpurun.node.folder import batches, beginnings, below, contents, listings
from gpurun.node.folder.batches import Item
from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.node.folder.making import Maker, Receiver
from gpurun.node.job import job_lock, job_parts, rank_progress


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
        top = below.open_top(job_parts.outputs_folder(job), need=below.READ if force else 0)
    except FileNotFoundError:
        return {"present": False, "declared": said}
    try:
        known = listings.known_rows(batches.unpacked(call.chunks()))
        for piece in batches.packed(listings.told(top, force, known)):
            yield OpReply(None, piece)
    finally:
        os.close(top)
    return {"present": True, "declared": said}


def read(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return the content of files, as a stream of frames (`gpurun.node.folder.contents`), in the requested order.

    The payload is a sequence of frames ``{"p": path}``. The first file has the number 0. ``marks``, ``at`` and ``sha``
    describe the beginning of the file that the reader has (`gpurun.node.folder.beginnings.Begun`).
    """
    top = below.open_top(job_parts.outputs_folder(job), need=below.READ if force else 0)
    try:
        for piece in batches.packed(_contents(call, top, force)):
            yield OpReply(None, piece)
    finally:
        os.close(top)


def _contents(call: Call, top: int, force: bool) -> Iterator[Item]:
    with below.Cursor(top, below.READ if force else 0) as cursor:
        for number, frame in enumerate(batches.unpacked(call.chunks())):
            parts = below.parts_of(frame.header.get("p"))
            try:
                descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1], force)
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
    top = below.open_top(job_parts.outputs_folder(job), need=below.READ if force else 0)
    try:
        for piece in batches.packed(_sums(_contents(call, top, force))):
            yield OpReply(None, piece)
    finally:
        os.close(top)


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
    folder = job_parts.outputs_folder(job)
    with job_lock.held_by(call, job, attempt):
        top = below.open_top(folder, make=True, need=below.CHANGE)
    scratch = below.open_top(os.path.dirname(folder))
    files = 0
    try:
        with Maker(top, scratch) as maker:
            receiver = Receiver(maker)
            entry: Optional[Listed] = None
            for header, payload in batches.unpacked(_while_owned(call, job, attempt)):
                if "p" in header:
                    entry = _make(maker, contents.listed(header))
                elif entry is None:
                    raise OpError("refused", "a content that belongs to no file")
                elif receiver.take(entry, header, payload) == "":
                    files, entry = files + 1, None
            with job_lock.held_by(call, job, attempt):
                maker.close_folders()
    finally:
        os.close(scratch)
        os.close(top)
    return {"files": files}


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


def remove(call: Call, job: str, attempt: int) -> None:
    """Remove the job's outputs, unless they belong to an attempt later than this one. Idempotent."""
    with job_lock.held(call, job, required=False):
        if job_lock.owner(job) <= attempt:
            below.remove_path(job_parts.outputs_folder(job))


OPS = {"list": listing, "read": read, "sums": sums, "write": write, "remove": remove}

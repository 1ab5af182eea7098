"""What an attempt's ranks write beside their code, in a Docker volume above the code; and the job's outputs here.

The engine mounts it, so this account needs no rights: an overlay whose lower folder is the code. Where the engine or
the kernel refuses that, the volume is a plain copy of the code. Either way, new and changed files lie in one folder of
this account, and the code itself never changes.

Docker says whether the mount works without starting anything: for a file that is copied into a created container, it
mounts the volumes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import io
import os
import posixpath
import shutil
import stat
import tarfile
import urllib.parse
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent import serve
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.docker import of_create
from gpurun.node.folder import below, contents
from gpurun.node.folder.below import Found, begun, walk
from gpurun.node.folder.contents import CHANGING, Item, Listed, Maker, Receiver, Rows, known_rows, packed, unpacked
from gpurun.node.job import rank_processes
from gpurun.node.job.parts import LABEL, held_by, hold_job, job_folder, kept_layer, layer_folder, outputs_folder, owner
from gpurun.node.job.rules import BESIDE, CODE, FILLED, PREFIX, TARGET, is_beside, is_rubbish, volume_name
from gpurun.node.transfer.sets import code_in

TRIAL = ".gpurun-trial"
"""A file that Docker writes into the layer before anything starts, and that gpurun removes at once."""
FOLDER_LABEL = "gpurun.folder"
_PARAMETERS = "/sys/module/overlay/parameters"
_FEATURES = ("index", "metacopy", "redirect_dir")
"""What a kernel may do by default, and must not here: files in the upper folder may then lack their content."""
_MOST_OPTIONS = 3500
"""The kernel takes one page of options (mount(2))."""
_UNUSABLE = frozenset(":,\\\n")
"""Characters of a path that are not plain text in an overlay's options."""
_PIECE = 1 << 20
_REFUSED = 400
_TRIES = 3


def create_layer(call: Call, job: str, attempt: int, container: Callable[[], str]) -> Tuple[str, str]:
    """Make an attempt's volume, and the container that mounts it. The caller holds the job's lock.

    Args:
        container: creates the container, and returns its id.

    Returns:
        The container, and why its layer is a copy of the code; "" if it is an overlay.

    Raises:
        OpError: as `container`; Docker refuses a volume; errors of the file system.
    """
    options, why = _overlay(job)
    if not why:
        made = _mounted(call, job, attempt, options, container)
        why = _refusal(call, job, made)
        if not why:
            with _filling(job):
                return made, ""
        _remove_container(call, made)
    return _mounted(call, job, attempt, _copy_of_code(call, job), container), why


def _mounted(call: Call, job: str, attempt: int, options: Dict[str, str], container: Callable[[], str]) -> str:
    """Make the volume and its container; return the container.

    Somebody may prune volumes in between. Docker then makes an empty one for the container, without our labels.
    """
    for _ in range(_TRIES):
        _make_volume(call, job, attempt, options)
        made = container()
        connection = docker.open_engine(call)
        try:
            labels = dict(_volumes(connection, volume_name(job, attempt))).get(volume_name(job, attempt), {})
        finally:
            connection.close()
        if labels.get(FOLDER_LABEL) == serve.root():
            return made
        _remove_container(call, made)
    raise OpError(
        "engine", "a program on this host prunes Docker's volumes while gpurun makes a volume: stop this program"
    )


def _overlay(job: str) -> Tuple[Dict[str, str], str]:
    """Return the options of an overlay's volume, and why it is not possible, "" if it is."""
    written, work = _folders(job)
    code = code_in(job_folder(job))
    options = _options(code, written, work)
    if _UNUSABLE.intersection(code + written) or len(options) > _MOST_OPTIONS:
        return {}, "an overlay cannot use the path %r" % written
    return {"type": "overlay", "device": "overlay", "o": options}, ""


@contextlib.contextmanager
def _filling(job: str) -> Iterator[None]:
    """Note, once for each layer, from when to when gpurun itself copies code into it: see `written`."""
    above = layer_folder(job)
    begun, done = os.path.join(above, "filling"), os.path.join(above, FILLED)
    if os.path.exists(done):
        yield
        return
    with open(begun, "a", encoding="utf-8") as file:  # an agent that was killed may have begun
        since = os.fstat(file.fileno()).st_mtime_ns
    yield
    os.utime(begun, ns=(since, since))  # the file's ctime is now
    os.rename(begun, done)


def _copy_of_code(call: Call, job: str) -> Dict[str, str]:
    """Copy the code; return the copy's options as a volume. No container may have it. What is written there stays."""
    written, _ = _folders(job)
    with _filling(job):
        _copy_code(call, code_in(job_folder(job)), written)
    return {"type": "none", "device": written, "o": "bind"}


def _make_volume(call: Call, job: str, attempt: int, options: Dict[str, str]) -> None:
    """Make an attempt's volume, in the place of one that no container has any more."""
    labels = {LABEL: job, "gpurun.attempt": str(attempt), FOLDER_LABEL: serve.root()}
    body = {"Name": volume_name(job, attempt), "Driver": "local", "DriverOpts": options, "Labels": labels}
    connection = docker.open_engine(call)
    try:
        _sweep(connection)
        _remove(connection, volume_name(job, attempt))
    finally:
        connection.close()
    status, answer = _asked(call, "POST", "/volumes/create", body)
    if status not in (200, 201):
        message = docker.failure(status, answer, "making the layer above the code").message
        raise OpError(of_create(message), message)


def _refusal(call: Call, job: str, container: str) -> str:
    """Return why Docker cannot mount the volumes of a created container, or not write there; "" if it can."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(TRIAL))
    path = "/containers/%s/archive?path=%s" % (container, urllib.parse.quote(TARGET))
    try:
        status, answer = _asked(call, "PUT", path, tar=packed.getvalue())
    finally:
        below.forget(os.path.join(layer_folder(job), "written", TRIAL))
    return docker.failure(status, answer, "mounting the layer").message if status >= _REFUSED else ""


def _asked(call: Call, method: str, path: str, body: Any = None, tar: bytes = b"") -> Tuple[int, bytes]:
    """Send a request to the engine. Raises OpError: ``no-docker`` if it does not answer, or breaks off."""
    connection = docker.open_engine(call)
    try:
        return docker.exchange(connection, method, path, body, tar)
    except (http.client.HTTPException, OSError) as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during %s %s: %r" % (method, path, error)) from None
    finally:
        connection.close()


def _remove_container(call: Call, container: str) -> None:
    _asked(call, "DELETE", "/containers/%s?force=1&v=1" % container)


def remove_volumes(connection: docker.Connection, job: str, attempt: int) -> None:
    """Remove the volumes of this and earlier attempts, after their containers. Idempotent.

    A volume that a stranger's container uses stays. It holds no file of the job, and the next job here removes it.
    """
    for name, _ in _volumes(connection, "%s%s-" % (PREFIX, job)):
        number = name.rpartition("-")[2]
        if number.isdigit() and len(number) < 10 and int(number) <= attempt:
            _remove(connection, name)


def free_work(job: str) -> None:
    """Remove the engine's own folder beside what was written, after the containers: only its owner may look into it.

    A host that lost its power may have left something in it. Then the folder goes to a place from which a later job
    takes it: the kernel empties it at the next mount.
    """
    work = os.path.join(layer_folder(job), "work")
    try:
        os.rmdir(os.path.join(work, "work"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        try:
            os.makedirs(_used(), mode=0o700, exist_ok=True)
            os.rename(work, os.path.join(_used(), os.urandom(8).hex()))
        except OSError:
            pass  # the fence says that the folder is still there


def keep_code(job: str) -> None:
    """Before the job's folder goes, move the code's link to what is kept of the layer: it shows what was written."""
    kept = os.path.join(kept_layer(job), CODE)
    if os.path.isdir(os.path.dirname(kept)) and not os.path.lexists(kept):
        try:
            os.rename(os.path.join(job_folder(job), CODE), kept)
        except OSError:
            pass  # then all files of a copy count as written


def _used() -> str:
    return os.path.join(serve.root(), "outputs", ".used-work")


def _folders(job: str) -> Tuple[str, str]:
    """Create the folders for what is written and for the engine's own use; return them. They are on one disk."""
    above = layer_folder(job)
    written, work = os.path.join(above, "written"), os.path.join(above, "work")
    os.makedirs(written, mode=0o700, exist_ok=True)
    if not os.path.isdir(work):
        for name in os.listdir(_used()) if os.path.isdir(_used()) else ():
            try:
                os.rename(os.path.join(_used(), name), work)
                break
            except OSError:
                continue
    os.makedirs(work, mode=0o700, exist_ok=True)
    return written, work


def _options(code: str, written: str, work: str) -> str:
    given = ["lowerdir=" + code, "upperdir=" + written, "workdir=" + work]
    return ",".join(given + [name + "=off" for name in _FEATURES if os.path.exists(os.path.join(_PARAMETERS, name))])


def _volumes(connection: docker.Connection, prefix: str) -> List[Tuple[str, Dict[str, Any]]]:
    """Return names and labels of the volumes whose names begin with `prefix`."""
    filters = urllib.parse.quote('{"name":["%s"]}' % prefix)
    status, answer = docker.exchange(connection, "GET", "/volumes?filters=" + filters)
    found = docker.parse_answer(answer)
    if status != 200 or not isinstance(found, dict):
        raise docker.failure(status, answer, "listing volumes")
    listed = [each for each in found.get("Volumes") or () if str(each.get("Name")).startswith(prefix)]
    return [(str(each["Name"]), each.get("Labels") or {}) for each in listed]


def _remove(connection: docker.Connection, name: str) -> None:
    docker.exchange(connection, "DELETE", "/volumes/" + urllib.parse.quote(name))


def _sweep(connection: docker.Connection) -> None:
    """Remove volumes of this account whose jobs are gone: a stranger's container had them at the fence."""
    for name, labels in _volumes(connection, PREFIX):
        job = str(labels.get(LABEL))
        try:
            is_gone = labels.get(FOLDER_LABEL) == serve.root() and not os.path.isdir(job_folder(job))
        except OpError:
            continue
        if is_gone:
            _remove(connection, name)


# -- a copy of the code --------------------------------------------------------------------------------


def _copy_code(call: Call, code: str, written: str) -> None:
    """Copy what `written` lacks of the code. Follows no link: what an earlier attempt wrote may be there, too."""
    top, dest = below.open_top(code), below.open_top(written, need=below.CHANGE)
    scratch = below.open_top(os.path.dirname(written))
    try:
        with Maker(dest, scratch) as maker:
            blocked: Set[below.Parts] = set()
            for found in walk(top):
                call.check()
                there = "" if found.parts[:-1] in blocked else _kind_at(maker, found.parts)
                if there is None:
                    _copy(maker, found)
                elif there != "dir" and _kind_of(found) == "dir":
                    blocked.add(found.parts)
            maker.close_folders()
    finally:
        for descriptor in (top, dest, scratch):
            os.close(descriptor)


def _kind_of(found: Found) -> str:
    return "" if found.status is None else below.kind_of(found.status.st_mode)


def _kind_at(maker: Maker, parts: below.Parts) -> Optional[str]:
    """Return the kind of what is there; None if nothing is."""
    try:
        return below.kind_of(os.lstat(parts[-1], dir_fd=maker.cursor.at(parts[:-1])).st_mode)
    except FileNotFoundError:
        return None


def _copy(maker: Maker, found: Found) -> None:
    path, kind, status = below.text_of_path(found.parts), _kind_of(found), found.status
    if status is None:
        raise OpError("denied", "%r: %s" % (path, found.why))
    entry = Listed(path, kind, status.st_mode & 0o777, status.st_mtime_ns, status.st_size)
    if kind == "dir":
        maker.folder(entry)
    elif kind == "link":
        maker.link(entry._replace(target=os.fsdecode(os.readlink(found.parts[-1], dir_fd=found.above))))
    else:
        descriptor = below.open_file(found.above, found.parts[-1], force=True)
        begun, _ = maker.begin(entry, entry.marks)
        with os.fdopen(descriptor, "rb", buffering=0) as source, open(begun, "wb", buffering=0, closefd=False) as out:
            shutil.copyfileobj(source, out, _PIECE)
        maker.keep(entry, entry.marks)


# The folders of a job's outputs on this host, as one tree: what ranks write to ``outputs``, and, below `BESIDE`, what
# they write beside their code (`gpurun.node.job.layer`).


_BESIDE = os.fsencode(BESIDE)
_COPIED = ("file", "dir", "link")
_TAKEN = "stays on its host, because gpurun itself uses its name in the outputs"


def written_folder(job: str) -> str:
    """Return the folder of what ranks write beside their code, if the head copies that."""
    return os.path.join(kept_layer(job), "written")


class Tops:
    """The open folders of a job's outputs. A context manager.

    Args:
        need: rights that we must have in every folder (`gpurun.node.folder.below.Cursor`).

    Raises:
        FileNotFoundError: the job has no outputs here.
    """

    def __init__(self, job: str, need: int) -> None:
        self._job = job
        self._need = need
        self._opened = [below.open_top(outputs_folder(job), need=need)]
        self._cursors = [below.Cursor(self._opened[0], need)]
        try:
            self._opened.append(below.open_top(written_folder(job), need=need))
            self._cursors.append(below.Cursor(self._opened[1], need))
        except FileNotFoundError:
            pass
        except OSError:
            os.close(self._opened[0])
            raise

    def at(self, parts: below.Parts) -> Tuple[int, bytes]:
        """Return the folder of an entry, valid until the next call, and the entry's name in it.

        Raises:
            OSError: there is no such folder.
        """
        if len(self._opened) > 1 and len(parts) > 1 and parts[0] == _BESIDE:
            return self._cursors[1].at(parts[1:-1]), parts[-1]
        return self._cursors[0].at(parts[:-1]), parts[-1]

    def told(self, known: Dict[Rows, str]) -> Iterator[Item]:
        """Yield the list of everything, as `gpurun.node.folder.contents.list_below`."""
        force = bool(self._need)
        if len(self._opened) == 1:
            yield from contents.list_below(self._opened[0], force, known)
            return
        yield from contents.list_below(self._opened[0], force, known, "", lambda parts, *_: parts[0] == _BESIDE)
        if os.access(_BESIDE, os.F_OK, dir_fd=self._opened[0], follow_symlinks=False):
            yield Listed(BESIDE, "unreadable", why=_TAKEN).header(), b""
        yield Listed(BESIDE, "dir", 0o755, os.fstat(self._opened[1]).st_mtime_ns).header(), b""
        with _Code(self._job) as code:
            found = contents.list_below(self._opened[1], force, known, BESIDE, code.leaves_out)
            yield from _with_their_folders(found, code.folders)

    def __enter__(self) -> "Tops":
        return self

    def __exit__(self, *_: object) -> None:
        for cursor in self._cursors:
            cursor.__exit__()
        for descriptor in self._opened:
            os.close(descriptor)


class _Code:
    """The code of a job here: what is still as it was there has not been written. A context manager.

    Attributes:
        folders: those that the code has, too, by their paths in the list.
    """

    def __init__(self, job: str) -> None:
        self.folders: Set[str] = set()
        self._top: Optional[int] = None
        self._cursor: Optional[below.Cursor] = None
        self._filled = _times(os.path.join(kept_layer(job), FILLED))
        for folder in (job_folder(job), kept_layer(job)):
            try:
                self._top = below.open_top(code_in(folder))
            except FileNotFoundError:
                continue
            self._cursor = below.Cursor(self._top, below.READ)
            return

    def leaves_out(self, parts: below.Parts, above: int, status: Optional[os.stat_result]) -> bool:
        """Return whether something was not written by the program, or is nothing that it needs again."""
        if status is None or is_rubbish(parts):
            return status is not None
        kind, before = below.kind_of(status.st_mode), self._status(parts)
        if kind not in _COPIED:
            return True
        if before is None or stat.S_IFMT(before.st_mode) != stat.S_IFMT(status.st_mode):
            return False
        if kind == "dir":
            self.folders.add(below.text_of_path((_BESIDE, *parts)))
            return False
        if kind == "link":
            return self._target(parts) == _target(above, parts[-1])
        return _is_same(before, status) and self._is_copied(status)

    def _is_copied(self, status: os.stat_result) -> bool:
        """Return whether gpurun made a file. A program may set a file's mtime, as ``cp -p`` does, but not its ctime."""
        return self._filled is None or self._filled[0] <= status.st_ctime_ns <= self._filled[1]

    def _status(self, parts: below.Parts) -> Optional[os.stat_result]:
        try:
            return None if self._cursor is None else os.lstat(parts[-1], dir_fd=self._cursor.at(parts[:-1]))
        except OSError:
            return None

    def _target(self, parts: below.Parts) -> bytes:
        return b"" if self._cursor is None else _target(self._cursor.at(parts[:-1]), parts[-1])

    def __enter__(self) -> "_Code":
        return self

    def __exit__(self, *_: object) -> None:
        if self._cursor is not None and self._top is not None:
            self._cursor.__exit__()
            os.close(self._top)


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_mode) == (other.st_size, other.st_mtime_ns, other.st_mode)


def _times(path: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns


def _target(above: int, name: bytes) -> bytes:
    try:
        return os.readlink(name, dir_fd=above)
    except OSError:
        return b""


def _with_their_folders(items: Iterable[Item], known: Set[str]) -> Iterator[Item]:
    """Leave out folders of the code in which nothing was written. A folder comes before its content."""
    waiting: Dict[str, Item] = {}
    for item in items:
        header, _ = item
        path = str(header.get("in", header.get("p")))
        if header.get("k") == "dir" and path in known:
            waiting[path] = item
            continue
        folder = path if "in" in header else posixpath.dirname(path)
        above = []
        while folder in waiting:
            above.append(waiting.pop(folder))
            folder = posixpath.dirname(folder)
        yield from reversed(above)
        yield item


# List, read, write and remove a job's outputs on this host. A container may change them at the same time.


def listing(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return the list of the outputs, as a stream of frames (`gpurun.node.folder.contents`).

    The payload is a sequence of frames: rows that the reader has.

    Args:
        force: the gang has ended: also look into folders whose modes keep their owner out.

    Returns:
        ``{"present", "declared"}``: False if the job has no outputs here; see `rank_progress.declared`. It is read
            before the list is made, so the list shows each change before it.
    """
    said = rank_processes.declared(job)
    try:
        tops = Tops(job, below.READ if force else 0)
    except FileNotFoundError:
        return {"present": False, "declared": said}
    with tops:
        known = known_rows(unpacked(call.chunks()))
        for piece in packed(tops.told(known)):
            yield OpReply(None, piece)
    return {"present": True, "declared": said}


def read_outputs(call: Call, job: str, force: bool = False) -> Generator[OpReply, None, Any]:
    """Return the content of files, as a stream of frames (`gpurun.node.folder.contents`), in the requested order.

    The payload is a sequence of frames ``{"p": path}``. The first file has the number 0. ``marks``, ``at`` and ``sha``
    describe the beginning of the file that the reader has (`gpurun.node.folder.below.Begun`).
    """
    for piece in packed(_contents(call, job, force)):
        yield OpReply(None, piece)


def _contents(call: Call, job: str, force: bool) -> Iterator[Item]:
    with Tops(job, below.READ if force else 0) as tops:
        for number, frame in enumerate(unpacked(call.chunks())):
            parts = below.parts_of(frame.header.get("p"))
            try:
                descriptor, status = below.open_regular(*tops.at(parts), force=force)
            except OSError as error:
                replaced = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EAGAIN)
                yield {"n": number, "gone": CHANGING if replaced else str(error.strerror)}, b""
                continue
            try:
                yield from contents.content(number, descriptor, status, begun(frame.header), not force)
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
    for piece in packed(_sums(_contents(call, job, force))):
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


def write_outputs(call: Call, job: str, attempt: int) -> Dict[str, Any]:
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
        for header, payload in unpacked(_while_owned(call, job, attempt)):
            if "p" in header:
                entry, receiver = makers.make(contents.listed(header))
            elif entry is None or receiver is None:
                raise OpError("refused", "the head sent content that belongs to no file")
            elif receiver.take(entry, header, payload) == "":
                files, entry = files + 1, None
        with held_by(call, job, attempt):
            makers.close_folders()
    return {"files": files}


class _Makers:
    """Create entries in the folders of a job's outputs. A context manager."""

    def __init__(self, call: Call, job: str, attempt: int) -> None:
        folders = [outputs_folder(job)]
        with held_by(call, job, attempt):
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
        with held_by(call, job, attempt):
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


def remove_outputs(call: Call, job: str, attempt: int, empties: bool = False) -> None:
    """Remove the job's outputs, unless they belong to an attempt later than this one. Idempotent.

    Args:
        empties: keep the folders, which then get other outputs.
    """
    with hold_job(call, job, required=False):
        if owner(job) > attempt:
            return
        free_work(job)
        kept = [folder for folder in (outputs_folder(job), written_folder(job)) if os.path.isdir(folder)]
        for folder in (kept_layer(job), outputs_folder(job)):
            below.remove_path(folder)
        for folder in kept if empties else ():
            os.makedirs(folder, mode=0o700)


OPS = {"list": listing, "read": read_outputs, "sums": sums, "write": write_outputs, "remove": remove_outputs}

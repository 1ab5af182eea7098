"""What an attempt's ranks write beside their code: a Docker volume above the code, one for all ranks of the host.

The engine mounts it, so this account needs no rights: an overlay whose lower folder is the code. Where the engine or
the kernel refuses that, the volume is a plain copy of the code. Either way, new and changed files lie in one folder of
this account, and the code itself never changes.

Docker says whether the mount works without starting anything: for a file that is copied into a created container, it
mounts the volumes.
"""

import contextlib
import http.client
import io
import os
import shutil
import tarfile
import urllib.parse
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent import place
from gpurun.node.agent.call import Call, OpError
from gpurun.node.docker import kinds
from gpurun.node.folder import below
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.making import Maker
from gpurun.node.folder.walk import Found, walk
from gpurun.node.job import job_parts
from gpurun.node.job.layer_rules import CODE, FILLED, PREFIX, TARGET, volume_name

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


def create(call: Call, job: str, attempt: int, container: Callable[[], str]) -> Tuple[str, str]:
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
        connection = docker.connect(call)
        try:
            labels = dict(_volumes(connection, volume_name(job, attempt))).get(volume_name(job, attempt), {})
        finally:
            connection.close()
        if labels.get(FOLDER_LABEL) == place.root():
            return made
        _remove_container(call, made)
    raise OpError(
        "engine", "a program on this host prunes Docker's volumes while gpurun makes a volume: stop this program"
    )


def _overlay(job: str) -> Tuple[Dict[str, str], str]:
    """Return the options of an overlay's volume, and why it is not possible, "" if it is."""
    written, work = _folders(job)
    code = os.path.join(job_parts.folder(job), CODE)
    options = _options(code, written, work)
    if _UNUSABLE.intersection(code + written) or len(options) > _MOST_OPTIONS:
        return {}, "an overlay cannot use the path %r" % written
    return {"type": "overlay", "device": "overlay", "o": options}, ""


@contextlib.contextmanager
def _filling(job: str) -> Iterator[None]:
    """Note, once for each layer, from when to when gpurun itself copies code into it: see `written`."""
    above = job_parts.layer_folder(job)
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
        _copy_code(call, os.path.join(job_parts.folder(job), CODE), written)
    return {"type": "none", "device": written, "o": "bind"}


def _make_volume(call: Call, job: str, attempt: int, options: Dict[str, str]) -> None:
    """Make an attempt's volume, in the place of one that no container has any more."""
    labels = {job_parts.LABEL: job, "gpurun.attempt": str(attempt), FOLDER_LABEL: place.root()}
    body = {"Name": volume_name(job, attempt), "Driver": "local", "DriverOpts": options, "Labels": labels}
    connection = docker.connect(call)
    try:
        _sweep(connection)
        _remove(connection, volume_name(job, attempt))
    finally:
        connection.close()
    status, answer = _asked(call, "POST", "/volumes/create", body)
    if status not in (200, 201):
        message = docker.failure(status, answer, "making the layer above the code").message
        raise OpError(kinds.of_create(message), message)


def _refusal(call: Call, job: str, container: str) -> str:
    """Return why Docker cannot mount the volumes of a created container, or not write there; "" if it can."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(TRIAL))
    path = "/containers/%s/archive?path=%s" % (container, urllib.parse.quote(TARGET))
    try:
        status, answer = _asked(call, "PUT", path, tar=packed.getvalue())
    finally:
        below.forget(os.path.join(job_parts.layer_folder(job), "written", TRIAL))
    return docker.failure(status, answer, "mounting the layer").message if status >= _REFUSED else ""


def _asked(call: Call, method: str, path: str, body: Any = None, tar: bytes = b"") -> Tuple[int, bytes]:
    """Send a request to the engine. Raises OpError: ``no-docker`` if it does not answer, or breaks off."""
    connection = docker.connect(call)
    try:
        return docker.exchange(connection, method, path, body, tar)
    except (http.client.HTTPException, OSError) as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during %s %s: %r" % (method, path, error)) from None
    finally:
        connection.close()


def _remove_container(call: Call, container: str) -> None:
    _asked(call, "DELETE", "/containers/%s?force=1&v=1" % container)


def remove(connection: docker.Connection, job: str, attempt: int) -> None:
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
    work = os.path.join(job_parts.layer_folder(job), "work")
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
    """Before the job's folder goes, move the code to what is kept of the layer: it shows what was written."""
    kept = os.path.join(job_parts.kept_layer(job), CODE)
    if os.path.isdir(os.path.dirname(kept)) and not os.path.exists(kept):
        try:
            os.rename(os.path.join(job_parts.folder(job), CODE), kept)
        except OSError:
            pass  # then all files of a copy count as written


def _used() -> str:
    return os.path.join(place.root(), "outputs", ".used-work")


def _folders(job: str) -> Tuple[str, str]:
    """Create the folders for what is written and for the engine's own use; return them. They are on one disk."""
    above = job_parts.layer_folder(job)
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
    found = docker.parse(answer)
    if status != 200 or not isinstance(found, dict):
        raise docker.failure(status, answer, "listing volumes")
    listed = [each for each in found.get("Volumes") or () if str(each.get("Name")).startswith(prefix)]
    return [(str(each["Name"]), each.get("Labels") or {}) for each in listed]


def _remove(connection: docker.Connection, name: str) -> None:
    docker.exchange(connection, "DELETE", "/volumes/" + urllib.parse.quote(name))


def _sweep(connection: docker.Connection) -> None:
    """Remove volumes of this account whose jobs are gone: a stranger's container had them at the fence."""
    for name, labels in _volumes(connection, PREFIX):
        job = str(labels.get(job_parts.LABEL))
        try:
            is_gone = labels.get(FOLDER_LABEL) == place.root() and not os.path.isdir(job_parts.folder(job))
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

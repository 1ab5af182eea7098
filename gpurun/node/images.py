"""Images on a host: look them up, load them while layers arrive, and compare the loaded image with the sent one.

Engines with a graph driver (overlay2 and the like) identify an image by its configuration's digest, the same on every
host. Those with the containerd image store identify it by a manifest's digest, which differs from the head's. There, an
image is the same if its layers and its configuration are.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import tarfile
import tempfile
import time
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Sequence, Tuple, Union
from urllib.parse import quote

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.docker import image_root, is_containerd, of_load
from gpurun.node.transfer import blobs, spool
from gpurun.node.transfer.sets import prune_code
from gpurun.node.transfer.spool import Blob

# The record of what gpurun has put into this host's Docker, so that it can remove exactly that.


Entry = Dict[str, Any]
Record = Dict[str, Entry]


def shipped_folder() -> str:
    """Return the record's folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "gpurun")


def read_shipped() -> Record:
    """Return the record; empty if it is unreadable.

    It is the head's image ID → ``{"local", "names", "layers", "sizes", "shipped_s", "temporary", "by", "needed_by"}``:
    the process that made a temporary image, and those that need an image, as in `this_process`.
    """
    try:
        with open(os.path.join(shipped_folder(), "images.json"), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {ident: entry for ident, entry in entries if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    """Return whether this version of gpurun wrote the entry."""
    if not isinstance(entry, dict):
        return False
    shipped_s = entry.get("shipped_s")
    lists = [entry.get("names"), entry.get("layers")]
    return (
        isinstance(entry.get("local"), str)
        and isinstance(shipped_s, (int, float))
        and abs(shipped_s) < 1e12  # no NaN either
        and all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists)
    )


@contextmanager
def change(required: bool = True) -> Iterator[Record]:
    """Let one process at a time change the record; writes it if the block ends without an error.

    Args:
        required: raise if it cannot be written. Who removes images goes on: it may be the disk that they fill, and an
            entry of an image that is gone does no harm.
    """
    os.makedirs(shipped_folder(), mode=0o700, exist_ok=True)
    with open(os.path.join(shipped_folder(), "images.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = read_shipped()
        yield record
        try:
            _write(record)
        except OSError:
            if required:
                raise


def _write(record: Record) -> None:
    handle, temporary = tempfile.mkstemp(dir=shipped_folder())
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(temporary, os.path.join(shipped_folder(), "images.json"))
    except BaseException:
        os.unlink(temporary)
        raise


def need(wanted: Callable[[str, Entry], bool]) -> None:
    """Note that this process needs those images and no others: nobody removes them before it ends.

    Args:
        wanted: whether it needs an image, by the head's ID and the entry.
    """
    me = this_process()
    if not any(me in _needing(entry) or wanted(ident, entry) for ident, entry in read_shipped().items()):
        return
    with change() as record:
        for ident, entry in record.items():
            others = [process for process in _needing(entry) if process != me and _lives(process)]
            entry["needed_by"] = [*others, me] if wanted(ident, entry) else others


def is_needed(entry: Entry) -> bool:
    """Return whether another ship or job counts on an image: its agent lives as long as it."""
    me = this_process()
    return any(_lives(process) for process in _needing(entry) if process != me)


def is_abandoned(entry: Entry) -> bool:
    """Return whether an entry is of a temporary image whose ship has died, and that no ship needs."""
    return bool(entry.get("temporary")) and not _lives(entry.get("by")) and not is_needed(entry)


def this_process() -> List[int]:
    """Return this process's number and start time, because its number may be reused."""
    process = processes.read_process(os.getpid())
    return [0, 0] if process is None else [process.pid, process.started]


def _needing(entry: Entry) -> List[Any]:
    needing = entry.get("needed_by")
    return needing if isinstance(needing, list) else []


def _lives(noted: Any) -> bool:
    """Return whether a process that `this_process` described is still there."""
    if not isinstance(noted, list) or len(noted) != 2 or not all(type(number) is int for number in noted):
        return False
    process = processes.read_process(noted[0])
    return process is not None and process.started == noted[1]


# Load an image of which the engine already has some layers, from a tar without those layers.


# A part of a tar: bytes, or a whole blob.
Part = Union[bytes, Blob]
_BLOCK = 512
_SEND_BYTES = 1 << 24
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_INDEX = "application/vnd.oci.image.index.v1+json"


def graph_tar(config: bytes, layers: Sequence[str], blobs: Dict[str, Blob], names: Sequence[str]) -> List[Part]:
    """Return the tar for an engine with a graph driver: ``manifest.json``, the configuration, the layers in `blobs`."""
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": list(names) or None, "Layers": [_layer_path(d) for d in layers]}]
    parts = [*_file(config_name, config), *_file("manifest.json", json.dumps(manifest).encode())]
    for digest, blob in blobs.items():
        parts += _blob(_layer_path(digest), blob)
    return [*parts, bytes(2 * _BLOCK)]


def oci_layer(blob: Blob) -> List[Part]:
    """Return one layer of the tar for an engine with the containerd image store, an OCI layout; `oci_rest` ends it."""
    return _blob(_blob_path(blob.digest), blob)


def oci_rest(config: bytes, layers: Sequence[Tuple[str, int]], names: Sequence[str]) -> List[Part]:
    """Return everything of an OCI layout except its layers.

    Args:
        layers: (diffID, bytes of its tar) of every layer; blobs are uncompressed, so both digests are the same.
    """
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIG, _digest(config), len(config)),
        "layers": [_descriptor(_LAYER, digest, size) for digest, size in layers],
    }
    raw = json.dumps(manifest, sort_keys=True).encode()
    entry = _descriptor(_MANIFEST, _digest(raw), len(raw))
    entries = [
        {**entry, "annotations": {"io.containerd.image.name": full_name(name)}} for name in names
    ] or [entry]  # fmt: skip
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": entries}
    return [
        *_file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
        *_file("index.json", json.dumps(index).encode()),
        *_file(_blob_path(_digest(raw)), raw),
        *_file(_blob_path(_digest(config)), config),
        bytes(2 * _BLOCK),
    ]


def prefix_config(config: bytes, layers: Sequence[str], mark: str) -> bytes:
    """Return the configuration of an image with only the lowest layers of another, to load them before the rest.

    Args:
        mark: makes it differ from any other image with these layers.
    """
    whole = json.loads(config)
    part = {"architecture": whole.get("architecture"), "os": whole.get("os"), "config": {}, "comment": mark}
    part["rootfs"] = {"type": "layers", "diff_ids": list(layers)}
    return json.dumps(part, sort_keys=True).encode()


def full_name(name: str) -> str:
    """Return a name with its registry and path, as containerd keeps it: ``a:1`` is ``docker.io/library/a:1``."""
    first, slash, _ = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return name
    return "docker.io/" + name if slash else "docker.io/library/" + name


def load_thin(call: Call, parts: Iterable[Part]) -> List[str]:
    """Send a whole tar to ``docker load``; see `docker_load`."""
    with docker_load(call) as loading:
        loading.feed(parts)
        return loading.finish()


@contextmanager
def docker_load(call: Call) -> "Iterator[DockerLoad]":
    """Yield a ``docker load`` that takes its tar in pieces; it is aborted unless it is finished.

    Raises:
        OpError: ``no-space``, or ``load-failed`` with Docker's message.
    """
    connection = docker.open_engine(call, timeout_s=None)
    try:
        connection.putrequest("POST", docker.API + "/images/load?quiet=1")
        connection.putheader("Content-Type", "application/x-tar")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        yield DockerLoad(connection)
    except (OSError, http.client.HTTPException) as error:
        call.check()
        raise load_error("docker load stopped early: %s" % error) from None
    finally:
        connection.close()


class DockerLoad:
    """The object that `docker_load` yields."""

    def __init__(self, connection: docker.Connection) -> None:
        self._connection = connection
        self._refused = False

    def feed(self, parts: Iterable[Part]) -> None:
        """Send more of the tar."""
        for part in parts:
            if _size(part) and not self._refused:
                try:
                    _send(self._connection, part)
                except BrokenPipeError:
                    self._refused = True  # Docker has seen enough: its answer says what is wrong

    def finish(self) -> List[str]:
        """End the tar; return the IDs or names that Docker reports as loaded."""
        if not self._refused:
            self._connection.sock.sendall(b"0\r\n\r\n")
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise load_error(docker.failure(response.status, answer, "docker load").message)
        return _loaded(answer)


def load_error(message: str) -> OpError:
    """Return the error for Docker's message."""
    return OpError(of_load(message), message)


def _loaded(answer: bytes) -> List[str]:
    """Return what was loaded. Docker reports errors inside a 200 answer, one JSON object per line."""
    loaded = []
    for line in answer.splitlines():
        said = docker.parse_answer(line)
        if not isinstance(said, dict):
            continue
        if said.get("error") or said.get("errorDetail"):
            raise load_error(str(said.get("error") or said["errorDetail"]))
        text = str(said.get("stream", "")).strip()
        for start in ("Loaded image ID: ", "Loaded image: "):
            if text.startswith(start):
                loaded.append(text[len(start) :])
    return loaded


def _send(connection: docker.Connection, part: Part) -> None:
    """Send one chunk of a chunked body (RFC 9112, section 7.1)."""
    connection.sock.sendall(b"%x\r\n" % _size(part))
    if isinstance(part, bytes):
        connection.sock.sendall(part)
    else:
        _send_file(connection, part)
    connection.sock.sendall(b"\r\n")


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size


def _send_file(connection: docker.Connection, blob: Blob) -> None:
    offset = 0
    while offset < blob.size:
        with blob.file() as descriptor:
            sent = os.sendfile(connection.sock.fileno(), descriptor, offset, min(_SEND_BYTES, blob.size - offset))
        if sent == 0:
            raise OSError("the file of %s has been truncated" % blob.digest)
        offset += sent


def _file(name: str, content: bytes) -> List[Part]:
    return [_header(name, len(content)) + content + bytes(-len(content) % _BLOCK)]


def _blob(name: str, blob: Blob) -> List[Part]:
    return [_header(name, blob.size), blob, bytes(-blob.size % _BLOCK)]


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)


def _descriptor(media_type: str, digest: str, size: int) -> Dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": size}


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _layer_path(digest: str) -> str:
    return digest[len("sha256:") :] + "/layer.tar"


def _blob_path(digest: str) -> str:
    return "blobs/sha256/" + digest[len("sha256:") :]


# Look up an engine's images by its API, and find the one that equals the head's.


# What an image's configuration says that a container notices.
_CONFIG_KEYS = ("Env", "Cmd", "Entrypoint", "WorkingDir", "User", "Labels", "ExposedPorts", "Volumes", "StopSignal")

# What the head says about an image: ``{"id", "layers", "names", "facts"}``. See `gpurun.node.images.ask_image`.
Image = Dict[str, Any]


class ImageApi:
    """Docker's image API over one connection."""

    def __init__(self, call: Optional[Call]) -> None:
        self._call = call
        self._connection: Optional[docker.Connection] = None

    def image(self, reference: str) -> Optional[Dict[str, Any]]:
        """Return an image's inspection; None if there is none."""
        if not reference:
            return None
        status, answer = self._exchange("GET", "/images/%s/json" % quote(reference, safe="/:@"))
        parsed = docker.parse_answer(answer) if status == 200 else None
        return parsed if isinstance(parsed, dict) else None

    def get(self, path: str) -> Any:
        """Return a parsed answer."""
        return self.expect("GET", path, (200,), path)

    def expect(self, method: str, path: str, statuses: Sequence[int], what: str) -> Any:
        """Return a parsed answer with one of these statuses.

        Raises:
            OpError: any other status.
        """
        status, answer = self._exchange(method, path)
        if status not in statuses:
            raise docker.failure(status, answer, what)
        return docker.parse_answer(answer)

    def _exchange(self, method: str, path: str) -> "tuple[int, bytes]":
        for last_try in (False, True):
            fresh = self._connection is None
            if self._connection is None:
                self._connection = docker.open_engine(self._call)
            try:
                return docker.exchange(self._connection, method, path)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._connection = None
                if fresh or last_try:  # a connection that was idle may have been closed by Docker
                    raise OpError("no-docker", "Docker closed the connection: %s" % error) from None
        raise AssertionError("unreachable")


def find_image(engine: ImageApi, image: Image, store: str, loaded: Sequence[str] = ()) -> Optional[str]:
    """Return the engine's own ID of an image that equals the head's; None if there is none.

    Args:
        loaded: the image that Docker has just reported as loaded: with the containerd store there may be no other way
            to find it.
    """
    if store == "graph":
        candidates = [image["id"]]
    else:
        recorded = read_shipped().get(image["id"], {}).get("local")
        candidates = [*image["names"], *loaded, *([recorded] if recorded else []), image["id"]]
    for candidate in candidates:
        found = engine.image(candidate)
        if found is not None and found["RootFS"].get("Layers") == image["layers"]:
            if store == "graph" and found["Id"] == image["id"]:
                return str(found["Id"])
            if store == "containerd" and facts_of(found) == image["facts"]:
                return str(found["Id"])
    return None


def facts_of(inspected: Dict[str, Any]) -> Dict[str, Any]:
    """Return the facts of an image's configuration, from an inspection by any engine; leaves out empty values."""
    config = inspected.get("Config") or {}
    facts = {key: config[key] for key in _CONFIG_KEYS if config.get(key)}
    facts.update({key: inspected[key] for key in ("Architecture", "Os", "Created") if inspected.get(key)})
    return facts


# Load one image on a host while its layers arrive.


# Layers are loaded ahead of the rest when so much of them has arrived: each load has a cost of its own.
PREFIX_BYTES = 64 << 20


class Loading:
    """Loads one image, layer by layer."""

    def __init__(
        self, call: Call, transfer: str, image: Image, store: str, have: Sequence[str], config: bytes,
    ) -> None:  # fmt: skip
        self._call = call
        self._transfer = transfer
        self._image = image
        self._layers: List[str] = image["layers"]
        self._store = store
        self._have = frozenset(have)
        self._config = config
        self._temporary: List[str] = []
        self._loaded: List[str] = []
        # A graph driver has layers from the lowest on, so many of them: on another parent a layer is another one.
        self._done = len(have)

    def run(self) -> Generator[Dict[str, Any], None, None]:
        """Load the layers that are there and wait for more, until all are loaded."""
        yield from self._into_containerd() if self._store == "containerd" else self._into_graph()

    def _into_containerd(self) -> Generator[Dict[str, Any], None, None]:
        sizes = {digest: self._size(digest) for digest in self._have}
        with docker_load(self._call) as loading:
            for at, digest in enumerate(self._layers):
                if digest not in sizes:
                    yield self._at("receiving", at)
                    self._wait(digest)
                    sizes[digest] = self._blob(digest).size
                    loading.feed(oci_layer(self._blob(digest)))
            yield self._at("loading", len(self._layers))
            layers = [(digest, sizes[digest]) for digest in self._layers]
            loading.feed(oci_rest(self._config, layers, self._image["names"]))
            self._loaded = loading.finish()

    def _into_graph(self) -> Generator[Dict[str, Any], None, None]:
        while True:
            ready = self._ready()
            if ready == len(self._layers):
                yield self._at("loading", ready)
                self._load(self._layers, self._config, self._image["names"])
                return
            if self._bytes_above(ready) >= PREFIX_BYTES:
                yield self._at("loading", ready)
                self._load_prefix(ready)
            else:
                yield self._at("receiving", ready)
                self._wait(self._layers[ready])

    def _at(self, state: str, layer: int) -> Dict[str, Any]:
        return {"state": state, "layer": layer, "layers": len(self._layers)}

    def _ready(self) -> int:
        """Return how many layers are loaded or have arrived completely, without a gap."""
        known = blobs.find_transfer(self._transfer).blobs
        for at in range(self._done, len(self._layers)):
            digest = self._layers[at]
            blob = known.get(digest)
            if blob is None or not blob.complete:
                return at
        return len(self._layers)

    def _bytes_above(self, ready: int) -> int:
        """Return how many bytes have arrived that the engine does not have."""
        return sum(self._blob(digest).size for digest in self._layers[self._done : ready])

    def _wait(self, digest: str) -> None:
        """Wait until a layer has arrived."""
        while True:
            blob = blobs.find_transfer(self._transfer).blobs.get(digest)
            if blob is None:
                self._call.wait(0.05)
            elif blob.wait_complete(0.5):
                return
            self._call.check()

    def _blob(self, digest: str) -> Blob:
        return blobs.find_transfer(self._transfer).blob(digest)

    def _load_prefix(self, count: int) -> None:
        layers = self._layers[:count]
        config = prefix_config(self._config, layers, "gpurun transfer " + self._transfer)
        temporary = "sha256:" + hashlib.sha256(config).hexdigest()
        with change() as record:  # first: so that it is found again if this process is killed
            record[temporary] = {
                "local": temporary,
                "names": [],
                "layers": layers,
                "temporary": True,
                "shipped_s": time.time(),
                "by": this_process(),
            }
        self._temporary.append(temporary)
        self._load(layers, config, ())
        self._done = count

    def _load(self, layers: List[str], config: bytes, names: Sequence[str]) -> None:
        fresh = {digest: self._blob(digest) for digest in layers[self._done :]}
        self._loaded = load_thin(self._call, graph_tar(config, layers, fresh, names))

    def _size(self, digest: str) -> int:
        """Return the tar size of a layer that was there, from the record."""
        for entry in read_shipped().values():
            if digest in entry.get("sizes", {}):
                return int(entry["sizes"][digest])
        raise OpError("load-failed", "the host has the layer %s, but gpurun does not know its size" % digest)

    def verify(self) -> str:
        """Compare the loaded image with the sent one; return the engine's ID of it.

        Raises:
            OpError: ``not-verified``.
        """
        engine = ImageApi(self._call)
        local = find_image(engine, self._image, self._store, self._loaded)
        if local is None:
            raise OpError("not-verified", "after the load, the image on the host is not the image that was sent")
        return local

    def sizes(self) -> Dict[str, int]:
        """Return the known tar sizes of layers: the containerd store needs them for the next image, too."""
        known = {digest: blob.size for digest, blob in blobs.find_transfer(self._transfer).blobs.items()}
        for entry in read_shipped().values():
            known.update(entry.get("sizes", {}))
        return {digest: known[digest] for digest in self._layers if digest in known}

    def remove_temporary(self) -> None:
        """Remove the images that only held layers until the whole image was there, also those of killed ships.

        One that another ship needs goes later: with it, or with the next ship.
        """
        if not self._temporary and not any(map(is_abandoned, read_shipped().values())):
            return
        engine = ImageApi(None)
        with change(required=False) as record:  # so that nobody comes to need one that is going
            mine = [ident for ident in self._temporary if not is_needed(record.get(ident, {}))]
            for temporary in {*mine, *(ident for ident, entry in record.items() if is_abandoned(entry))}:
                path = "/images/%s?noprune=1" % temporary
                engine.expect("DELETE", path, (200, 404, 409), "removing a temporary image")
                record.pop(temporary, None)


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "loongarch64": "loong64"}
"""As ``uname -m`` names them → as Go, and with it images, do; the others have one name."""


def ask_image(call: Call, image: Image) -> Dict[str, Any]:
    """Return what this host has of an image.

    Args:
        image: ``{"id", "layers", "names", "facts"}``: the head's ID, all diffIDs, the wanted tags, and the result of
            `facts_of` on the head.

    Returns:
        ``{"local", "named", "store", "have", "root", "free_bytes", "spool_free_bytes", "one_disk"}``: the engine's ID
        of the image, None if it is not there; whether it has its tags; ``graph`` or ``containerd``; the layers that
        need not be sent; the free space on Docker's disk and on the spool's, and whether they are one disk.

    Raises:
        OpError: ``no-docker``; ``architecture``: the image is for other machines.
    """
    engine = ImageApi(call)
    info = engine.get("/info")
    _check_architecture(image, info)
    root = image_root(info) or "/var/lib/docker"
    store = "containerd" if is_containerd(info) else "graph"
    local, have = _what_stays(engine, image, store)
    return {
        "local": local,
        "named": local is not None and all(_is_named(engine, name, local) for name in image["names"]),
        "store": store,
        "driver": info.get("Driver"),
        "version": info.get("ServerVersion"),
        "have": have,
        "root": root,
        "free_bytes": _free(root),
        "spool_free_bytes": _free(blobs.spool_folder()),
        "one_disk": _device(root) == _device(blobs.spool_folder()),
    }


def _what_stays(engine: ImageApi, image: Image, store: str) -> Tuple[Optional[str], List[str]]:
    """Return the engine's ID of the image and its layers that are there. No prune removes them while this agent lives.

    So the record's images are noted before the engine is asked. On a host where no note can be written, a load that
    then lacks a layer is repeated with all of them.
    """
    with suppress(OSError):
        need(lambda _, entry: not set(image["layers"]).isdisjoint(entry["layers"]))
    local = find_image(engine, image, store)
    if local is None:
        return None, _layers_there(engine, image["layers"], store)
    with suppress(OSError):
        need(lambda ident, _: ident == image["id"])
    return local, image["layers"]


def _check_architecture(image: Image, info: Dict[str, Any]) -> None:
    """Raise OpError if this host cannot run the image. Docker names architectures in two ways."""
    wanted, name = image["facts"].get("Architecture"), str(info.get("Architecture") or "")
    here = _ARCHITECTURES.get(name, name)
    if wanted and here and wanted != here:
        raise OpError("architecture", "the image is for %s, this host runs %s" % (wanted, here))


def _layers_there(engine: ImageApi, layers: List[str], store: str) -> List[str]:
    """Return the layers that need not be sent: the longest common beginning with an image that is there.

    With the containerd store: the blobs of images that gpurun itself brought, because only those are known by digest.
    """
    if store == "containerd":
        recorded = [entry for entry in read_shipped().values() if engine.image(entry.get("local", "")) is not None]
        there = {digest for entry in recorded for digest in entry.get("layers", [])}
        return [digest for digest in layers if digest in there]
    longest = 0
    for summary in engine.get("/images/json?all=1"):
        found = engine.image(summary["Id"])
        other = (found or {}).get("RootFS", {}).get("Layers") or []
        common = next(
            (at for at, pair in enumerate(zip(layers, other)) if pair[0] != pair[1]), min(len(layers), len(other))
        )
        longest = max(longest, common)
    return layers[:longest]


def _is_named(engine: ImageApi, name: str, local: str) -> bool:
    found = engine.image(name)
    return found is not None and found["Id"] == local


def _free(path: str) -> Optional[int]:
    """Return how many bytes can still be written below a path; None if unknown."""
    try:
        status = os.statvfs(_existing(path))
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _device(path: str) -> int:
    try:
        return os.stat(_existing(path)).st_dev
    except OSError:
        return -1


def _existing(path: str) -> str:
    """Return the path, or the nearest existing folder above it."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def name(call: Call, image: Image) -> None:
    """Tag an image that is there.

    Raises:
        OpError: ``not-found``: it is no longer there; ``docker``.
    """
    engine = ImageApi(call)
    local = find_image(engine, image, "graph") or find_image(engine, image, "containerd")
    if local is None:
        raise OpError("not-found", "the image is gone")
    for full in image["names"]:
        repository, _, tag = full.rpartition(":")
        path = "/images/%s/tag?repo=%s&tag=%s" % (
            quote(local, safe=":"),
            quote(repository, safe=""),
            quote(tag, safe=""),
        )
        engine.expect("POST", path, (201,), "naming the image %s" % full)


def install(
    call: Call, transfer: str, image: Image, store: str, have: List[str]
) -> Generator[Dict[str, Any], None, OpReply]:
    """Load an image whose layers arrive with a transfer; those in `have` are there.

    The payload is the image's configuration. Loads layers as soon as enough of them are there, as an image without a
    name, and removes that image when the whole is loaded. Yields ``{"state", "layer", "layers"}``.

    Raises:
        OpError: ``no-space``; ``load-failed``; ``not-verified`` if Docker reports success but the image differs from
            the sent one; ``closed`` if the transfer ends before everything has arrived.
    """
    config = call.payload
    loading = Loading(call, transfer, image, store, have, config)
    try:
        yield from loading.run()
        local, sizes = loading.verify(), loading.sizes()
    finally:
        loading.remove_temporary()
    with change() as record:
        record[image["id"]] = {
            "local": local,
            "names": image["names"],
            "layers": image["layers"],
            "sizes": sizes,
            "shipped_s": time.time(),
            "needed_by": record.get(image["id"], {}).get("needed_by", []),
        }
    need(lambda ident, _: ident == image["id"])
    return OpReply({"local": local})


def listing(call: Call) -> List[Dict[str, Any]]:
    """Return what gpurun has put into this engine.

    Returns:
        For each image ``{"id", "local", "names", "present", "temporary", "needed", "shipped_s", "size_bytes",
        "used_by"}``: the head's ID and the engine's; gpurun's tags that still point to it; whether a ship or a job that
        runs counts on it; the containers that use it, running or not.
    """
    return [known for known, _ in _recorded(ImageApi(call))]


def prune(call: Call, keep: List[str]) -> List[Dict[str, Any]]:
    """Remove what gpurun has put here and no container uses: its tags, and the image if it has no other tag.

    Also removes what interrupted transfers have left, and nothing of those that go on.

    Args:
        keep: the head's IDs of images that jobs need.

    Returns:
        The removed images, as in `listing`; ``freed`` says whether the image itself is gone.
    """
    api = ImageApi(call)
    removed = []
    spool.sweep(blobs.spool_folder(), 0)
    prune_code(call)
    for known, entry in _recorded(api):
        if known["id"] in keep or known["used_by"]:
            continue
        with change(required=False) as record:  # until it is gone, nobody can come to need it
            now = record.get(known["id"], {})
            if now.get("shipped_s") != entry.get("shipped_s") or _is_counted_on(now):
                continue
            known["freed"] = not known["present"] or _remove(api, known)
            del record[known["id"]]
        if known["present"]:
            removed.append(known)
    return removed


def _is_counted_on(entry: Entry) -> bool:
    """Return whether a ship or a job that runs needs an image of the record, or is still filling it."""
    return is_needed(entry) or (bool(entry.get("temporary")) and not is_abandoned(entry))


def _recorded(api: ImageApi) -> Iterator[Tuple[Dict[str, Any], Dict[str, Any]]]:
    """Yield (description, the record's entry) of each recorded image."""
    containers = api.get("/containers/json?all=1")
    for ident, entry in sorted(read_shipped().items()):
        local = str(entry.get("local", ""))
        found = api.image(local)
        known = {
            "id": ident,
            "local": local,
            "names": [name for name in entry.get("names", []) if found is not None and _is_named(api, name, local)],
            "present": found is not None,
            "temporary": bool(entry.get("temporary")),
            "needed": _is_counted_on(entry),
            "shipped_s": entry.get("shipped_s"),
            "size_bytes": int((found or {}).get("Size", 0)),
            "used_by": [c["Names"][0].lstrip("/") for c in containers if c.get("ImageID") == local and c.get("Names")],
        }
        yield known, entry


def _remove(api: ImageApi, known: Dict[str, Any]) -> bool:
    """Remove the tags that gpurun added. Returns True if the image is gone. Keeps an image that has a tag from
    others.
    """
    for full in known["names"]:
        api.expect("DELETE", "/images/" + quote(full, safe="/:"), (200, 404, 409), "removing %s" % full)
    left = api.image(known["local"])
    if left is not None and not left.get("RepoTags") and not left.get("RepoDigests"):
        api.expect("DELETE", "/images/" + known["local"], (200, 404, 409), "removing %s" % known["local"])
        left = api.image(known["local"])
    return left is None


OPS = {"ask": ask_image, "name": name, "install": install, "listing": listing, "prune": prune}

"""Load an image of which the engine already has some layers, from a tar without those layers.

``docker load`` looks up a layer by its chain ID (graph drivers) or its blob's digest (containerd image store) before it
opens its file, so existing layers need not be sent (moby PR 18727). gpurun does not trust Docker's report:
`gpurun.node.image.listing` compares the loaded image afterwards.
"""

import hashlib
import http.client
import json
import os
import tarfile
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, Sequence, Tuple, Union

from gpurun.node import docker
from gpurun.node.agent.call import Call, OpError
from gpurun.node.docker import kinds
from gpurun.node.transfer.spool import Blob

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


def load(call: Call, parts: Iterable[Part]) -> List[str]:
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
    connection = docker.connect(call, timeout_s=None)
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
    return OpError(kinds.of_load(message), message)


def _loaded(answer: bytes) -> List[str]:
    """Return what was loaded. Docker reports errors inside a 200 answer, one JSON object per line."""
    loaded = []
    for line in answer.splitlines():
        said = docker.parse(line)
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

"""Images on a host: what is there, loading, and proof that what was loaded is what was sent."""

import http.client
import os
from typing import Any, Dict, Generator, Iterator, List, Optional
from urllib.parse import quote

from gpurun.node import docker
from gpurun.node.call import Call, OpError, Reply

# Docker unpacks a loaded tar into its own folder before it reads it, and then unpacks each layer: twice the bytes.
LOAD_FACTOR = 2.0


def ask(call: Call, image_id: str, docker_host: Optional[str] = None) -> Dict[str, Any]:
    """What this host has of an image.

    Returns:
        ``{"present", "driver", "store", "free_bytes", "root"}``; ``store`` is ``graph`` or ``containerd``.

    Raises:
        OpError: ``no-docker``.
    """
    connection = docker.connect(call, docker_host)
    try:
        info = _get(connection, "/info", "docker info")
        status, _ = docker.exchange(connection, "GET", "/images/%s/json" % quote(image_id, safe=":"))
    except (OSError, http.client.HTTPException) as error:
        raise OpError("no-docker", "Docker broke off: %s" % error) from None
    finally:
        connection.close()
    kinds = dict(item for item in info.get("DriverStatus") or [] if len(item) == 2)
    containerd = str(kinds.get("driver-type", "")).startswith("io.containerd.snapshotter")
    return {
        "present": status == 200,
        "driver": info.get("Driver"),
        "store": "containerd" if containerd else "graph",
        "version": info.get("ServerVersion"),
        "root": info.get("DockerRootDir"),
        "free_bytes": _free(info.get("DockerRootDir")),
    }


def _get(connection: docker.Connection, path: str, what: str) -> Dict[str, Any]:
    status, answer = docker.exchange(connection, "GET", path)
    parsed = docker.parse(answer)
    if status != 200 or not isinstance(parsed, dict):
        raise docker.failure(status, answer, what)
    return parsed


def _free(root: Optional[str]) -> Optional[int]:
    """Bytes that Docker can still write; None when its folder cannot be asked."""
    try:
        status = os.statvfs(root or "/var/lib/docker")
    except OSError:
        return None
    # Docker runs as root and may use the blocks reserved for it, but a disk filled to that point is full.
    return status.f_bavail * status.f_frsize


def load(
    call: Call, image_id: str, layers: List[str], docker_host: Optional[str] = None
) -> Generator[Reply, None, Reply]:
    """Load the payload, a tar as ``docker save`` writes it, and prove that the image is there.

    Yields ``{"bytes"}`` as it goes.

    Returns:
        ``{"bytes"}``.

    Raises:
        OpError: ``no-space``; ``load-failed`` with Docker's words; ``not-verified`` when Docker says it is loaded but
            the image's ID or layers are not those that were sent.
    """
    connection = docker.connect(call, docker_host, None)
    received = 0

    def body() -> Iterator[bytes]:
        nonlocal received
        for piece in call.chunks():
            received += len(piece)
            yield piece

    try:
        connection.putrequest("POST", docker.API + "/images/load?quiet=1")
        connection.putheader("Content-Type", "application/x-tar")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        told = 0
        for piece in body():
            connection.send(b"%x\r\n" % len(piece) + piece + b"\r\n")
            if received - told >= 1 << 22:
                told = received
                yield Reply({"bytes": received})
        connection.send(b"0\r\n\r\n")
        yield Reply({"bytes": received, "loading": True})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise _load_error(docker.failure(response.status, answer, "docker load").message)
        _check_answer(answer)
    except (OSError, http.client.HTTPException) as error:
        call.check()
        raise _load_error("docker load broke off: %s" % error) from None
    finally:
        connection.close()
    verify(call, image_id, layers, docker_host)
    return Reply({"bytes": received})


def _check_answer(answer: bytes) -> None:
    """Docker reports errors inside a 200 answer, one JSON object a line."""
    for line in answer.splitlines():
        said = docker.parse(line)
        if isinstance(said, dict) and (said.get("error") or said.get("errorDetail")):
            raise _load_error(str(said.get("error") or said["errorDetail"]))


def _load_error(message: str) -> OpError:
    full = "no space left" in message or "disk quota exceeded" in message
    return OpError("no-space" if full else "load-failed", message)


def verify(call: Call, image_id: str, layers: List[str], docker_host: Optional[str] = None) -> None:
    """Compare the image that is there with the one that was sent.

    Raises:
        OpError: ``not-verified``.
    """
    connection = docker.connect(call, docker_host)
    try:
        found = _get(connection, "/images/%s/json" % quote(image_id, safe=":"), "inspecting %s" % image_id)
    except OpError as error:
        raise OpError("not-verified", "the image is not there after loading: %s" % error.message) from None
    finally:
        connection.close()
    if found.get("RootFS", {}).get("Layers") != layers:
        raise OpError("not-verified", "the loaded image has other layers than the one that was sent")


OPS = {"ask": ask, "load": load}

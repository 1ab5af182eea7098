"""Images of Docker: what the head's own engine has, and which images gpurun has put on hosts."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict
from urllib.parse import quote

from gpurun.errors import BadInput, HostNotReady
from gpurun.node import docker
from gpurun.node.agent.frames import OpError
from gpurun.node.images import facts_of
from gpurun.remote import Agent, Fleet, Results

# The head's own Docker engine: properties and content of images.


# Docker's own grammar is stricter; this keeps anything out of a URL that is no reference.
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-/:@]{0,511}\Z")


@dataclass(frozen=True)
class HeadImage:
    """An image of the head.

    Attributes:
        reference: as the person wrote it.
        id: the engine's ID, ``sha256:…``.
        layers: diffIDs, lowest first.
        size_bytes: all layers unpacked, as the engine counts them.
        tags: every ``name:tag`` it has.
        facts: the facts of its configuration: see `gpurun.node.images.facts_of`.
        has_moved: the reference now means another image.
    """

    reference: str
    id: str
    layers: tuple[str, ...]
    size_bytes: int
    tags: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    has_moved: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tag that the image should have on hosts; none if it was requested by ID or digest, or lost its
        tag.
        """
        last = self.reference.rsplit("/", 1)[-1]
        if "@" in self.reference or self.id.removeprefix("sha256:").startswith(self.reference.removeprefix("sha256:")):
            return ()
        name = self.reference if ":" in last else f"{self.reference}:latest"
        return () if self.has_moved else (name,)

    def spec(self, config_id: str) -> dict[str, Any]:
        """Return the description for hosts. `config_id`: the digest of its configuration."""
        return {"id": config_id, "layers": list(self.layers), "names": list(self.names), "facts": dict(self.facts)}


class Engine:
    """The head's Docker engine over its Unix socket.

    Args:
        docker_host: as ``DOCKER_HOST``; None = the environment's, else Docker's default.
    """

    def __init__(self, docker_host: str | None) -> None:
        self._docker_host = docker_host

    def get(self, path: str) -> tuple[int, Any]:
        """Return the status and parsed answer of a GET.

        Raises:
            HostNotReady: the head's Docker does not answer.
        """
        return self.exchange("GET", path)

    def exchange(self, method: str, path: str, body: Any = None, timeout_s: float | None = 60.0) -> tuple[int, Any]:
        """Return the status and parsed answer of a request with a JSON body, or without a body.

        Raises:
            HostNotReady: the head's Docker does not answer.
        """
        connection = self._connect(timeout_s)
        try:
            status, answer = docker.exchange(connection, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise HostNotReady(f"the head's Docker did not finish its answer: {error}") from None
        finally:
            connection.close()
        return status, docker.parse_answer(answer)

    def image(self, reference: str, ident: str = "") -> HeadImage:
        """Return an image by name or ID.

        Args:
            ident: the ID of the image that the reference meant earlier; "" = what it means now.

        Raises:
            BadInput: there is no such image, or the reference is not valid.
        """
        if not _REFERENCE.match(reference):
            raise BadInput(f"{reference!r} is not a valid name of a Docker image")
        status, found = self.get(f"/images/{quote(ident or reference, safe='/:@')}/json")
        if ident and (status == 404 or not isinstance(found, dict)):
            raise BadInput(
                f"the image {ident[7:19]}, which had the name {reference} at submit, is no longer on the head",
                hint=f"submit the job again to use the image that has the name {reference} now",
            )
        if status == 404 or not isinstance(found, dict):
            raise BadInput(
                f"the image {reference} is not on the head",
                hint="build or pull the image on the head; `docker images` lists the head's images",
            )
        if status != 200:
            raise HostNotReady(f"the head's Docker cannot inspect {reference}: {found.get('message', status)}")
        return HeadImage(
            reference=reference,
            id=found["Id"],
            layers=tuple(found.get("RootFS", {}).get("Layers") or ()),
            size_bytes=int(found.get("Size", 0)),
            tags=tuple(found.get("RepoTags") or ()),
            facts=facts_of(found),
            has_moved=bool(ident) and not self._means(reference, found["Id"]),
        )

    def _means(self, reference: str, ident: str) -> bool:
        status, found = self.get(f"/images/{quote(reference, safe='/:@')}/json")
        return status == 200 and isinstance(found, dict) and found.get("Id") == ident

    def info(self) -> dict[str, Any]:
        """Return ``docker info``."""
        _, info = self.get("/info")
        return info if isinstance(info, dict) else {}

    def layer_sizes(self, image: HeadImage) -> dict[str, int]:
        """Estimate the bytes of each layer: the sizes in the image's history, else equal shares."""
        _, history = self.get(f"/images/{image.id}/history")
        sizes = [int(entry.get("Size", 0)) for entry in reversed(history or []) if isinstance(entry, dict)]
        # Steps without a layer are not told apart from empty layers, so the sizes are only sure if the counts agree.
        filled = [size for size in sizes if size > 0]
        if len(filled) != len(image.layers):
            filled = [image.size_bytes // max(1, len(image.layers))] * len(image.layers)
        return dict(zip(image.layers, filled, strict=True))

    def save(self, reference: str, piece_bytes: int = 1 << 20) -> Iterator[bytes]:
        """Yield the image as ``docker save`` writes it, in pieces.

        Raises:
            HostNotReady: the engine fails in the middle.
        """
        connection = self._connect(timeout_s=None)
        try:
            connection.request("GET", f"{docker.API}/images/{quote(reference, safe='/:@')}/get")
            response = connection.getresponse()
            if response.status != 200:
                raise HostNotReady(
                    f"docker save of {reference} fails on the head: status {response.status}, {response.read()[:500]!r}"
                )
            while piece := response.read(piece_bytes):
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise HostNotReady(f"docker save of {reference} did not finish on the head: {error}") from None
        finally:
            connection.close()

    def upload(self, path: str, tar: Iterable[bytes]) -> tuple[int, Any]:
        """PUT a tar in pieces; return the status and parsed answer.

        Raises:
            HostNotReady: the engine closes the connection.
        """
        connection = self._connect(timeout_s=None)
        try:
            headers = {"Content-Type": "application/x-tar", "Transfer-Encoding": "chunked"}
            connection.request("PUT", docker.API + path, body=iter(tar), headers=headers, encode_chunked=True)
            response = connection.getresponse()
            return response.status, docker.parse_answer(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise HostNotReady(f"the head's Docker did not finish its answer: {error}") from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float | None = 60.0) -> docker.Connection:
        try:
            return docker.open_engine(None, self._docker_host, timeout_s)
        except OpError as error:
            raise HostNotReady(
                f"on the head, {error.message}",
                hint="start Docker on the head, or set head.docker_host in the inventory to Docker's socket",
            ) from None


# List the images that gpurun has put on hosts, and remove those that no job uses.


LIMIT_S = 300.0


class PlacedImageShape(TypedDict):
    """An image that gpurun put on a host.

    Attributes:
        names: tags that gpurun gave the image.
        present: whether the image is still on the host.
        temporary: whether the image contains only layers of an interrupted copy.
        shipped_s: when gpurun copied the image, by the host's clock; null: unknown.
        used_by: containers that use the image.
    """

    id: str
    names: tuple[str, ...]
    present: bool
    temporary: bool
    shipped_s: float | None
    size_bytes: int
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """One image that gpurun put on one host.

    Attributes:
        id: the image's ID on the head.
        names: tags that gpurun gave it there and that still point to it.
        present: it is still there.
        temporary: it only holds layers of an interrupted ship.
        shipped_s: when, in seconds since the epoch, by the host's clock.
        used_by: containers, running or not.
        needed: a ship or a job that runs counts on it.
        freed: after pruning: whether the image itself is gone, not only gpurun's tags.
    """

    id: str
    names: tuple[str, ...]
    present: bool
    temporary: bool
    shipped_s: float | None
    size_bytes: int
    used_by: tuple[str, ...]
    needed: bool = False
    freed: bool = False

    def as_json(self) -> PlacedImageShape:
        """As ``gpurun images --json`` shows it."""
        return {
            "id": self.id,
            "names": self.names,
            "present": self.present,
            "temporary": self.temporary,
            "shipped_s": self.shipped_s,
            "size_bytes": self.size_bytes,
            "used_by": self.used_by,
        }


def placed(fleet: Fleet, hosts: Iterable[str]) -> Results[tuple[Placed, ...]]:
    """Return the images that gpurun has put on each host."""
    return fleet.map(lambda agent: _all(agent.call("images.listing", timeout_s=LIMIT_S).value), hosts)


def prune(fleet: Fleet, hosts: Iterable[str], keep: Iterable[str]) -> Results[tuple[Placed, ...]]:
    """Remove unused images that gpurun has put on hosts; return the removed images. Idempotent.

    Keeps images that others put there, that have a tag from others, that a container uses, or that a ship counts on.

    Args:
        keep: the head's IDs of images that jobs need.
    """
    kept = list(keep)

    def ask(agent: Agent) -> tuple[Placed, ...]:
        return _all(agent.call("images.prune", keep=kept, timeout_s=LIMIT_S).value)

    return fleet.map(ask, hosts)


def _all(found: Iterable[Mapping[str, Any]]) -> tuple[Placed, ...]:
    return tuple(
        Placed(
            id=said["id"],
            names=tuple(said["names"]),
            present=said["present"],
            temporary=said["temporary"],
            shipped_s=said["shipped_s"],
            size_bytes=said["size_bytes"],
            used_by=tuple(said["used_by"]),
            needed=bool(said.get("needed")),
            freed=bool(said.get("freed")),
        )
        for said in found
    )

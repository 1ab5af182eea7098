"""Look up an engine's images by its API, and find the one that equals the head's."""

import http.client
from typing import Any, Dict, Optional, Sequence
from urllib.parse import quote

from gpurun.node import docker
from gpurun.node.agent.call import Call, OpError
from gpurun.node.image import shipped

# What an image's configuration says that a container notices.
_CONFIG_KEYS = ("Env", "Cmd", "Entrypoint", "WorkingDir", "User", "Labels", "ExposedPorts", "Volumes", "StopSignal")

# What the head says about an image: ``{"id", "layers", "names", "facts"}``. See `gpurun.node.image.listing.ask`.
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
        parsed = docker.parse(answer) if status == 200 else None
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
        return docker.parse(answer)

    def _exchange(self, method: str, path: str) -> "tuple[int, bytes]":
        for last_try in (False, True):
            fresh = self._connection is None
            if self._connection is None:
                self._connection = docker.connect(self._call)
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
        recorded = shipped.read().get(image["id"], {}).get("local")
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

"""Tell the containers of jobs from those of images that somebody made of a job's container.

``docker commit`` copies a container's labels into the image, and from there into whatever starts from that image. Such
a container is no part of the job: it holds no GPU for it, and no fence removes it.
"""

import urllib.parse
from typing import Any, Callable, Dict, List, Tuple

from gpurun.node import docker

_JOB, _ATTEMPT = "gpurun.job", "gpurun.attempt"  # as `gpurun.node.gpu.claim_rules` writes them
Get = Callable[[str], Tuple[int, bytes]]
"""Asks the engine for a path; returns status and answer."""


def of_jobs(listed: List[Dict[str, Any]], get: Get) -> List[Dict[str, Any]]:
    """Return the containers, of those that Docker lists with a job's label, that are a job's."""
    return [each for each in listed if not _is_inherited(each, get)]


def _is_inherited(listed: Dict[str, Any], get: Get) -> bool:
    """Return whether a container has a job's labels from its image alone.

    One with a job's name has not. Without an answer about the image, a container counts as the job's.
    """
    labels = listed.get("Labels") or {}
    prefix = "/gpurun-%s-" % labels.get(_JOB)
    if any(str(name).startswith(prefix) for name in listed.get("Names") or ()):
        return False
    status, answer = get("/images/%s/json" % urllib.parse.quote(str(listed.get("ImageID")), safe=":"))
    image = docker.parse(answer) if status == 200 else None
    config = image.get("Config") if isinstance(image, dict) else None
    given = config.get("Labels") if isinstance(config, dict) else None
    return isinstance(given, dict) and all(given.get(name) == labels.get(name) for name in (_JOB, _ATTEMPT))

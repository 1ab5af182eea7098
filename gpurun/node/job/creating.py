"""Find out whether Docker may still be creating a container for a killed client.

A client can be killed while Docker creates its container, and Docker lists a container only at the end. So a note in
the job's folder contains the name of the container. gpurun removes the note when Docker has answered. If a fence finds
a note, it asks Docker for the name itself, because Docker first reserves a container's name, for one container at a
time.
"""

import json
import os
from typing import Any, Dict, List, Optional, Tuple

from gpurun.node import docker
from gpurun.node.agent.call import OpError
from gpurun.node.job import job_parts

NOTE = "creating.json"
_FAILED = 500


def begin(job: str, attempt: int, name: str) -> None:
    """Note that a container of this name is about to be created. The caller holds the job's lock."""
    with open(_path(job), "w", encoding="utf-8") as stream:
        json.dump({"attempt": attempt, "name": name}, stream)


def end(job: str) -> None:
    """Remove the note after Docker has answered. Idempotent."""
    try:
        os.unlink(_path(job))
    except FileNotFoundError:
        pass


def unsure(connection: docker.Connection, job: str, attempt: int) -> List[str]:
    """Return the names that Docker may still be creating for this or an earlier attempt. The caller holds the lock.

    Raises:
        OpError: Docker does not answer.
    """
    noted = _noted(job)
    if noted is None or noted[0] > attempt:
        return []
    if not _is_decided(connection, job, *noted):
        return [noted[1]]
    end(job)
    return []


def _is_decided(connection: docker.Connection, job: str, attempt: int, name: str) -> bool:
    """Return whether a container of this name is listed, or none is being created, because its name is available."""
    if any("/" + name in (each.get("Names") or ()) for each in job_parts.containers_of(connection, job)):
        return True
    status, answer = docker.exchange(connection, "GET", "/images/json")
    images = docker.parse(answer)
    if status != 200 or not isinstance(images, list):
        raise docker.failure(status, answer, "listing images")
    if not images:
        return True  # without an image no container is created
    labels = {job_parts.LABEL: job, "gpurun.attempt": str(attempt)}
    body: Dict[str, Any] = {"Image": images[0]["Id"], "Cmd": ["true"], "Labels": labels}
    status, answer = docker.exchange(connection, "POST", "/containers/create?name=" + name, body)
    if status == 409:  # listed by now, or soon
        return False
    if status == 201:
        docker.exchange(connection, "DELETE", "/containers/%s?force=1&v=1" % docker.parse(answer)["Id"])
    elif status < _FAILED:
        raise docker.failure(status, answer, "reserving the container name %s" % name)
    return True  # we had the name, if only for a moment: a disk may be full


def _path(job: str) -> str:
    return os.path.join(job_parts.folder(job), NOTE)


def _noted(job: str) -> Optional[Tuple[int, str]]:
    """Return the attempt and the name in the note; None if there is none."""
    try:
        with open(_path(job), encoding="utf-8") as stream:
            found = json.load(stream)
        return int(found["attempt"]), docker.checked_name(str(found["name"]))
    except (OSError, ValueError, TypeError, KeyError, OpError):
        return None

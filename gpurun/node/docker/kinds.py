"""What Docker's words mean: the kind of a failure to create or start a container. Pure."""

import re

_NO_ENGINE = re.compile(r"cannot connect to the docker daemon|error during connect|deadline exceeded", re.IGNORECASE)
_NO_MOUNT = re.compile(r"bind source path does not exist", re.IGNORECASE)
_NO_COMMAND = re.compile(
    r"executable file .*not found|\bexec:? [\"'`]?/?[^\"'`:]+[\"'`]?: (?:[^:]*: )*no such file", re.IGNORECASE
)
# The host's runtime could not be run, or one of its hooks.
_RUNTIME = re.compile(
    r"unable to retrieve oci runtime error|fork/exec|containerd-shim|nvidia"
    r"|exec:? [\"'`]?(?:[^\"'`\s:]*/)?(?:runc|crun|runsc|youki|kata-[\w-]+|docker-[\w-]+|containerd[\w-]*)\b",
    re.IGNORECASE,
)


def of_create(message: str) -> str:
    """Return the kind of what ``docker create`` said: ``no-docker``, ``no-image``, ``no-mount`` or ``docker``."""
    if _NO_ENGINE.search(message):
        return "no-docker"
    if "No such image" in message:
        return "no-image"
    return "no-mount" if _NO_MOUNT.search(message) else "docker"


def of_start(message: str) -> str:
    """Return the kind of what Docker said of a start: ``no-docker``, ``no-command`` or ``docker``.

    It is ``no-command`` only if the image lacks the main process's program, and never if the host's runtime fails.
    """
    if _NO_ENGINE.search(message):
        return "no-docker"
    return "no-command" if _NO_COMMAND.search(message) and not _RUNTIME.search(message) else "docker"

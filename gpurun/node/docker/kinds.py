"""What Docker's words mean: the kind of a failure to load an image, or to create or start a container. Pure.

The words come from issues of moby/moby, opencontainers/runc and NVIDIA/nvidia-container-toolkit.
"""

import re

_NO_ENGINE = re.compile(r"cannot connect to the docker daemon|error during connect|deadline exceeded", re.IGNORECASE)
_NO_MOUNT = re.compile(r"bind source path does not exist", re.IGNORECASE)
_NO_COMMAND = re.compile(
    r"executable file .*not found|\bexec:? [\"'`]?/?[^\"'`:]+[\"'`]?: (?:[^:]*: )*no such file", re.IGNORECASE
)
_FULL = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
# Of the host alone: its disk and memory, its engine and runtime, its driver. No job brings them about.
_OF_HOST = re.compile(
    r"no space left|quota exceeded|read-only file system|input/output error|structure needs cleaning|host is down"
    r"|stale (?:nfs )?file handle|transport endpoint is not connected|too many (?:open files|levels of symbolic links)"
    r"|cannot allocate memory|resource temporarily unavailable|device or resource busy|overlay mount"
    r"|mount(?:ing)? overlay|layer does not exist|layer not found|failed to (?:get|register) (?:read )?layer"
    r"|cgroup|message bus|\bdbus\b|org\.freedesktop|apparmor|keycreate"
    r"|containerd\.sock|ttrpc|transport is closing|connection (?:refused|reset)|broken pipe|context canceled"
    r"|start(?:ing)? shim|containerd-shim|shim socket|signal: killed|fork/exec|unable to retrieve oci runtime error"
    r"|exec:? [\"'`]?(?:[^\"'`\s:]*/)?(?:runc|crun|runsc|youki|kata-[\w-]+|docker-[\w-]+|containerd[\w-]*)\b"
    r"|runtime name|no such runtime|could not select device driver|cdi devices?\b|logging driver|create endpoint"
    r"|iptables|nvidia-c(?:ontainer|tk)[\w.-]*[\"']?: (?!requirement)|libnvidia|library version mismatch",
    re.IGNORECASE,
)
# Words of the host's that a mount, a memory limit or the image's own demands bring about.
_OF_JOB = re.compile(r"mountpoint|requirement error|container init was oom-killed", re.IGNORECASE)


def of_create(message: str) -> str:
    """Return the kind of what ``docker create`` said: ``no-docker``, ``engine``, ``no-image``, ``no-mount`` or
    ``docker``. ``engine`` is the host's failure, ``docker`` may be the job's.
    """
    if "No such image" in message:
        return "no-image"
    return "no-mount" if _NO_MOUNT.search(message) else _of(message)


def of_start(message: str) -> str:
    """Return the kind of what Docker said of a start: ``no-docker``, ``engine``, ``no-command`` or ``docker``.

    It is ``no-command`` only if the image lacks the main process's program, and never if the host's runtime fails.
    """
    kind = _of(message)
    return "no-command" if kind == "docker" and _NO_COMMAND.search(message) else kind


def of_load(message: str) -> str:
    """Return the kind of what ``docker load`` said: ``no-space``, ``no-docker``, ``engine`` or ``load-failed``."""
    if _FULL.search(message):
        return "no-space"
    kind = _of(message)
    return "load-failed" if kind == "docker" else kind


def _of(message: str) -> str:
    if _NO_ENGINE.search(message):
        return "no-docker"
    return "engine" if _OF_HOST.search(message) and not _OF_JOB.search(message) else "docker"

"""What the host's Docker engine says of itself, asked over its socket."""

import http.client
import json
import os
import re
import shutil
import socket
from typing import Any, Dict, Optional
from urllib.parse import quote

SOCKET = "/var/run/docker.sock"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
CAP_SYS_RESOURCE = 24  # linux/capability.h
HOOK = "nvidia-container-runtime-hook"


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(path: str, socket_path: str = SOCKET, timeout_s: float = 10.0) -> Any:
    """The JSON answer to one GET. Raises OSError or ValueError (no engine, no permission, no JSON)."""
    connection = _Connection(socket_path, timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise OSError("Docker answered %d to GET %s" % (response.status, path))
        return json.loads(body.decode("utf-8", "replace"))
    except http.client.HTTPException as error:
        raise OSError("Docker's answer to GET %s is not HTTP: %s" % (path, error)) from None
    finally:
        connection.close()


def facts(socket_path: str = SOCKET) -> Dict[str, Any]:
    """As `gpurun.facts.hardware.DockerFacts`; ``problem`` instead of an exception."""
    try:
        info = get("/info", socket_path)
    except PermissionError:
        return {"problem": "this user may not use %s" % socket_path}
    except (FileNotFoundError, ConnectionRefusedError):
        return {"problem": "no Docker engine answers at %s" % socket_path}
    except (OSError, ValueError) as error:
        return {"problem": "%s: %s" % (type(error).__name__, error)}
    if not isinstance(info, dict) or not info.get("ServerVersion"):
        return {"problem": "what answers at %s is not Docker" % socket_path}
    root = str(info.get("DockerRootDir") or "")
    return {
        "version": str(info.get("ServerVersion") or ""),
        "storage_driver": str(info.get("Driver") or ""),
        "root": root,
        "gpu_support": gpu_support(info),
        **_space(root),
        **engine_limits(),
    }


def engine_limits(proc: str = "/proc") -> Dict[str, Any]:
    """Which limits the engine's containers can get: its own hard ones, or any, if it may raise them.

    runc sets a container's limits with the engine's rights; more than the hard limit needs CAP_SYS_RESOURCE
    (setrlimit(2)), which an engine in a container, a rootless one, or a restricted systemd unit may lack.
    """
    for pid in os.listdir(proc):
        if pid.isdigit() and _read(proc, pid, "comm").strip() == "dockerd":
            limits = _read(proc, pid, "limits")
            return {
                "memlock_bytes": hard_limit(limits, "Max locked memory"),
                "nofile": hard_limit(limits, "Max open files"),
                "may_raise_limits": has_capability(_read(proc, pid, "status"), "CapEff"),
            }
    return {}


def hard_limit(limits: str, name: str) -> Optional[int]:
    """A hard limit from ``/proc/PID/limits``; -1 = unlimited, None = not there."""
    match = re.search(re.escape(name) + r"\s+\S+\s+(unlimited|\d+)", limits)
    return None if not match else -1 if match.group(1) == "unlimited" else int(match.group(1))


def has_capability(status: str, which: str, bit: int = CAP_SYS_RESOURCE) -> Optional[bool]:
    """Whether a capability is in a set of ``/proc/PID/status``; None = not there."""
    match = re.search(which + r":\s*([0-9a-f]+)", status)
    return bool(int(match.group(1), 16) >> bit & 1) if match else None


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 14)
    except OSError:
        return ""


def gpu_support(info: Dict[str, Any]) -> str:
    """How ``docker run --gpus`` would work.

    Docker's own order: a registered ``nvidia`` runtime, CDI specifications (since 25), or the container toolkit's
    hook on the engine's PATH, which the engine looks up when it starts (moby `daemon/nvidia_linux.go`).
    """
    if "nvidia" in (info.get("Runtimes") or {}):
        return "runtime"
    for folder in info.get("CDISpecDirs") or CDI_FOLDERS:
        if _has_nvidia_spec(folder):
            return "cdi"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"])
    return "hook" if shutil.which(HOOK, path=path) else ""


def _has_nvidia_spec(folder: str) -> bool:
    try:
        return any("nvidia" in name for name in os.listdir(folder))
    except OSError:
        return False


def _space(root: str) -> Dict[str, Any]:
    try:
        found = os.statvfs(root)
    except OSError:
        return {"free_bytes": None, "total_bytes": None}
    return {"free_bytes": found.f_bavail * found.f_frsize, "total_bytes": found.f_blocks * found.f_frsize}


def job_containers(socket_path: str = SOCKET) -> Dict[str, str]:
    """Container id → gpurun job id, of the running containers of gpurun jobs; empty if Docker does not say."""
    filters = quote(json.dumps({"label": ["gpurun.job"]}))
    try:
        found = get("/containers/json?filters=" + filters, socket_path)
        return {str(one["Id"]): str(one["Labels"]["gpurun.job"]) for one in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

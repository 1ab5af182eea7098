"""Facts about the host's Docker engine, from its socket."""

import http.client
import json
import os
import re
import shutil
import socket
from typing import Any, Dict, Optional, Tuple
from urllib.parse import quote

from gpurun.node import docker
from gpurun.node.agent.call import OpError
from gpurun.node.docker import engine
from gpurun.node.docker.job_containers import of_jobs

ANSWER_TIMEOUT_S, VERSION_TIMEOUT_S = 10.0, 4.0
"""An engine that has answered the first question answers the second at once. Both end before the probe does."""

CAP_SYS_RESOURCE = 24  # linux/capability.h
HOOK, CDI_HOOK = "nvidia-container-runtime-hook", "nvidia-cdi-hook"
CDI_SINCE = 28


def get(path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Return the JSON answer to one GET. Raises OSError or ValueError (no engine, no permission, no JSON)."""
    status, answer = _exchange(path, timeout_s)
    if status != 200:
        raise OSError("Docker answered %d to GET %s" % (status, path))
    return json.loads(answer.decode("utf-8", "replace"))


def _exchange(path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Tuple[int, bytes]:
    connection = docker.Connection(docker.socket_path(), timeout_s)
    try:
        return docker.exchange(connection, "GET", path)
    except http.client.HTTPException as error:
        raise OSError("Docker's answer to GET %s is not HTTP: %s" % (path, error)) from None
    finally:
        connection.close()


def facts() -> Dict[str, Any]:
    """Return `gpurun.facts.hardware.DockerFacts`, with ``problem`` instead of an exception."""
    try:
        path = docker.socket_path()
        info = _docker_info(path)
    except OpError as error:
        return {"problem": error.message}
    rootless, limits = engine.is_rootless(info), engine_limits(_pid_of_engine(path))
    if rootless:  # its capabilities count in its own user namespace alone (user_namespaces(7))
        limits["may_raise_limits"] = False
    root = engine.image_root(info)
    return {
        "socket": path,
        "version": str(info.get("ServerVersion") or ""),
        "storage_driver": str(info.get("Driver") or ""),
        "architecture": str(info.get("Architecture") or ""),
        "root": root,
        "gpu_support": gpu_support(info),
        "is_rootless": rootless,
        **_space(root),
        **_share(info),
        **limits,
    }


def _docker_info(path: str) -> Dict[str, Any]:
    """Return ``docker info``. Raises OpError with a message that people can act on."""
    try:
        info, version = get("/info"), get("/version", VERSION_TIMEOUT_S)
    except PermissionError:
        problem = "this user may not use %s" % path
    except (FileNotFoundError, ConnectionRefusedError):
        problem = "no Docker engine answers at %s" % path
    except socket.timeout:
        problem = "the Docker engine at %s does not answer within %g s" % (path, ANSWER_TIMEOUT_S)
    except (OSError, ValueError) as error:
        problem = "%s: %s" % (type(error).__name__, error)
    else:
        if _is_podman(version):
            problem = "Podman answers at %s: gpurun needs Docker's own engine" % path
        elif not isinstance(info, dict) or not info.get("ServerVersion"):
            problem = "the program that answers at %s is not Docker" % path
        else:
            return info
    raise OpError("no-docker", problem)


def _is_podman(version: Any) -> bool:
    components = version.get("Components") if isinstance(version, dict) else None
    return any(isinstance(one, dict) and "Podman" in str(one.get("Name")) for one in components or ())


def engine_limits(pid: Optional[int], proc: str = "/proc") -> Dict[str, Any]:
    """Return the limits that the engine's containers can get, and whether they share this host's network.

    These are the engine's own hard limits, or any limit if it may raise them. runc sets a container's limits with the
    engine's rights. More than the hard limit needs CAP_SYS_RESOURCE (setrlimit(2)), which an engine in a container, a
    rootless engine, or a restricted systemd unit may lack.
    """
    if pid is None:
        return {}
    limits = _read(proc, str(pid), "limits")
    return {
        "memlock_bytes": hard_limit(limits, "Max locked memory"),
        "nofile": hard_limit(limits, "Max open files"),
        "may_raise_limits": has_capability(_read(proc, str(pid), "status"), "CapEff"),
        "has_own_network": _differ(os.path.join(proc, str(pid), "ns/net"), os.path.join(proc, "self/ns/net")),
    }


def _pid_of_engine(socket_path: str) -> Optional[int]:
    try:
        process = engine.serving(socket_path)
    except (OSError, engine.NoEngine):
        return None
    return None if process is None else process.pid


def _differ(one: str, other: str) -> Optional[bool]:
    try:
        return os.readlink(one) != os.readlink(other)
    except OSError:  # of another user: then it is no rootless one of ours
        return None


def hard_limit(limits: str, name: str) -> Optional[int]:
    """Return a hard limit from ``/proc/PID/limits``; -1 = unlimited, None = not there."""
    match = re.search(re.escape(name) + r"\s+\S+\s+(unlimited|\d+)", limits)
    return None if not match else -1 if match.group(1) == "unlimited" else int(match.group(1))


def has_capability(status: str, which: str, bit: int = CAP_SYS_RESOURCE) -> Optional[bool]:
    """Return whether a capability is in a set of ``/proc/PID/status``; None = not there."""
    match = re.search(which + r":\s*([0-9a-f]+)", status)
    return bool(int(match.group(1), 16) >> bit & 1) if match else None


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 14)
    except OSError:
        return ""


def gpu_support(info: Dict[str, Any]) -> str:
    """Return how ``docker run --gpus`` would work.

    In Docker's own order: CDI, a registered ``nvidia`` runtime, or the container toolkit's hook on the engine's PATH,
    which the engine looks up when it starts (moby `daemon/nvidia_linux.go`).

    ``--gpus`` uses CDI only since moby's pull request 50228 (opened in June 2025; some releases of 28 lack it), with
    CDI switched on, and with the toolkit's `nvidia-cdi-hook` on the engine's PATH. Engines since 25 that have a CDI
    file alone take only ``--device nvidia.com/gpu=0``.
    """
    folders = info.get("CDISpecDirs") or ()
    version = re.match(r"(\d{1,4})\.", str(info.get("ServerVersion")))
    is_new = version is not None and int(version.group(1)) >= CDI_SINCE
    if is_new and _is_there(CDI_HOOK) and any(_has_nvidia_spec(folder) for folder in folders):
        return "cdi"
    if "nvidia" in (info.get("Runtimes") or {}):
        return "runtime"
    return "hook" if _is_there(HOOK) else ""


def _is_there(program: str) -> bool:
    """Return whether the engine finds a program of the toolkit."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"])
    return shutil.which(program, path=path) is not None


def _has_nvidia_spec(folder: str) -> bool:
    try:
        return any("nvidia" in name for name in os.listdir(folder))
    except OSError:
        return False


def _share(info: Dict[str, Any]) -> Dict[str, Any]:
    """Return what the engine has for containers, and whether it can limit it; None for what it does not say."""
    memory, cores, limits = info.get("MemTotal"), info.get("NCPU"), info.get("MemoryLimit")
    return {
        "memory_bytes": memory if isinstance(memory, int) and memory > 0 else None,
        "cores": cores if isinstance(cores, int) and cores > 0 else None,
        "limits_memory": limits if isinstance(limits, bool) else None,
    }


def _space(root: str) -> Dict[str, Any]:
    try:
        found = os.statvfs(root)
    except OSError:
        return {"free_bytes": None, "total_bytes": None}
    return {"free_bytes": found.f_bavail * found.f_frsize, "total_bytes": found.f_blocks * found.f_frsize}


def job_containers() -> Dict[str, str]:
    """Return container id → gpurun job id for running containers of gpurun jobs; empty if Docker does not say."""
    filters = quote(json.dumps({"label": ["gpurun.job"]}))
    try:
        found = of_jobs(get("/containers/json?filters=" + filters), _exchange)
        return {str(one["Id"]): str(one["Labels"]["gpurun.job"]) for one in found}
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

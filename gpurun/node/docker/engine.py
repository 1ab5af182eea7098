"""Identify the Docker engine of this host: the process behind its socket, and whether it is the one that started a job.

If an engine stops without live-restore, it ends its containers with signals that any process could have sent, and a
container's state does not say who did. But another process behind the socket is clear evidence.
"""

import http.client
import os
import re
import socket
import struct
import time
from typing import Any, Dict, List, Optional

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpError

CONTAINERD_ROOT, CONTAINERD_CONFIG = "/var/lib/containerd", "/etc/containerd/config.toml"
FILE = "engine.json"
"""In a job's folder: the engine that its container was created by."""
ANSWER_S = 20.0
"""How long an engine may take to answer: while it restarts, systemd holds the socket and requests wait."""
LIVES_S = 2.0
"""The same while the engine process of the job's start lives. A stopping engine refuses requests; this one is slow."""
_LARGEST_GROUP = (1 << 31) - 1
"""Docker refuses larger numbers in ``--group-add``."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (man 7 unix)


class NoEngine(Exception):
    """Nothing answers on the socket, although an engine did when the job started."""


class SilentEngine(NoEngine):
    """Something accepts connections, but does not answer."""


def is_rootless(info: Any) -> bool:
    """Return whether the engine runs as a user. Uid 0 in a container is then that user (docs.docker.com, "rootless").

    Args:
        info: the answer of ``docker info``.
    """
    options = info.get("SecurityOptions") if isinstance(info, dict) else None
    return any(str(option).startswith("name=rootless") for option in options or ())


def is_containerd(info: Any) -> bool:
    """Return whether an engine (by its ``docker info``) keeps images in the containerd image store."""
    kinds = dict(item for item in info.get("DriverStatus") or [] if len(item) == 2)
    return str(kinds.get("driver-type", "")).startswith("io.containerd.snapshotter")


def image_root(info: Dict[str, Any], config: str = "") -> str:
    """Return the folder on whose disk images and containers lie; "" if the engine does not say.

    With the containerd image store, that is containerd's own folder, which ``DockerRootDir`` does not move
    (docs.docker.com, "containerd image store"). Only a containerd that dockerd itself has started lies below it.
    """
    root = str(info.get("DockerRootDir") or "")
    said = info.get("Containerd")
    address = str(said.get("Address") if isinstance(said, dict) else "")
    if not is_containerd(info) or not address.startswith("/") or "/docker/" in address:
        return root
    try:
        with open(config or CONTAINERD_CONFIG, encoding="utf-8", errors="replace") as stream:
            before_tables = re.split(r"^\s*\[", stream.read(1 << 16), maxsplit=1, flags=re.MULTILINE)[0]
    except OSError:
        before_tables = ""
    moved = re.search(r"^\s*root\s*=\s*[\"'](/[^\"'\n]*)[\"']", before_tables, re.MULTILINE)
    return moved.group(1) if moved else CONTAINERD_ROOT


def container_user(call: Call) -> "tuple[int, int, List[int]]":
    """Return uid, gid and supplementary groups of this user's processes in a container.

    Assumes an ordinary engine if it is silent. In a container of a rootless engine, other numbers mean other groups.
    """
    try:
        answer = docker.request(call, "GET", "/info").value["json"]
    except (OSError, OpError):
        answer = None
    if is_rootless(answer):
        return 0, 0, []
    others = set(os.getgroups()) - {os.getgid()}
    return os.getuid(), os.getgid(), sorted(gid for gid in others if gid <= _LARGEST_GROUP)


def note(call: Call, folder: str) -> None:
    """Write into a job's folder which engine serves now. Leaves out what cannot be known."""
    try:
        engine = serving(docker.socket_path(), call)
    except (OSError, NoEngine):
        engine = None
    processes.note(os.path.join(folder, FILE), engine)


def compare(call: Call, folder: str) -> Dict[str, Any]:
    """Compare the present engine with the one that `note` saw.

    Returns:
        ``{"state", "up_s", "why"}``: ``state`` is ``same``, ``restarted`` (with the seconds since the present engine
        started), ``gone`` (with the reason), or ``unknown``: /proc does not show it, or there is no note.
    """
    noted = processes.noted(os.path.join(folder, FILE))
    process = None if noted is None else processes.read_process(noted[0])
    lives = process is not None and (process.pid, process.started) == noted
    try:
        engine = serving(docker.socket_path(), call, LIVES_S if lives else ANSWER_S)
    except NoEngine as error:
        frozen = lives and isinstance(error, SilentEngine)
        return {"state": "same" if frozen else "gone", "up_s": None, "why": str(error)}
    except OSError as error:  # no leave to ask, say
        return {"state": "unknown", "up_s": None, "why": str(error)}
    if engine is None or noted is None:
        return {"state": "unknown", "up_s": None, "why": "no process that serves Docker's socket is known"}
    if noted == (engine.pid, engine.started):
        return {"state": "same", "up_s": None, "why": ""}
    up_s = _since_boot_s() - engine.started / os.sysconf("SC_CLK_TCK")
    return {
        "state": "restarted",
        "up_s": up_s,
        "why": "dockerd restarted: its pid was %d and is now %d" % (noted[0], engine.pid),
    }


def serving(path: str, call: Optional[Call] = None, answer_s: float = ANSWER_S) -> Optional[processes.Process]:
    """Return the process of the engine that answers on a socket; None if it cannot be seen.

    Raises:
        NoEngine: none answers within `answer_s`. OSError: the socket may not be used.
    """
    connection = docker.Connection(path, answer_s)
    try:
        connection.connect()
        if call is not None:
            call.on_cancel(connection.abort)
        size = _CREDENTIALS.size
        pid = _CREDENTIALS.unpack(connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
        docker.exchange(connection, "GET", "/_ping")
    except (FileNotFoundError, ConnectionError, socket.timeout, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        kind = SilentEngine if isinstance(error, socket.timeout) else NoEngine
        raise kind("Docker does not answer on %s: %s" % (path, reason)) from None
    finally:
        connection.close()
    process = processes.read_process(pid) if pid > 1 else None
    # For a socket that systemd made, the kernel names systemd.
    return process if process is not None and _name(process) != "systemd" else _only_dockerd()


def _only_dockerd() -> Optional[processes.Process]:
    found = [process for process in processes.list_processes() if _name(process) == "dockerd"]
    return found[0] if len(found) == 1 else None


def _name(process: processes.Process) -> str:
    return os.path.basename(process.command.split(" ")[0])


def _since_boot_s() -> float:
    """Return the seconds since boot, on the clock of a process's start time (man proc_pid_stat: CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

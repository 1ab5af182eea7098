"""The head's Docker engine: the installed engine, or one that the lab starts.

The head builds and ships images, so it needs an engine. If no engine answers on Docker's default socket, this module
runs one below gpurun's cache folder. Data, log and socket are in one folder. The engine has no bridge and no firewall
rules (containers and builds use ``--network host``). It runs in its own mount and PID namespace, so that the end of its
process 1 ends every shim and unmounts every layer.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.lab import process
from gpurun.lab.inside.init import Service
from gpurun.lab.process import SYSTEM_PATH, Cgroup, LabFailed, ProcessId, find_program, lab_alone, require, spawn_init
from gpurun.lab.spec import engine_folder

_START_TIMEOUT_S = 30.0
_STOP_GRACE_S = 20.0
_LONGEST_SOCKET_PATH = 107  # bytes: sun_path in unix(7)


def ensure(*, keep: bool = True) -> str:
    """Return the ``DOCKER_HOST`` of an engine that answers. Starts the lab's own engine if there is none.

    Idempotent, and safe to call from several processes at once.

    Args:
        keep: an engine that this call starts runs until `stop`, not only until the last lab is down.

    Raises:
        NotInstalled: not root, or a program is missing.
        LabFailed: the engine did not answer in time; the hint names its log.
    """
    found = running()
    if found is not None and not (keep and found == _address(engine_folder())):
        return found
    require("dockerd", "containerd", "runc", "unshare")
    folder = engine_folder()
    with lab_alone(folder / "lock"):
        found = running() or _start(folder)
        if keep and found == _address(folder):
            _kept(folder).touch()
        return found


def running() -> str | None:
    """Return the ``DOCKER_HOST`` of the engine that answers, Docker's default socket first; None if none answers."""
    for path in (process.DEFAULT_SOCKET, _socket(engine_folder())):
        if process.answers(path):
            return f"unix://{path}"
    return None


def release_engine() -> None:
    """Stop the engine if only labs use it. Call this when the last lab is down."""
    if not _kept(engine_folder()).exists():
        stop_engine()


def stop_engine() -> bool:
    """Stop the lab's own engine and remove everything except its data; False if it did not run.

    Never touches an engine that the lab did not start.
    """
    folder = engine_folder()
    if not folder.is_dir():
        return False
    with lab_alone(folder / "lock"):
        init = ProcessId.load(_record(folder))
        ran = init is not None and init.alive()
        if init is not None:
            init.end(_STOP_GRACE_S)
        _cgroup(folder).remove()
        if ran:
            _socket(folder).unlink(missing_ok=True)
        _record(folder).unlink(missing_ok=True)
        _kept(folder).unlink(missing_ok=True)
        return ran


def _start(folder: Path) -> str:
    socket_path = _socket(folder)
    if len(os.fsencode(socket_path)) > _LONGEST_SOCKET_PATH:
        raise BadInput(
            f"the path of the engine's socket is too long for a Unix socket: {socket_path}",
            hint="set XDG_CACHE_HOME to a folder with a shorter path",
        )
    init = spawn_init(
        "gpurun.lab.inside.engine",
        [json.dumps(asdict(_service(folder)))],
        record=_record(folder),
        log=folder / "log",
    )
    if not process.wait_until_it_answers(socket_path, timeout_s=_START_TIMEOUT_S):
        init.end(0)
        raise LabFailed(
            f"the head's Docker engine did not answer within {_START_TIMEOUT_S:.0f} s",
            hint=f"read the end of the log {folder / 'log'}",
        )
    return _address(folder)


def _service(folder: Path) -> Service:
    pid_file, run = folder / "docker.pid", folder / "run"
    return Service(
        name="dockerd",
        argv=(
            find_program("dockerd") or "dockerd",
            f"--data-root={folder / 'data'}",
            f"--exec-root={run}",
            f"--host=unix://{_socket(folder)}",
            f"--pidfile={pid_file}",
            f"--cgroup-parent={_cgroup(folder).path}",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--ip-forward=false",
        ),
        log=str(folder / "log"),
        env={"PATH": f"{SYSTEM_PATH}:{os.environ.get('PATH', '')}", "HOME": "/root"},
        stale=(str(pid_file), str(run / "containerd" / "containerd.pid")),
    )


def _cgroup(folder: Path) -> Cgroup:
    """Return the engine's cgroup. Each folder has its own, so that engines of several users stay separate."""
    return Cgroup(f"gpurun-engine/{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}")


def _address(folder: Path) -> str:
    return f"unix://{_socket(folder)}"


def _socket(folder: Path) -> Path:
    return folder / "docker.sock"


def _kept(folder: Path) -> Path:
    return folder / "keep"


def _record(folder: Path) -> Path:
    return folder / "init.json"

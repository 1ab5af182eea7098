"""The head's Docker engine: the one that is there, else one that the lab starts.

Images are built on the head and shipped from it, so the head needs an engine. Where none answers on
Docker's default socket, this module keeps one of its own under gpurun's cache: data, log and socket in one
folder, no bridge, no firewall rules (containers and builds use ``--network host``), in its own mount and PID
namespace, so that ending its process 1 ends every shim and unmounts every layer.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.lab import docker_socket
from gpurun.lab.cgroups import Cgroup
from gpurun.lab.errors import LabFailed
from gpurun.lab.paths import engine_folder
from gpurun.lab.process import ProcessId
from gpurun.lab.requirements import SYSTEM_PATH, find, require

_START_TIMEOUT_S = 30.0
_STOP_GRACE_S = 20.0
_LONGEST_SOCKET_PATH = 107  # bytes: sun_path in unix(7)
_CGROUP = Cgroup("gpurun-engine")


def ensure() -> str:
    """Return the ``DOCKER_HOST`` of an engine that answers, starting the lab's own where there is none.

    Idempotent, and safe to call from several processes at once.

    Raises:
        NotInstalled: not root, or a program is missing.
        LabFailed: the engine did not answer in time; says where its log is.
    """
    found = running()
    if found is not None:
        return found
    require("dockerd", "containerd", "runc", "unshare")
    folder = engine_folder()
    with _alone(folder):
        return running() or _start(folder)


def running() -> str | None:
    """``DOCKER_HOST`` of the engine that answers now: Docker's default socket first; None if none does."""
    for path in (docker_socket.DEFAULT_SOCKET, _socket(engine_folder())):
        if docker_socket.answers(path):
            return f"unix://{path}"
    return None


def stop() -> bool:
    """Stop the lab's own engine and leave nothing of it but its data; False if it did not run.

    Never touches an engine that the lab did not start.
    """
    folder = engine_folder()
    if not folder.is_dir():
        return False
    with _alone(folder):
        init = ProcessId.load(_record(folder))
        ran = init is not None and init.alive()
        if init is not None:
            init.end(_STOP_GRACE_S)
        _CGROUP.remove()
        for left in (_record(folder), _socket(folder)):
            if ran:
                left.unlink(missing_ok=True)
        return ran


def _start(folder: Path) -> str:
    socket_path = _socket(folder)
    if len(os.fsencode(socket_path)) > _LONGEST_SOCKET_PATH:
        raise BadInput(
            f"the path of the engine's socket is too long for a Unix socket: {socket_path}",
            hint="set XDG_CACHE_HOME to a shorter path",
        )
    record = _record(folder)
    record.unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"),
                *(sys.executable, "-m", "gpurun.lab.inside.engine"),
                *(str(record), json.dumps(_service(folder))),
            ],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    if not docker_socket.wait_until_it_answers(socket_path, timeout_s=_START_TIMEOUT_S):
        started = ProcessId.load(record)
        if started is not None:
            started.end(0)
        raise LabFailed(
            f"the head's Docker engine did not answer within {_START_TIMEOUT_S:.0f} s",
            hint=f"read the end of {folder / 'log'}",
        )
    return f"unix://{socket_path}"


def _service(folder: Path) -> dict[str, object]:
    """The engine's dockerd, as `gpurun.lab.inside.init.Service` has it."""
    pid_file = folder / "docker.pid"
    run = folder / "run"
    return {
        "name": "dockerd",
        "argv": [
            find("dockerd"),
            f"--data-root={folder / 'data'}",
            f"--exec-root={run}",
            f"--host=unix://{_socket(folder)}",
            f"--pidfile={pid_file}",
            f"--cgroup-parent={_CGROUP.path}",
            "--bridge=none",
            "--iptables=false",
            "--ip-forward=false",
        ],
        "log": str(folder / "log"),
        "env": {"PATH": f"{SYSTEM_PATH}:{os.environ.get('PATH', '')}", "HOME": "/root"},
        "stale": [str(pid_file), str(run / "containerd" / "containerd.pid")],
    }


def _socket(folder: Path) -> Path:
    return folder / "docker.sock"


def _record(folder: Path) -> Path:
    return folder / "init.json"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the engine's lock: one start or stop at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

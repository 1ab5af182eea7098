"""A small init: starts services, reaps every orphan, restarts services that end, ends all on SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_RESTART_AFTER_S = 1.0
_HEARD = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True)
class Service:
    """A program that init keeps running.

    Attributes:
        argv: the program, absolute, and its arguments.
        log: file to which its stdout and stderr are appended.
        stale: files that a crashed run leaves behind and that prevent the next start, such as a pid file.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    stale: tuple[str, ...] = ()


def hold_signals() -> None:
    """Block signals until `supervise` reads them. Process 1 would lose signals without a handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


def supervise(services: Sequence[Service], *, grace_s: float) -> None:
    """Act as init until SIGTERM; then end the services, last started first, and return.

    When process 1 exits, the kernel kills all other processes of the PID namespace.

    Args:
        grace_s: how long each service may take to end before SIGKILL.
    """
    hold_signals()
    running = {_start(service): service for service in services}
    due: dict[Service, float] = {}
    while True:
        heard = signal.sigtimedwait(_HEARD, _until(due))
        for pid in _reap():
            if pid in running:
                due[running.pop(pid)] = time.monotonic() + _RESTART_AFTER_S
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            break
        for service in [service for service, at in due.items() if at <= time.monotonic()]:
            del due[service]
            running[_start(service)] = service
    for pid in reversed(running):
        _end(pid, grace_s)


def _start(service: Service) -> int:
    for path in service.stale:
        Path(path).unlink(missing_ok=True)
    Path(service.log).parent.mkdir(parents=True, exist_ok=True)
    return os.posix_spawn(
        service.argv[0],
        service.argv,
        dict(service.env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, service.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
    )


def _until(due: Mapping[Service, float]) -> float:
    """Return the seconds until the next restart is due; an hour if none is due."""
    return max(0.0, min(due.values()) - time.monotonic()) if due else 3600.0


def _reap() -> list[int]:
    """Collect every child that has ended, including adopted children."""
    ended: list[int] = []
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


def _end(pid: int, grace_s: float) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if pid in _reap():
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
    os.kill(pid, signal.SIGKILL)

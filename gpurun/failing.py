"""Calls that fail once: the twin of `gpurun.faults` for a process that fails and lives on.

``GPURUN_FAIL=ROLE:N`` lets the N-th call of a process of that role fail, once, and writes to stderr which one it was.
Calls are those by which gpurun opens, examines, writes, syncs, names and locks files below its state directory, and by
which it starts processes. Only tests set the variable, or use `Calls` themselves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

CALLS = {
    "open": errno.EMFILE, "write": errno.ENOSPC, "pwrite": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.ENOSPC,
    "link": errno.ENOSPC, "mkdir": errno.ENOSPC, "unlink": errno.EIO, "listdir": errno.EIO,
    "fstat": errno.EIO,
}  # fmt: skip
"""Functions of `os` → the error with which they fail."""
CALL_DEPTH = 6
PACKAGE = f"{Path(__file__).parent}/"


class Calls:
    """Counts calls, and lets the n-th fail.

    Attributes:
        home: only calls below this folder count.
        left: calls until the one that fails; 0 = none fails.
        failed: the call that failed and where it was made; "" if none has.
        counts: whether calls count just now.
        says: write the call that fails to stderr.
        on_call: gets the place of each call that counts.
    """

    def __init__(self, home: Path, left: int, on_call: Callable[[str], object] | None = None) -> None:
        self.home = os.path.realpath(home)
        self.left = left
        self.on_call = on_call
        self.failed = ""
        self.counts = True
        self.says = False

    @contextmanager
    def installed(self) -> Iterator[Calls]:
        """Stand in the place of these functions for a while."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _, _ in _REPLACED]
        try:
            self.install()
            yield self
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def install(self) -> None:
        """Stand in the place of these functions."""
        for owner, name, number, is_below in _REPLACED:
            setattr(owner, name, self._failing(name, getattr(owner, name), number, is_below))

    def _failing(self, name: str, real: Any, number: int, is_below: Callable[..., bool]) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.left and self.counts and _is_own_code() and is_below(self.home, *arguments, **named):
                self.left -= 1
                if self.on_call is not None:
                    self.on_call(_place())
                if not self.left:
                    self.failed = f"{name} at {_place()}"
                    if self.says:
                        os.write(2, f"fault: {self.failed} fails\n".encode())
                    raise OSError(number, os.strerror(number))
            return real(*arguments, **named)

        return call


def arm_failure(role: str) -> None:
    """Let a call of this process fail, if ``GPURUN_FAIL`` says so."""
    wanted, _, count = os.environ.get("GPURUN_FAIL", "").partition(":")
    if wanted == role and count.isdigit():
        calls = Calls(Path(os.environ["GPURUN_HOME"]), int(count))
        calls.says = True
        calls.install()


def _is_own_code() -> bool:
    """Return whether gpurun makes the call, not a test that looks at its files."""
    return sys._getframe(2).f_code.co_filename.startswith(PACKAGE)


def _is_path_below(
    home: str, path: Any, *_: Any, dir_fd: int | None = None, src_dir_fd: int | None = None, **__: Any
) -> bool:
    folder = dir_fd if dir_fd is not None else src_dir_fd
    if isinstance(path, int):
        return _is_open_below(home, path)
    if folder is not None:
        return _is_open_below(home, folder)
    return os.fspath(path).startswith(home) if isinstance(path, (str, os.PathLike)) else False


def _is_open_below(home: str, descriptor: int, *_: Any, **__: Any) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(home)  # noqa: PTH115 (of no link)
    except OSError:
        return False


def _is_gpuruns(_home: str, argv: Any, *_: Any, **__: Any) -> bool:
    return isinstance(argv, list) and argv[0] == sys.executable and argv[1][:2] in ("-m", "-c")


_REPLACED: tuple[tuple[Any, str, int, Callable[..., bool]], ...] = (
    *((os, name, number, _is_path_below) for name, number in CALLS.items()),
    (fcntl, "fcntl", errno.ENOLCK, _is_open_below),
    (subprocess, "Popen", errno.EAGAIN, _is_gpuruns),
)


def _place() -> str:
    """Return the callers of the failing call, innermost first, as ``file.function:line``."""
    frame: FrameType | None = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < CALL_DEPTH:
        if Path(frame.f_code.co_filename).stem not in ("path", "contextlib"):
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)

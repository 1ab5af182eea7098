"""Fault points: places where the crash tests kill real processes between two steps.

``GPURUN_FAULT=ROLE:N`` kills a process of that role (``command``, ``supervisor`` or ``waiter``) with SIGKILL at its
N-th fault point. The process first writes the point to stderr. Without the variable, a fault point costs one
comparison. `gpurun.failing` is the twin for a process that fails and lives on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

DEPTH = 4
"""How many callers tell one place from another: most points are in `durable`."""


class _Fault:
    def __init__(self) -> None:
        self.left = 0
        self.role = ""

    def arm(self, role: str) -> None:
        wanted, _, count = os.environ.get("GPURUN_FAULT", "").partition(":")
        self.left = int(count) if wanted == role and count.isdigit() else 0
        self.role = role
        if "GPURUN_FAIL" in os.environ:
            from gpurun import failing  # noqa: PLC0415 (tests alone need it)

            failing.arm_failure(role)

    def point(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                os.write(2, f"fault: {self.role} killed at {_place()}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)


def _place() -> str:
    """Return the call stack of the fault point, innermost first, as ``file.function:line``."""
    frame = sys._getframe(2)
    names = []
    for _ in range(DEPTH):
        names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " < ".join(names)


_FAULT = _Fault()
arm_fault = _FAULT.arm
"""Called once by each kind of process, with its role."""
point = _FAULT.point
"""A place between two steps."""

"""Places where a process may die, for the crash tests: real code, really killed, between any two steps.

``GPURUN_FAULT=ROLE:N`` kills a process of that role (``command``, ``supervisor`` or ``waiter``) with SIGKILL at its
N-th fault point. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal


class _Fault:
    def __init__(self) -> None:
        self.left = 0

    def arm(self, role: str) -> None:
        wanted, _, count = os.environ.get("GPURUN_FAULT", "").partition(":")
        self.left = int(count) if wanted == role and count.isdigit() else 0

    def point(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


_FAULT = _Fault()
arm = _FAULT.arm
"""Called once by each kind of process, with its role."""
point = _FAULT.point
"""A place between two steps."""

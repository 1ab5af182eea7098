"""Ask other users' gangs to stop for a preemption, without rights over them.

One user's scheduling pass can preempt another user's job. Say that Alice's pass needs GPUs of Bob's gang. Alice cannot
write in Bob's job folder, and must not be able to order anything. So her pass leaves an empty file
``requests/JOB.UID``. Bob's supervisor sees it and runs a pass of its own. It preempts the gang only if the scheduler
tells *it* to. If Alice asks without reason, Bob's supervisor runs an extra pass now and then, with growing pauses; the
file's owner shows who asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from gpurun.errors import StateError
from gpurun.state.path import StatePath
from gpurun.state.shared import MARK, is_shared

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def ask_to_give_way(home: Path, victims: Collection[str]) -> None:
    """Request passes of exactly these jobs of other users in this user's name. The caller holds the allocator lock."""
    if not is_shared(home):
        return
    wanted = {f"{job}.{os.getuid()}" for job in victims}
    folder = StatePath(home) / MARK
    present = {name for name in folder.names() if name.endswith(f".{os.getuid()}")}
    for name in wanted - present:
        (folder / name).touch()
    for name in present - wanted:
        with suppress(FileNotFoundError, StateError):  # another user made it in this user's name: it is theirs
            (folder / name).unlink()


class Asked:
    """Whether another user asks for a pass that may preempt a job, as the job's supervisor sees it."""

    def __init__(self, home: Path, job: str) -> None:
        self._folder = StatePath(home) / MARK
        self._job = job
        self._pause_s = FIRST_PAUSE_S
        self._next_s = 0.0

    def is_due(self) -> bool:
        """Return True if a pass should run now: there is a request, and the last pass was long enough ago."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        try:
            asked = any(name.startswith(f"{self._job}.") for name in self._folder.names())
        except (FileNotFoundError, StateError):
            return False
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S) if asked else FIRST_PAUSE_S
        self._next_s = now + (self._pause_s if asked else FIRST_PAUSE_S)
        return asked

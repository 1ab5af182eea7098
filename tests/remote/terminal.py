"""A person at a terminal."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Mapping

from waiting import LIMIT_S


def typed(command: list[str], answers: dict[str, str], environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Run a command on a terminal of its own, and type what it asks for."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environ)
    printed, seen, end_s = "", 0, time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # EIO: nobody has it open any more
            break
        printed += data.decode(errors="replace")
        for question, answer in answers.items():
            if (at := printed.find(question, seen)) >= 0:
                seen = at + len(question)
                os.write(terminal, answer.encode() + b"\n")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed

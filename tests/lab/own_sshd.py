"""The machine's own sshd, for tests that run it themselves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"


def own_sshd() -> str:
    """Return the path of sshd, ready to run.

    As root, sshd refuses to run without /run/sshd, which the system's service makes: a machine whose sshd never ran
    has none (sshd.c: "Missing privilege separation directory"). The path is compiled in.
    """
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    found = shutil.which("sshd") or shutil.which("sshd", path=SYSTEM_PATH)
    assert found, "sshd is not installed: apt-get install openssh-server"
    return found

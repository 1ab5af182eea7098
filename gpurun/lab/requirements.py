"""Check that this machine has everything that a lab needs. One message lists all missing parts."""

from __future__ import annotations

import os
import shutil
import sys

from gpurun.lab.errors import NotInstalled

PACKAGE_OF = {
    "containerd": "containerd",
    "dockerd": "docker.io",
    "gcc": "gcc",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "nsenter": "util-linux",
    "runc": "runc",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find(program: str) -> str | None:
    """Return the absolute path of a program: searches the folders of system daemons first, then ``PATH``."""
    return shutil.which(program, path=SYSTEM_PATH) or shutil.which(program)


def require(*programs: str) -> None:
    """Check for Linux, root, and these programs.

    Raises:
        NotInstalled: the message lists everything that is missing, and the hint is the command that installs it.
    """
    if sys.platform != "linux":
        raise NotInstalled(
            "a lab needs Linux, because the hosts of a lab are Linux namespaces", hint="use a Linux machine or a VM"
        )
    if os.geteuid() != 0:
        raise NotInstalled(
            "a lab needs root to make namespaces and bridges", hint="run: sudo -E $(command -v gpurun) lab up"
        )
    missing = [program for program in programs if find(program) is None]
    if missing:
        packages = " ".join(sorted({PACKAGE_OF[program] for program in missing}))
        raise NotInstalled(
            f"a lab needs programs that are not installed: {', '.join(missing)}",
            hint=f"run: sudo apt-get install --no-install-recommends {packages}",
        )

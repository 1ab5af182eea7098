"""A newer Docker, with the containerd image store, out of a newer Debian in a chroot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import debian

from gpurun.lab.process import answers

SUITE = "sid"
PACKAGES = ("docker.io", "containerd", "runc", "iptables", "ca-certificates")

_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# Arguments: the Debian, the folder for data and socket.
_START = """
mount --make-rprivate /
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/run"
mount -t tmpfs tmpfs "$1/tmp"
mkdir -p "$1/work"
mount --bind "$2" "$1/work"
exec chroot "$1" dockerd --data-root /work/data --exec-root /run/docker -p /run/docker.pid \
  -H unix:///work/docker.sock --bridge=none --iptables=false --ip6tables=false --feature containerd-snapshotter=true
"""


class NotToBeHad(Exception):
    """The newer Debian does not exist here, and cannot be built."""


def debian_root() -> Path:
    """The newer Debian's root folder, made once: some minutes, and some 400 MB of the cache.

    Raises:
        NotToBeHad: says why, and what to do.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpurun" / "engines" / SUITE
    if (root / "usr/sbin/dockerd").exists():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{SUITE}-", dir=root.parent))
    try:
        debian.bootstrap(made, PACKAGES, SUITE)
        made.rename(root)
    except (subprocess.SubprocessError, OSError) as error:
        raise NotToBeHad(f"no Debian {SUITE} could be made from this machine's mirror (run with -s): {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return root


@contextmanager
def newer_engine(work: Path) -> Iterator[str]:
    """``DOCKER_HOST`` of an engine with its data in `work`, an absolute and short path, while the block lasts."""
    root = debian_root()
    work.mkdir(parents=True, exist_ok=True)
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_UNSHARE, "sh", "-ec", _START, "sh", str(root), str(work)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not answers(work / "docker.sock"):
            assert process.poll() is None and time.monotonic() < deadline, (work / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield f"unix://{work}/docker.sock"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(work, ignore_errors=True)

"""A disk with room for the quick tests, however full this machine's is.

gpurun leaves a reserve of each disk free (`gpurun.node.agent.serve`), so on a machine whose disk is nearly full
its hosts refuse data, and rightly. No quick test may depend on that. Disks that a test mounts are told as they are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCKS, FREE_BLOCKS = 1 << 25, 9 << 21
"""In blocks of 4 KiB: 128 GiB, of which 72 are free."""
_real = os.statvfs, os.fstatvfs


def install() -> None:
    """From now on this process and its forks see room on the disk of temporary files."""
    own = Path(tempfile.gettempdir()).stat().st_dev

    def told(of: str | bytes | int | os.PathLike[str], real: os.statvfs_result) -> os.statvfs_result:
        if os.stat(of).st_dev != own:  # noqa: PTH116 (descriptors, too)
            return real
        values = list(real)
        values[:5] = [4096, 4096, BLOCKS, FREE_BLOCKS, FREE_BLOCKS]
        return os.statvfs_result(values)

    os.statvfs = lambda path: told(path, _real[0](path))
    os.fstatvfs = lambda descriptor: told(descriptor, _real[1](descriptor))


@contextmanager
def installed() -> Iterator[None]:
    install()
    try:
        yield
    finally:
        os.statvfs, os.fstatvfs = _real

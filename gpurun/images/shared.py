"""Ships that want the same image on the same host wait for each other instead of sending it twice.

One lock file per image on the head, a byte of it for each host: a lock of a byte that is held by an open file is given
back by the kernel however its process ends.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.state import lock

RETRY_S = 0.2


@contextmanager
def alone(folder: Path, image_id: str, hosts: Iterable[str], wait: Callable[[float], object]) -> Iterator[bool]:
    """Hold an image on these hosts; yields whether somebody else held it on one of them.

    Args:
        wait: called with seconds to sleep while somebody else holds one of them; may raise to give up.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{image_id.removeprefix('sha256:')[:64]}.ship"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # In one order everywhere, so that two ships never wait for each other in a circle.
        waited = False
        for offset in sorted({zlib.crc32(host.encode()) for host in hosts}):
            while not lock.try_take(descriptor, start=offset, length=1):
                waited = True
                wait(RETRY_S)
        yield waited
    finally:
        os.close(descriptor)

"""Ships of the same image to the same host wait for each other instead of sending it twice.

The head has one lock file per image, with a byte for each host. The kernel releases a byte's lock when its process ends
in any way.
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
    """Lock an image on these hosts; yield whether another process held it on one of them.

    Args:
        wait: called with seconds to sleep while another process holds one of them; may raise to give up.
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

"""Let SIGTERM and SIGHUP end a build as Ctrl-C does: it removes its container and its files first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let these signals raise SystemExit within, with the code that a shell shows for such an end: 128 + number.

    Leaves a signal alone that is ignored, as by nohup, or has a handler; and all of them outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)  # another signal would end the removal half way
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)

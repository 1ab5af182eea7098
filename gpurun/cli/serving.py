"""Commands that serve web pages: print the URL, and stop on a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from gpurun.cli.printing import say

if TYPE_CHECKING:
    from types import FrameType


def say_url(port: int, token: str) -> None:
    """Print the URL with the token, and how to open it from another machine."""
    typer.echo(f"http://127.0.0.1:{port}/?token={token}")
    if "SSH_CONNECTION" in os.environ:
        say(f"on your own machine, run: ssh -L {port}:127.0.0.1:{port} THIS_HOST, then open the URL above")


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """Yield an event that SIGINT (Ctrl-C), SIGTERM and SIGHUP (closed terminal) set."""
    end = threading.Event()

    def tell(_number: int, _frame: FrameType | None) -> None:
        end.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

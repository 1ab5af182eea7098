"""Run a function in a separate process, so that a hanging driver cannot hang its caller.

A process that waits in a broken driver cannot be killed until the driver returns. It is then left behind, without an
open file or pipe of ours. After it has ended, the next call reaps it.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any, Callable, Iterator, Set

_unreaped: Set[int] = set()
"""Processes that were killed and may not have ended yet."""


class TooSlow(Exception):
    """The function did not answer in time."""


class Died(Exception):
    """The function's process ended without an answer; the message says what is known."""


def ask(function: Callable[[], Any], timeout_s: float) -> Any:
    """Return the JSON value of one call.

    Raises:
        TooSlow: not within `timeout_s` seconds.
        Died: its process was killed, or raised.
    """
    for value in items(lambda: iter([function()]), timeout_s):
        return value
    raise Died("ended without an answer")


def items(function: Callable[[], Iterator[Any]], timeout_s: float) -> Iterator[Any]:
    """Yield the JSON values of an iterator in a separate process; closing this generator ends that process.

    Raises:
        TooSlow: the next value did not come within `timeout_s` seconds.
        Died: its process was killed, or raised.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(function, writer)
    os.close(writer)
    try:
        yield from _read(reader, timeout_s)
    finally:
        os.close(reader)
        _end(pid)


def _child(function: Callable[[], Iterator[Any]], writer: int) -> None:
    """Run the other process: it keeps none of the parent's files open, and never returns."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        _close_all_but({writer, *_imported_from()})
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        try:
            for value in function():
                _write(writer, json.dumps({"value": value}))
        except Exception as error:  # noqa: BLE001 - told to the parent, which is all that can be done here
            where = traceback.extract_tb(sys.exc_info()[2])[-1]
            text = "%s: %s (%s:%s)" % (type(error).__name__, error, os.path.basename(where.filename), where.lineno)
            _write(writer, json.dumps({"error": text}))
    finally:
        os._exit(0)


def _imported_from() -> Iterator[int]:
    """Yield the memory files that modules are imported from: the agent's zip is one."""
    for place in sys.path:
        folder, _, number = place.rpartition("/")
        if folder == "/proc/self/fd" and number.isdigit():
            yield int(number)


def _close_all_but(kept: Set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own


def _write(fd: int, line: str) -> None:
    data = line.encode("utf-8", "replace") + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _read(reader: int, timeout_s: float) -> Iterator[Any]:
    buffer = b""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poller.poll(left_s * 1000):
            raise TooSlow("no answer within %g s" % timeout_s)
        data = os.read(reader, 1 << 16)
        if not data:
            return
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            document = json.loads(line.decode("utf-8"))
            if "error" in document:
                raise Died(document["error"])
            yield document["value"]
            deadline = time.monotonic() + timeout_s


def _end(pid: int) -> None:
    """Kill a process. If it hangs in a driver it ends later, and the next call reaps it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _unreaped.add(pid)
    for _ in range(20):
        for each in tuple(_unreaped):
            _reap(each)
        if pid not in _unreaped:
            return
        time.sleep(0.01)


def _reap(pid: int) -> None:
    try:
        if not os.waitpid(pid, os.WNOHANG)[0]:
            return
    except ChildProcessError:
        pass
    _unreaped.discard(pid)

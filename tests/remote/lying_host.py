"""A host that answers each request with whatever a test says, over a channel in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from gpurun.node.agent import frames
from gpurun.remote import Agent

MOST_UNDER_WAY = 64
"""Frames; like a connection, the channel takes no more before the head has read."""
Lie = Callable[[dict[str, Any]], Iterable[bytes]]


def said(header: Any, payload: bytes = b"") -> bytes:
    """A frame with any JSON at all for a header."""
    head = json.dumps(header).encode()
    return frames.PREFIX.pack(len(head), len(payload)) + head + payload


def done(value: Any) -> Lie:
    """Answer each request with this value."""
    return lambda request: [said({"t": "done", "id": request["id"], "v": value})]


def stream(*values: Any, end: Any = None) -> Lie:
    """Answer each request with these items, then end."""

    def lie(request: dict[str, Any]) -> Iterable[bytes]:
        for value in values:
            yield said({"t": "out", "id": request["id"], "v": value})
        yield said({"t": "done", "id": request["id"], "v": end})

    return lie


class LyingHost:
    """The channel of an agent to a host that lies.

    Attributes:
        sent: headers of the frames that the head has sent.
    """

    def __init__(self, lie: Lie) -> None:
        self._lie = lie
        self._decoder = frames.Decoder()
        self._out: SimpleQueue[bytes] = SimpleQueue()
        self._timeout_s: float | None = None
        self.sent: list[dict[str, Any]] = []
        self.taken_bytes = 0
        self._is_closed = False

    def sendall(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self.sent.append(frame.header)
            if frame.header["t"] == "req":
                for piece in self._lie(frame.header):
                    while self._out.qsize() > MOST_UNDER_WAY and not self._is_closed:
                        time.sleep(0.001)
                    self._out.put(piece)

    def recv(self, size: int) -> bytes:
        try:
            data = self._out.get(timeout=self._timeout_s)
        except Empty:
            raise TimeoutError from None
        self.taken_bytes += len(data)
        return data

    def settimeout(self, timeout: float | None) -> None:
        self._timeout_s = timeout

    def close(self) -> None:
        self._is_closed = True
        self._out.put(b"")


@contextmanager
def agent_of(lie: Lie, name: str = "liar") -> Iterator[Agent]:
    """An agent on a host that lies."""
    agent = Agent(name, LyingHost(lie), frames.Frame({"t": "hello"}, b""), frames.Decoder(), ping_after_s=60.0)
    try:
        yield agent
    finally:
        agent.close()

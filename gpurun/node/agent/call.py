"""One running operation on a host: the argument of its function, and the errors it may raise.

An operation is a function in a module of this package, listed in that module's ``OPS``::

    def read(call, path, max_bytes=1 << 20): ...
    OPS = {"read": read}

It is called as ``read(call, **params)`` in its own thread. Its return value is the reply: a JSON value, or
`OpReply(value, payload)`. A generator function makes a stream: each item it yields (again a value or an `OpReply`) is
sent immediately, and its return value ends the stream. When the head cancels, or the channel dies, `Call.cancelled`
becomes true, functions given to `Call.on_cancel` run, and a blocked `send`, `chunks` or `check` raises `Cancelled`.
"""

import os
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from gpurun.node.agent import frames

Send = Callable[[Dict[str, Any], frames.Bytes], None]

# A request's payload that is asked for as one bytes object may not be larger than this.
MAX_WHOLE_PAYLOAD = 64 << 20


class OpReply(NamedTuple):
    """A JSON value and bytes."""

    value: Any = None
    payload: frames.Bytes = b""


class OpError(Exception):
    """An operation failed in a way that its caller should recognise.

    Args:
        kind: one word for the head: ``not-found``, ``no-space``, ``bad-request``, …
        message: what failed and why, for people.
        detail: JSON values that belong to it.
    """

    def __init__(self, kind: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class Cancelled(OpError):
    """The head no longer wants this operation, or is gone."""

    def __init__(self) -> None:
        super().__init__("cancelled", "cancelled")


class Call:
    """The host's side of one request. Thread-safe."""

    def __init__(self, ident: int, send: Send, more: bool, payload: bytes) -> None:
        self.id = ident
        self._send = send
        self._condition = threading.Condition()
        self._cancelled = False
        self._hooks: List[Callable[[], object]] = []
        self._room = frames.WINDOW
        self._incoming: List[bytes] = [payload] if payload else []
        self._ended = not more
        self._credited = more

    # -- for operations -----------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Return True if nobody waits for the result any more."""
        return self._cancelled

    def check(self) -> None:
        """Raise `Cancelled` if nobody waits for the result any more."""
        if self._cancelled:
            raise Cancelled()

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s` seconds; raise `Cancelled` as soon as nobody waits any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._cancelled, timeout_s)
        self.check()

    def on_cancel(self, hook: Callable[[], object]) -> None:
        """Run `hook` when the operation is cancelled, or now if it was: close a socket, kill a child."""
        with self._condition:
            if not self._cancelled:
                self._hooks.append(hook)
                return
        hook()

    def chunks(self) -> Iterator[bytes]:
        """Yield the request's payload in pieces as it arrives."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._incoming or self._ended or self._cancelled)
                if self._cancelled:
                    raise Cancelled()
                if not self._incoming:
                    return
                piece = self._incoming.pop(0)
            if self._credited:
                self._send({"t": "credit", "id": self.id, "n": len(piece)}, b"")
            yield piece

    @property
    def payload(self) -> bytes:
        """Return the whole payload of the request; at most 64 MiB. Can be read once."""
        return self.whole(MAX_WHOLE_PAYLOAD)

    def whole(self, most_bytes: int) -> bytes:
        """Return the whole payload of the request. Can be read once.

        Raises:
            OpError: ``bad-request``: it is larger than `most_bytes`.
        """
        whole = bytearray()
        for piece in self.chunks():
            whole += piece
            if len(whole) > most_bytes:
                raise OpError("bad-request", "the payload is larger than %d bytes" % most_bytes)
        return bytes(whole)

    def send(self, value: Any = None, payload: frames.Bytes = b"") -> None:
        """Send one stream item; wait if the head reads slowly. The payload may have any size up to 4 MiB."""
        self._spend(len(payload))
        self._send({"t": "out", "id": self.id, "v": value}, payload)

    # -- for the agent ------------------------------------------------------------------------------------

    def finish(self, reply: OpReply) -> None:
        """Send the final reply, a large payload in pieces."""
        parts = list(frames.pieces(reply.payload))
        for part in parts[:-1]:
            self._spend(len(part))
            self._send({"t": "part", "id": self.id}, part)
        last = parts[-1] if parts else b""
        self._send({"t": "done", "id": self.id, "v": reply.value}, last)

    def fail(self, error: OpError) -> None:
        """Send the error that ended the operation."""
        header = {"t": "err", "id": self.id, "kind": error.kind, "message": error.message, "detail": error.detail}
        self._send(header, b"")

    def cancel(self) -> None:
        """Mark the call as cancelled, wake all waiting threads, run the hooks. Idempotent."""
        with self._condition:
            self._cancelled = True
            hooks, self._hooks = self._hooks, []
            self._condition.notify_all()
        for hook in hooks:
            try:
                hook()
            except OSError:
                pass  # a socket or process that is already gone is what the hook was for

    def feed(self, piece: Optional[bytes]) -> None:
        """Add a piece of the request's payload; None is its end."""
        with self._condition:
            if piece is None:
                self._ended = True
            else:
                self._incoming.append(piece)
            self._condition.notify_all()

    def credit(self, amount: int) -> None:
        """Record that the head has consumed `amount` bytes more."""
        with self._condition:
            self._room += amount
            self._condition.notify_all()

    def _spend(self, amount: int) -> None:
        """Wait until the head's window has space. Allows one item larger than the whole window."""
        with self._condition:
            wanted = min(amount, frames.WINDOW)
            self._condition.wait_for(lambda: self._room >= wanted or self._cancelled)
            if self._cancelled:
                raise Cancelled()
            self._room -= amount


def text_of(error: BaseException) -> str:
    """Return an exception as one line. What the operating system refused reads ``No space left on device: '/x'``."""
    if isinstance(error, OSError) and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return error.strerror if name is None else "%s: %r" % (error.strerror, name)
    return "%s: %s" % (type(error).__name__, error)

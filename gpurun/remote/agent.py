"""One agent: its code, sent over stdin; calls, streams, and the loss of the host."""

from __future__ import annotations

import importlib.util
import io
import itertools
import marshal
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import gpurun.node
from gpurun.errors import BadInput, GpurunError, HostFailure, HostUnreachable
from gpurun.node.agent import frames
from gpurun.remote import answers
from gpurun.remote.answers import words
from gpurun.remote.route import Target

if TYPE_CHECKING:
    from collections.abc import Callable


# One running request on a host, from the head's side: frames that wait for the caller, and the credit for sending.


MOST_HELD_BYTES = 64 << 20
"""Limit for the data of one operation that the head holds. A correct agent waits for credit long before."""
FRAME_COST_BYTES = 1 << 10
"""Memory that each frame needs in addition to its payload."""


class Operation:
    """One running request.

    Attributes:
        ended: nothing more needs to be sent for it.
    """

    def __init__(self, ident: int, op: str) -> None:
        self.id = ident
        self.op = op
        self._arrived: SimpleQueue[tuple[frames.Frame | GpurunError, int]] = SimpleQueue()
        self._held_bytes = 0
        self._room = frames.WINDOW
        self.ended = False
        self._condition = Condition()

    def put(self, arrived: frames.Frame | GpurunError, cost_bytes: int = 0) -> bool:
        """Hold a frame until the caller takes it; False if the host has sent more than it may send ahead."""
        with self._condition:
            if cost_bytes and self._held_bytes + cost_bytes > MOST_HELD_BYTES:
                return False
            self._held_bytes += cost_bytes
        self._arrived.put((arrived, cost_bytes))
        return True

    def take(self, timeout_s: float | None) -> frames.Frame | GpurunError:
        """Return the next frame or error. Raises Empty if none comes in time."""
        arrived, cost_bytes = self._arrived.get(timeout=timeout_s)
        with self._condition:
            self._held_bytes -= cost_bytes
        return arrived

    def credit(self, amount: int) -> None:
        """Add credit: the host has consumed so many bytes."""
        with self._condition:
            self._room += amount
            self._condition.notify_all()

    def end(self) -> None:
        """Mark the operation as ended: nothing more needs to be sent for it."""
        with self._condition:
            self.ended = True
            self._condition.notify_all()

    def spend(self, amount: int) -> bool:
        """Wait until the host has room for `amount` more bytes; False if the operation ends first."""
        with self._condition:
            self._condition.wait_for(lambda: self.ended or self._room >= min(amount, frames.WINDOW))
            self._room -= amount
            return not self.ended


# The agent's code as a zip, and the command that starts it on a host without a file there.


PYTHON = "python3"

# Runs as `python3 -ISc`. One line, without single quotes, backslashes and exclamation marks, so that every login shell
# passes it on unchanged. A memory file descriptor holds the zip, so gpurun writes nothing to a disk.
_START = (
    "import sys,os;"
    'sys.version_info<(3,8) and sys.exit("gpurun needs Python 3.8 or newer, but the host has "+sys.version.split()[0]);'
    "d=sys.stdin.buffer.read({size});"
    'f=os.memfd_create("gpurun-agent");'
    'o=open(f,"wb",closefd=False);o.write(d);o.close();'
    "del d;"
    'sys.path.insert(0,"/proc/self/fd/"+str(f));'
    "from gpurun.node.agent.serve import main;"
    'main("{nonce}",{silence_limit_s!r},{docker_host},{folder})'
)
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
"""Texts that every shell passes on as one word, and that Python reads unchanged between quotes."""


def command(size: int, nonce: str, silence_limit_s: float, target: Target) -> str:
    """Return the command for the host's login shell. It reads `size` bytes of zip from stdin and becomes the agent.

    Raises:
        BadInput: the host's Python, Docker or folder has characters that shells interpret differently.
    """
    code = _START.format(
        size=size, nonce=nonce, silence_limit_s=silence_limit_s,
        docker_host=_literal(target.docker_host), folder=_literal(target.folder),
    )  # fmt: skip
    return f"exec {_plain(target.python or PYTHON)} -ISc '{code}'"


def _literal(text: str | None) -> str:
    return "None" if text is None else f'"{_plain(text)}"'


def _plain(text: str) -> str:
    if not _PLAIN.fullmatch(text):
        raise BadInput(f"{text!r} cannot be passed to a host's shell", hint="use letters, digits and _ . / : @ + -")
    return text


@lru_cache(maxsize=1)
def agent_zip() -> bytes:
    """Return every module of `gpurun.node`, and pynvml if it is installed on the head.

    The zip has the source and the compiled ``.pyc`` of each module, for the head's version of Python. A host with the
    same version skips the compilation; other hosts ignore the ``.pyc``.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for name, path in _modules():
            for ending, content in ((".py", path.read_bytes()), (".pyc", _compiled(name, path))):
                # The date of a ZipInfo is fixed, so the zip's bytes depend only on its content.
                out.writestr(zipfile.ZipInfo(name + ending), content, zipfile.ZIP_DEFLATED, 1)
    return archive.getvalue()


def _modules() -> Iterator[tuple[str, Path]]:
    """Return name (in the zip, without extension) and file of each module that the agent may import."""
    node = Path(gpurun.node.__file__).parent
    yield "gpurun/__init__", node.parent / "__init__.py"
    for path in sorted(node.rglob("*.py")):
        yield path.relative_to(node.parent.parent).with_suffix("").as_posix(), path
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        yield "pynvml", Path(pynvml.origin)


def _compiled(name: str, path: Path) -> bytes:
    """Return a hash-based ``.pyc`` that Python never compares with its source (PEP 552)."""
    # The loader caches the compilation in __pycache__.
    spec = importlib.util.spec_from_file_location(name.replace("/", "."), path)
    assert spec is not None and spec.loader is not None
    code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    unchecked_hash = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked_hash + bytes(8) + marshal.dumps(code)


Json = Any
# Send a ping after this much silence, …
PING_AFTER_S = 4.0
# … and consider the host dead after this much.
DEAD_AFTER_S = 13.0
# Paramiko splits larger writes into packets of 32 KiB, and then the last packet of each write is small.
SEND_BYTES = 32_000
BAD_ANSWER = "bad-answer"
"""The kind of a failure for an invalid answer of a host."""


class Channel(Protocol):
    """The methods of an SSH channel that an Agent needs (Paramiko's channel, or a pipe in tests)."""

    def sendall(self, data: bytes) -> None: ...  # noqa: D102 (waits as long as the channel lives)
    def recv(self, size: int) -> bytes: ...  # noqa: D102
    def settimeout(self, timeout: float | None) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Reply:
    """The answer of an operation: a JSON value and bytes."""

    value: Json = None
    payload: bytes = b""


class RemoteOpFailed(HostFailure):
    """The operation ran on the host and failed there.

    Attributes:
        kind: the agent's name for the failure: ``not-found``, ``denied``, ``no-space``, ``timeout``, ``bad-request``,
            ``unknown-op``, ``internal``, ``no-docker``, … (`gpurun.node.agent.serve.KINDS` and the operations
            themselves);
            ``bad-answer`` if the host's answer is invalid.
        detail: further JSON values from the operation.
    """

    def __init__(self, message: str, *, kind: str, detail: Json = None, host: str | None = None) -> None:
        super().__init__(message, host=host)
        self.kind = kind
        self.detail = detail or {}


class Agent:
    """An agent on one host. Thread-safe: many calls can use its one channel at the same time.

    `Fleet.open` creates it; tests may pass any channel that carries frames.
    """

    def __init__(
        self,
        host: str,
        channel: Channel,
        hello: frames.Frame,
        decoder: frames.Decoder,
        ping_after_s: float = PING_AFTER_S,
    ) -> None:
        self.host = host
        self.hello: Json = hello.header
        self.last_heard_s = time.monotonic()
        self._channel = channel
        self._decoder = decoder
        self._ping_after_s = ping_after_s
        self._write_lock = Lock()
        self._operations: dict[int, Operation] = {}
        self._lock = Lock()
        self._idents = itertools.count(1)
        self._death: GpurunError | None = None
        self._on_close: list[Callable[[], object]] = []
        Thread(target=self._read, name=f"agent {host}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """False once the channel is closed or lost."""
        return self._death is None

    def call(self, op: str, *, timeout_s: float = 30.0, payload: bytes = b"", **params: Json) -> Reply:
        """Run an operation and wait for its reply.

        Raises:
            RemoteOpFailed: the operation failed on the host.
            HostUnreachable: the channel died, or no reply came within `timeout_s`; then the operation is cancelled.
        """
        operation = self._start(op, params, more=len(payload) > frames.PIECE, payload=payload)
        deadline = time.monotonic() + timeout_s
        received = bytearray()
        try:
            while True:
                frame = self._next(operation, deadline, timeout_s)
                self._gather(operation, received, frame)
                if frame.header["t"] == "done":
                    return Reply(self._checked(operation, frame), bytes(received))
                self._consumed(operation, frame)
        finally:
            self._forget(operation)

    def stream(
        self,
        op: str,
        *,
        payload_in: Iterable[frames.Bytes] | None = None,
        silence_s: float | None = None,
        **params: Json,
    ) -> Stream:
        """Run an operation and iterate over its items; the last item is its return value.

        Closing or dropping the stream cancels the operation on the host. A stream lasts as long as its operation.

        Args:
            payload_in: bytes for the operation. A separate thread reads them as the host consumes them. The stream
                raises the exceptions of this iterable.
            silence_s: give up if no item comes for so long.

        Raises:
            RemoteOpFailed, HostUnreachable: as `call`, here or during the iteration.
        """
        operation = self._start(op, params, more=payload_in is not None)
        if payload_in is not None:
            self._begin_feed(operation, payload_in)
        return Stream(self, operation, silence_s)

    def close(self) -> None:
        """Close the channel. This ends the agent and its children. Idempotent."""
        self.die(HostUnreachable("the session was closed", host=self.host))

    def on_close(self, hook: Callable[[], object]) -> None:
        """Run `hook` once when the agent is closed or lost; immediately if it already is."""
        with self._lock:
            if self._death is None:
                self._on_close.append(hook)
                return
        hook()

    def die(self, why: GpurunError) -> None:
        """Mark the host as lost: every waiting call raises `why`. Idempotent, never blocks on the network."""
        with self._lock:
            if self._death is not None:
                return
            self._death = why
            operations = list(self._operations.values())
            self._operations.clear()
            hooks, self._on_close = self._on_close, []
        for operation in operations:
            operation.put(why)
            operation.end()
        # Closing a Paramiko channel sends a packet, which may wait for a lost peer.
        Thread(target=_run_all, args=([self._channel.close, *hooks],), daemon=True).start()

    # -- sending ------------------------------------------------------------------------------------------

    def _start(self, op: str, params: dict[str, Json], *, more: bool, payload: bytes = b"") -> Operation:
        operation = Operation(next(self._idents), op)
        with self._lock:
            if self._death is not None:
                raise _again(self._death)
            self._operations[operation.id] = operation
        header = {"t": "req", "id": operation.id, "op": op, "params": params, "more": more}
        try:
            self._send(header, b"" if more else payload)
        except BaseException:
            self._forget(operation, cancel=False)
            raise
        if more and payload:
            self._begin_feed(operation, frames.pieces(payload))
        return operation

    def _begin_feed(self, operation: Operation, payload: Iterable[frames.Bytes]) -> None:
        thread = Thread(target=self._feed, args=(operation, payload), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can start just now: the host waits for no payload
            self._forget(operation)
            raise

    def _feed(self, operation: Operation, payload: Iterable[frames.Bytes]) -> None:
        """Send an operation's payload at the speed at which the host consumes it."""
        try:
            for item in payload:
                for piece in frames.pieces(item):
                    if not operation.spend(len(piece)):
                        return
                    self._send({"t": "in", "id": operation.id}, piece)
            self._send({"t": "eof", "id": operation.id})
        except GpurunError as error:
            operation.put(error)
        except Exception as error:  # noqa: BLE001 - from the caller's iterable: raised again in the caller's thread
            operation.put(_FeedFailed(error))

    def _send(self, header: dict[str, Json], payload: bytes | memoryview = b"") -> None:
        data = memoryview(frames.encode(header, payload))
        try:
            with self._write_lock:
                for start in range(0, len(data), SEND_BYTES):
                    self._write(bytes(data[start : start + SEND_BYTES]))
        except (OSError, EOFError):
            raise _again(self._death) from None

    def ping(self) -> None:
        """Send a ping, unless another thread is sending now."""
        if self._write_lock.acquire(blocking=False):
            try:
                with suppress(OSError, EOFError):
                    self._write(frames.encode({"t": "ping"}))
            finally:
                self._write_lock.release()

    def _write(self, data: bytes) -> None:
        """Write to the channel. If that fails, part of a frame may have left, so nothing more is sent."""
        try:
            if not self.alive:
                raise BrokenPipeError
            self._channel.sendall(data)
        except BaseException as error:
            self.die(HostUnreachable(f"the SSH session was lost ({error or 'closed'})", host=self.host))
            raise

    # -- receiving ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Dispatch frames until the channel ends. The agent's own thread."""
        self._channel.settimeout(self._ping_after_s)
        why = "the SSH session was lost"
        try:
            while self.alive:
                try:
                    data = self._channel.recv(1 << 18)
                except TimeoutError:
                    self.ping()
                    continue
                if not data:
                    break
                self.last_heard_s = time.monotonic()
                for frame in self._decoder.feed(data):
                    self._dispatch(frame, self._decoder.frame_bytes)
        except (OSError, EOFError) as error:
            why += f" ({error})"
        except frames.FrameError as error:
            why = f"the agent sent a malformed answer: {error}"
        self.die(HostUnreachable(why, host=self.host))

    def _dispatch(self, frame: frames.Frame, size_bytes: int) -> None:
        ident, kind = frame.header.get("id"), frame.header.get("t")
        if kind == "pong":
            return
        if not isinstance(ident, int) or kind not in ("out", "part", "done", "err", "credit"):
            raise frames.FrameError(f"the host sent a frame of an unknown kind, {kind!r:.40}")
        with self._lock:
            operation = self._operations.get(ident)
        if operation is None:
            return  # its caller no longer waits
        if kind == "credit":
            amount = frame.header.get("n")
            if type(amount) is not int or amount < 0:
                raise frames.FrameError(f"the host sent a frame with an invalid credit, {amount!r:.40}")
            operation.credit(amount)
        elif not operation.put(frame, size_bytes + FRAME_COST_BYTES):
            raise frames.FrameError(
                f"the host sent more than {MOST_HELD_BYTES >> 20} MiB before gpurun was ready for more"
            )

    def _next(self, operation: Operation, deadline: float | None, timeout_s: float) -> frames.Frame:
        try:
            arrived = operation.take(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            raise HostUnreachable(
                f"the host did not answer {operation.op} within {timeout_s:g} s", host=self.host
            ) from None
        if isinstance(arrived, _FeedFailed):
            raise arrived.error
        if isinstance(arrived, GpurunError):
            raise _again(arrived)
        if arrived.header["t"] == "err":
            operation.end()
            raise self._failure(arrived.header)
        if arrived.header["t"] == "done":
            operation.end()
        return arrived

    def _failure(self, header: dict[str, Json]) -> HostFailure:
        kind, detail = words(header.get("kind")), header.get("detail")
        if kind == "cancelled":  # not by this caller, which still waits
            return HostUnreachable("the host's agent is stopping", host=self.host)
        detail = detail if isinstance(detail, dict) else None
        return RemoteOpFailed(words(header.get("message")), kind=kind, detail=detail, host=self.host)

    def _checked(self, operation: Operation, frame: frames.Frame) -> Json:
        """Return the value of a frame. Raises RemoteOpFailed if it is not a valid answer of the operation."""
        try:
            return answers.checked_answer(operation.op, frame.header.get("v"), item=frame.header["t"] == "out")
        except answers.NotAnAnswer as error:
            raise bad_answer(self.host, str(error)) from None

    def _gather(self, operation: Operation, whole: bytearray, frame: frames.Frame) -> None:
        """Append a piece of a reply."""
        if len(whole) + len(frame.payload) > MOST_HELD_BYTES:
            raise bad_answer(
                self.host, f"the host's answer to {operation.op} has more than {MOST_HELD_BYTES >> 20} MiB"
            )
        whole += frame.payload

    def _consumed(self, operation: Operation, frame: frames.Frame) -> None:
        if frame.payload:
            self._send({"t": "credit", "id": operation.id, "n": len(frame.payload)})

    def _forget(self, operation: Operation, *, cancel: bool = True) -> None:
        """Drop an operation that the caller no longer needs; cancel it on the host if it still runs."""
        ended = operation.ended
        operation.end()
        with self._lock:
            known = self._operations.pop(operation.id, None)
        if cancel and known is not None and not ended and self.alive:
            with suppress(HostUnreachable):  # on a dead host, the agent stops all its operations
                self._send({"t": "cancel", "id": operation.id})


class Stream(Iterator[Reply]):
    """The items of one operation. A context manager. Only one thread may iterate, but any thread may call `close`."""

    def __init__(self, agent: Agent, operation: Operation, silence_s: float | None) -> None:
        self._agent = agent
        self._operation = operation
        self._silence_s = silence_s
        self._parts = bytearray()
        self._closed = False

    def __next__(self) -> Reply:
        if self._closed:
            raise StopIteration
        try:
            return self._item()
        except BaseException:
            self.close()
            raise

    def _item(self) -> Reply:
        limit_s = self._silence_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            frame = self._agent._next(self._operation, deadline, limit_s or 0.0)
            kind = frame.header["t"]
            if kind == "done":
                self._agent._gather(self._operation, self._parts, frame)
                value = self._agent._checked(self._operation, frame)
                self.close()
                return Reply(value, bytes(self._parts))
            self._agent._consumed(self._operation, frame)
            if kind == "out":
                return Reply(self._agent._checked(self._operation, frame), frame.payload)
            self._agent._gather(self._operation, self._parts, frame)

    def close(self) -> None:
        """End the iteration, and cancel the operation on the host if it still runs. Idempotent."""
        if not self._closed:
            self._closed = True
            self._agent._forget(self._operation)
            # Wakes a thread that waits for the next item.
            self._operation.put(HostUnreachable("the stream was closed", host=self._agent.host))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            # Not in this thread: the garbage collector may run in a thread that holds the locks that closing needs.
            Thread(target=self._agent._forget, args=(self._operation,), daemon=True).start()


class _FeedFailed(GpurunError):
    """Carries an exception of a caller's `payload_in` to the caller."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def bad_answer(host: str, why: str) -> RemoteOpFailed:
    """Return the error for a host whose answer is invalid."""
    return RemoteOpFailed(f"the host's answer is not valid: {words(why)}", kind=BAD_ANSWER, host=host)


def _again(error: GpurunError | None) -> GpurunError:
    """Return a copy to raise: threads that raise the same exception object would mix up their tracebacks."""
    assert error is not None
    return type(error)(error.message, host=error.host, job=error.job, where=error.where, hint=error.hint)


def _run_all(hooks: list[Callable[[], object]]) -> None:
    for hook in hooks:
        with suppress(OSError, EOFError):  # it was already closed
            hook()

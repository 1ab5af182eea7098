"""The agent: one process per host that serves requests from the head over its stdin and stdout.

``python3 -c`` starts it over SSH. It imports itself from a zip in memory, and leaves no file behind. Each request runs
in its own thread; a module of `MODULES` is imported when one of its operations is first requested. When stdin ends,
when the head has been silent for too long, or on SIGTERM or SIGHUP, the agent cancels all operations, kills its own
children and exits. Processes that an operation detached on purpose (see `gpurun.node.job.gang`) continue.
"""

import errno
import importlib
import os
import select
import signal
import sys
import threading
import time
import types
from typing import Any, Callable, Dict, Optional

from gpurun.node.agent import frames, place
from gpurun.node.agent.call import Call, Cancelled, OpError, OpReply, text_of

# A head that is alive pings every few seconds. After this silence it is taken for dead, whatever TCP believes.
SILENCE_LIMIT_S = 90.0

# The operations of an agent: those in `OPS` of these modules, named ``key.name``. Nothing else can be called.
MODULES = {
    "blobs": "transfer.blobs",
    "caches": "job.caches",
    "claims": "job.claims",
    "data": "data.sets",
    "docker": "docker",
    "files": "folder.files",
    "gang": "job.gang",
    "health": "job.health",
    "hooks": "job.hooks",
    "images": "image.listing",
    "outputs": "job.outputs",
    "probe": "probe.probe",
    "proc": "agent.proc",
    "ranks": "job.ranks",
    "tree": "transfer.tree",
}

# How the errors that the operating system reports are named to the head.
KINDS = {
    errno.ENOENT: "not-found",
    errno.ENOTDIR: "not-found",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "no-space",
    errno.EROFS: "read-only",
    errno.EEXIST: "exists",
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timeout",
}


class Dispatcher:
    """Dispatches frames to operations. One per process."""

    def __init__(self, fd_in: int, fd_out: int, silence_limit_s: float = SILENCE_LIMIT_S) -> None:
        self._in = fd_in
        self._out = fd_out
        self._silence_limit_s = silence_limit_s
        self._write_lock = threading.Lock()
        self._calls: Dict[int, Call] = {}
        self._calls_lock = threading.Lock()

    def hello(self, magic: bytes) -> None:
        """Announce the agent: the magic, then the hello frame."""
        header = {
            "t": "hello",
            "python": sys.version.split()[0],
            "host": os.uname().nodename,
            "user": _user(),
            "pid": os.getpid(),
        }
        self._write(magic + frames.encode(header))

    def serve(self) -> None:
        """Read and dispatch frames until the head is gone, then cancel all operations."""
        decoder = frames.Decoder()
        poller = select.poll()
        poller.register(self._in, select.POLLIN)
        try:
            while poller.poll(self._silence_limit_s * 1000):
                data = os.read(self._in, 1 << 18)
                if not data:
                    break
                for frame in decoder.feed(data):
                    self._dispatch(frame)
        except (OSError, frames.FrameError) as error:
            sys.stderr.write("gpurun agent: %s\n" % text_of(error))
        finally:
            for call in self._running():
                call.cancel()

    def _running(self) -> "list[Call]":
        with self._calls_lock:
            return list(self._calls.values())

    def _dispatch(self, frame: frames.Frame) -> None:
        header = frame.header
        kind, ident = header.get("t"), header.get("id")
        if kind == "ping":
            self.send({"t": "pong"})
            return
        if not isinstance(ident, int):
            return
        if kind == "req":
            self._start(ident, header, frame.payload)
            return
        with self._calls_lock:
            call = self._calls.get(ident)
        if call is None:
            return  # it ended while the frame was under way
        if kind == "in":
            call.feed(frame.payload)
        elif kind == "eof":
            call.feed(None)
        elif kind == "credit":
            call.credit(int(header["n"]))
        elif kind == "cancel":
            call.cancel()

    def _start(self, ident: int, header: Dict[str, Any], payload: bytes) -> None:
        call = Call(ident, self.send, bool(header.get("more")), payload)
        with self._calls_lock:
            self._calls[ident] = call
        thread = threading.Thread(
            target=self._run, args=(call, str(header.get("op")), header.get("params") or {}), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # this host can start no thread just now, as when a job has all processes
            with self._calls_lock:
                del self._calls[ident]
            call.fail(OpError("os-error", "%s: %s" % (header.get("op"), error)))

    def _run(self, call: Call, op: str, params: Dict[str, Any]) -> None:
        try:
            error = self._outcome(call, op, params)
            if error is not None:
                call.fail(error)
        except (Cancelled, OSError):
            pass  # the caller has gone, so there is no receiver for an error
        finally:
            with self._calls_lock:
                self._calls.pop(call.id, None)

    def _outcome(self, call: Call, op: str, params: Dict[str, Any]) -> Optional[OpError]:
        """Run the operation and send its reply; return the error to report, if there is one."""
        try:
            call.finish(_drive(call, find(op)(call, **params)))
        except OpError as error:
            return error
        except OSError as error:
            kind = KINDS.get(error.errno or 0, "os-error")
            return OpError(kind, text_of(error), errno=error.errno, path=_printable(error.filename))
        except (TypeError, ValueError, KeyError) as error:
            return OpError("bad-request", "%s: %s" % (op, text_of(error)), traceback=_trace())
        except Exception as error:  # noqa: BLE001 - reported to the head, which is this process's only reader
            return OpError("internal", "%s: %s" % (op, text_of(error)), traceback=_trace())
        return None

    def send(self, header: Dict[str, Any], payload: frames.Bytes = b"") -> None:
        """Send one frame. Thread-safe; waits while the channel is full."""
        self._write(frames.prefix_of(header, len(payload)), payload)

    def _write(self, head: bytes, payload: frames.Bytes = b"") -> None:
        with self._write_lock:
            written = os.writev(self._out, (head, payload))
            for part in (head, payload):
                view = memoryview(part)[written:]
                written = max(0, written - len(part))
                while view:
                    view = view[os.write(self._out, view) :]


def find(op: str) -> Callable[..., Any]:
    """Return the function of an operation named ``module.name``.

    Raises:
        OpError: ``unknown-op``: this agent has no such operation.
    """
    name, _, operation = op.partition(".")
    if name in MODULES:
        function = importlib.import_module("gpurun.node." + MODULES[name]).OPS.get(operation)
        if function is not None:
            found: Callable[..., Any] = function
            return found
    raise OpError("unknown-op", "the host's agent does not know the operation %r" % op)


def _drive(call: Call, result: Any) -> OpReply:
    """Send the items of a generator; return the final reply."""
    if isinstance(result, types.GeneratorType):
        try:
            while True:
                item = _reply(next(result))
                call.send(item.value, item.payload)
        except StopIteration as stop:
            return _reply(stop.value)
        finally:
            result.close()
    return _reply(result)


def _reply(result: Any) -> OpReply:
    return result if isinstance(result, OpReply) else OpReply(result)


def _printable(name: Any) -> Optional[str]:
    return None if name is None else os.fsdecode(name) if isinstance(name, (str, bytes)) else str(name)


def _user() -> str:
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _trace() -> str:
    import traceback  # noqa: PLC0415 - slow to import, rarely wanted

    return traceback.format_exc()


def _private_streams() -> "tuple[int, int]":
    """Keep stdin and stdout for frames only: no print and no child process can write to them."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return fd_in, fd_out


def _stop(agent_calls: Callable[[], "list[Call]"]) -> None:
    """Cancel all operations, kill this agent's own children, exit without waiting for any thread."""
    for call in agent_calls():
        call.cancel()
    proc = sys.modules.get("gpurun.node.agent.proc")
    if proc is not None:
        proc.kill_all()
    # A moment for operations that clean up after themselves when cancelled.
    deadline = time.monotonic() + 2.0
    while agent_calls() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)


def main(
    nonce: str,
    silence_limit_s: float = SILENCE_LIMIT_S,
    docker_host: Optional[str] = None,
    folder: Optional[str] = None,
) -> None:
    """Run as the process's main program; never returns.

    Args:
        nonce: printed after the magic, so that nothing else on stdout looks like the agent.
        silence_limit_s: seconds without a byte from the head after which the agent exits.
        docker_host: the engine to use; None = as the user's ``docker``.
        folder: see `gpurun.node.agent.place.use`.
    """
    os.umask(0o077)
    if docker_host is not None:
        os.environ["DOCKER_HOST"] = docker_host
    if folder is not None:
        place.use(folder)
    fd_in, fd_out = _private_streams()
    agent = Dispatcher(fd_in, fd_out, silence_limit_s)

    def leave(_signal: int, _frame: Any) -> None:
        threading.Thread(target=_stop, args=(agent._running,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    agent.hello(frames.MAGIC + nonce.encode("ascii"))
    agent.serve()
    _stop(agent._running)

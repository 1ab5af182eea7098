"""The agent: one process per host that serves requests from the head over its stdin and stdout.

``python3 -c`` starts it over SSH. It imports itself from a zip in memory, and leaves no file behind. Each request runs
in its own thread; a module of `MODULES` is imported when one of its operations is first requested. When stdin ends,
when the head has been silent for too long, or on SIGTERM or SIGHUP, the agent cancels all operations, kills its own
children and exits. Processes that an operation detached on purpose (see `gpurun.node.job.gang`) continue.
"""

from __future__ import annotations

import errno
import importlib
import os
import pwd
import re
import select
import signal
import stat
import sys
import threading
import time
import types
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, Cancelled, OpError, OpReply, text_of

# The reserve of a disk that gpurun leaves free, because on a full disk no job can record its end.


RESERVE_SHARE = 20
RESERVE_LEAST_BYTES, RESERVE_MOST_BYTES = 1 << 30, 20 << 30
SMALL_DISK_SHARE = 4


def reserve_of(disk_bytes: int) -> int:
    """Return the reserve of a disk: 5 %, at least 1 GiB and at most 20 GiB; of a small disk at most a quarter."""
    usual = min(max(disk_bytes // RESERVE_SHARE, RESERVE_LEAST_BYTES), RESERVE_MOST_BYTES)
    return min(usual, disk_bytes // SMALL_DISK_SHARE)


def disk_of(top: int) -> Tuple[int, int]:
    """Return (bytes free for this user, total bytes) of the disk of an open folder."""
    found = os.fstatvfs(top)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


# The folder for gpurun's files on this host: below the user's home, or on a disk that no other host shares.


_VARIABLE = "GPURUN_FOLDER"
_FAULTS = {
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "read-only",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
}


def use(folder: str) -> None:
    """Keep jobs, outputs, the spool and the record of images in ``FOLDER/gpurun-UID``, created with mode 0700.

    Raises:
        NotOwn: another user made it, or others may write there. NotUsable: it cannot be created.
    """
    own = os.path.join(folder, "gpurun-%d" % os.getuid())
    try:
        os.mkdir(own, 0o700)
    except FileExistsError:
        found = os.lstat(own)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise NotOwn("%s is not a folder that only this user may enter" % own) from None
    except OSError as error:
        raise NotUsable(fault_of(error, own, mounts())[1]) from None
    os.environ[_VARIABLE] = own
    os.environ["XDG_CACHE_HOME"] = os.path.join(own, "cache")
    os.environ["XDG_STATE_HOME"] = os.path.join(own, "state")


def root() -> str:
    """Return the folder that holds ``jobs`` and ``outputs``."""
    return os.environ.get(_VARIABLE) or os.path.join(os.path.expanduser("~"), ".gpurun")


def mounts(proc: str = "/proc") -> List[str]:
    """Return the lines of ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); none if it cannot be read."""
    try:
        with open(os.path.join(proc, "self/mountinfo"), errors="surrogateescape") as stream:
            return list(stream)
    except OSError:
        return []


def filesystem(path: str, mountinfo: Iterable[str]) -> str:
    """Return the type of the file system that holds a path; empty if unknown.

    Args:
        mountinfo: see `mounts`.
    """
    return _mount(path, mountinfo)[1]


def fault_of(error: OSError, path: str, mountinfo: Iterable[str]) -> Tuple[str, str]:
    """Return why nothing could be written to a path: ``denied``, ``read-only``, ``full`` or ``broken``; and in words,
    with the owner, the mount or the free space that explains it.
    """
    return _FAULTS.get(error.errno or 0, "broken"), _words(error, path, mountinfo)


def _words(error: OSError, path: str, mountinfo: Iterable[str]) -> str:
    nearest = _nearest(path)
    if error.errno == errno.EROFS:
        point, kind, options = _mount(os.path.realpath(nearest), mountinfo)
        mount = " (%s on %s: %s)" % (kind, point, options) if point else ""
        return "%s is on a read-only file system%s" % (path, mount)
    if error.errno in (errno.EACCES, errno.EPERM):
        return "%s may not write to %s: %s" % (_name(os.getuid()), path, _owned(nearest))
    if error.errno == errno.EDQUOT:
        return "%s has used up its disk quota at %s" % (_name(os.getuid()), path)
    if error.errno == errno.ENOSPC:
        free_bytes, free_inodes = free(nearest)
        inodes = "" if free_inodes is None else " and %d inodes" % free_inodes
        return "no space is left for %s: %d KiB%s are free" % (path, (free_bytes or 0) >> 10, inodes)
    return "nothing can be written to %s: %s" % (path, error.strerror or error)


def _owned(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError as error:
        return "%s: %s" % (path, error.strerror)
    return "%s belongs to %s and has mode %04o" % (path, _name(found.st_uid), stat.S_IMODE(found.st_mode))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def _nearest(path: str) -> str:
    """Return the path, or its nearest ancestor that exists."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def free(path: str) -> Tuple[Optional[int], Optional[int]]:
    """Return the bytes and inodes that this user can still use on the file system of a path, or of its nearest
    ancestor.

    None = not known, or without limit: btrfs counts no inodes.
    """
    try:
        found = os.statvfs(_nearest(path))
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _mount(path: str, mountinfo: Iterable[str]) -> Tuple[str, str, str]:
    """Return the mount point of a path, the type of its file system and its options, those of the mount first."""
    best, kind, options = "", "", ""
    for line in mountinfo:
        mount, _, rest = line.partition(" - ")
        fields, disk = mount.split(" "), rest.split()
        point = _unescaped(fields[4]) if len(fields) > 5 else ""
        if point and len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind, options = point, "".join(disk[:1]), ",".join([fields[5], *disk[2:3]])
    return best, kind, options


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


class NotOwn(Exception):
    """A folder that others may write to does not belong to this user."""


class NotUsable(Exception):
    """The folder cannot be created; the message says why."""


# A head that is alive pings every few seconds. After this silence it is taken for dead, whatever TCP believes.
SILENCE_LIMIT_S = 90.0

# The operations of an agent: those in `OPS` of these modules, named ``key.name``. Nothing else can be called.
MODULES = {
    "blobs": "transfer.blobs",
    "caches": "job.caches",
    "claims": "job.claims",
    "data": "data",
    "docker": "docker",
    "files": "folder.contents",
    "gang": "job.gang",
    "hang": "job.hang",
    "health": "job.watch",
    "hooks": "job.hooks",
    "images": "images",
    "outputs": "job.layer",
    "probe": "probe.probe",
    "proc": "agent.processes",
    "ranks": "job.ranks",
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
            call.finish(_drive(call, find_op(op)(call, **params)))
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


def find_op(op: str) -> Callable[..., Any]:
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
    proc = sys.modules.get("gpurun.node.agent.processes")
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
        folder: see `gpurun.node.agent.serve.use`.
    """
    os.umask(0o077)
    if docker_host is not None:
        os.environ["DOCKER_HOST"] = docker_host
    if folder is not None:
        use(folder)
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

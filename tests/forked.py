"""Processes of gpurun that start in a hundredth of a second: forks of one that has imported all of it.

`Popen` takes the place of `subprocess.Popen` in quick tests. It asks a server for `python -m gpurun…`, and for
`python -c` where a test wants so; it starts anything else as ever, and all that a fork cannot imitate. To others a
fork looks like the real process: environment, command line, user, descriptors and signals are those of its caller.
Its CPU time is the server's.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import locale
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOM, ROOM_FOR_ARGV, ROOM_FOR_ENVIRON = "GPURUN_TESTS_ROOM", 1 << 12, 1 << 15
MODULES = ("gpurun", "gpurun.supervisor", "gpurun.head.waiter", "gpurun.head.looking")
LOADS = "from gpurun.head.loading import load"
OF_THE_INTERPRETER = ("PYTHON", "LANG", "LC_", "LD_", "COVERAGE", "MALLOC", "_GPURUN_COMPLETE", "_TYPER")
"""Variables that Python, or a module as it is imported, reads once. Where they differ, a process is started."""
IMITATED = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
PR_SET_DUMPABLE = 4


_RealPopen = subprocess.Popen


class Popen(_RealPopen):  # type: ignore[type-arg]
    """A process as of `subprocess.Popen`. This Python's `-m gpurun…` is a fork."""

    takes_code = False
    _told: socket.socket | None = None

    def _execute_child(  # what `subprocess` calls, with descriptors that it has made
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int, *session: Any,
    ) -> None:  # fmt: skip
        start = partial(
            super()._execute_child,  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
            p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, *session,
        )  # fmt: skip
        is_new_session, group = session if len(session) == 2 else (*session, -1)  # without a group before Python 3.11
        environ = dict(os.environ) if env is None else {os.fsdecode(key): os.fsdecode(env[key]) for key in env}
        words = _words(args)
        plain = not (preexec_fn or shell or executable) and group == -1 and close_fds and restore_signals
        if not plain or not _can_fork(words, environ, self.takes_code):
            start()
            return
        standard = [found if found != -1 else number for number, found in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "argv": words, "environ": environ, "cwd": os.fspath(cwd) if cwd is not None else str(Path.cwd()),
            "uid": uid, "gid": gid, "gids": gids, "umask": umask if umask >= 0 else _umask(),
            "session": bool(is_new_session), "descriptors": [0, 1, 2, *pass_fds],
        }  # fmt: skip
        try:
            self._told = _server(words[0], environ.get("PYTHONPATH")).ask(request, [*standard, *pass_fds])
        except OSError:  # another user's server, or one that has ended
            start()
            return
        self.pid = int.from_bytes(self._told.recv(4), "big")
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._told is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        try:
            data = self._told.recv(4, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        return self.pid, int.from_bytes(data, "big") if data else signal.SIGKILL

    def _internal_poll(self, *args: Any, **named: Any) -> int | None:
        if self._told is None:
            return super()._internal_poll(*args, **named)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _handle_exitstatus(self, sts: int, *args: Any, **named: Any) -> None:
        super()._handle_exitstatus(sts, *args, **named)  # type: ignore[misc]
        if self._told is not None:
            self._told.close()


class PopenOfCode(Popen):
    """Also `-c`, and of any Python that can import gpurun. What the code imports may have been imported before."""

    takes_code = True


def are_used() -> bool:
    """Whether a quick test runs: on the lab and in benchmarks, processes are real."""
    return subprocess.Popen is Popen


def _words(args: Any) -> list[str]:
    if isinstance(args, (str, bytes, os.PathLike)):
        return [os.fsdecode(args)]
    words = [os.fsdecode(word) for word in args]
    if words[1:] and LOADS in words[1]:  # `gpurun.head.children.start_detached`: a fork has loaded everything
        words[1] = "-m"
    return words


def _can_fork(words: Sequence[str], environ: Mapping[str, str], takes_code: bool) -> bool:
    own = words[0] == sys.executable and environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    if (
        len(words) < 3
        or "python" not in Path(words[0]).name
        or not (own or takes_code)
        or words[1] not in (("-m", "-c") if takes_code else ("-m",))
    ):
        return False
    if words[1] == "-m" and words[2] not in MODULES:
        return False
    if sum(len(os.fsencode(word)) + 1 for word in words) > ROOM_FOR_ARGV:
        return False
    if sum(len(os.fsencode(name + value)) + 2 for name, value in environ.items()) > ROOM_FOR_ENVIRON:
        return False
    now = {**os.environ, "PYTHONPATH": environ.get("PYTHONPATH")}
    names = {name for name in (*environ, *now) if name.startswith(OF_THE_INTERPRETER)} - IMITATED
    return all(environ.get(name) == now.get(name) for name in names)


def _umask() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


class _Client:
    """One who may ask a server: a fork asks the one that made it. It is no longer there when all tests have ended."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> socket.socket:
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            asked.connect(self.path)
        except OSError:
            asked.close()
            raise
        with tempfile.TemporaryFile() as file:  # a request may be larger than a packet
            pickle.dump(request, file)
            file.flush()
            socket.send_fds(asked, [b"."], [file.fileno(), *descriptors])
        return asked

    def close(self) -> None:
        pass


class _Server(_Client):
    """A process that forks for this one and its forks, as long as this one runs."""

    def __init__(self, python: str, path: str | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpurun-forks-")
        super().__init__(str(Path(self._folder.name) / "socket"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.path)
            listening.listen(100)
            self._life, theirs = socket.socketpair()
            kept = [listening.fileno(), theirs.fileno()]
            environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            environ |= {ROOM: " " * ROOM_FOR_ENVIRON, **({} if path is None else {"PYTHONPATH": path})}
            self._process = _RealPopen(
                [python, __file__, *map(str, kept), " " * ROOM_FOR_ARGV], pass_fds=kept,
                env=environ, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            theirs.close()

    def close(self) -> None:
        self._life.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_servers: dict[tuple[int, str, str | None], _Client] = {}


def _server(python: str, path: str | None) -> _Client:
    """Return this process's server with that Python and PYTHONPATH, and start it at the first call."""
    key = os.getpid(), python, path
    if key not in _servers:
        _servers[key] = _Server(python, path)
    return _servers[key]


def close() -> None:
    """End this process's servers."""
    for key in [key for key in _servers if key[0] == os.getpid()]:
        _servers.pop(key).close()


# --- in the server


def serve(listening: socket.socket, life: socket.socket) -> None:
    """Fork until the process that started this one has ended. In a fork: run its program, and end."""
    waking, woken = os.pipe()
    listening_at = listening.getsockname()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    told: dict[int, socket.socket] = {}
    polled = select.poll()  # `select.select` takes no descriptor above 1023
    for each in (listening, life, waking):
        polled.register(each, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in polled.poll()}
        if waking in ready:
            os.read(waking, 1 << 10)
            _tell(told)
        if listening.fileno() in ready:
            asking, _ = listening.accept()
            descriptors = _descriptors(asking)
            if not descriptors:
                asking.close()
                continue
            with os.fdopen(descriptors[0], "rb") as file:
                file.seek(0)
                request = pickle.load(file)
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for connection in (listening, life, asking, *told.values()):
                    connection.detach()  # `become` closes the descriptor
                become(request, descriptors[1:])
                _servers[os.getpid(), sys.executable, os.environ.get("PYTHONPATH")] = _Client(listening_at)
                subprocess.Popen = Popen  # type: ignore[misc]
                leave(request["argv"])
            told[child] = asking
            with suppress(OSError):  # who asked was killed
                asking.send(child.to_bytes(4, "big"))
            for descriptor in descriptors[1:]:
                os.close(descriptor)
        elif life.fileno() in ready:  # who started this one ended, perhaps without a word
            shutil.rmtree(Path(listening_at).parent, ignore_errors=True)
            return


def _descriptors(asking: socket.socket) -> list[int]:
    """Return what came with a request; nothing if who asks was killed before sending it."""
    with suppress(ConnectionResetError):
        return socket.recv_fds(asking, 1, 100)[1]
    return []


def _tell(told: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with told.pop(pid) as asking, suppress(OSError):
                asking.send(status.to_bytes(4, "big"))


def become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Be the process that the request is about, but for its program."""
    high = [os.dup2(descriptor, 500 + at) for at, descriptor in enumerate(descriptors)]
    for source, target in zip(high, request["descriptors"], strict=True):
        os.dup2(source, target)
    kept = sorted(request["descriptors"])
    for low, top in zip([-1, *kept], [*kept, 1 << 16], strict=True):
        if low + 1 < top:
            os.closerange(low + 1, top)
    if request["session"]:
        os.setsid()
    show(request["argv"], request["environ"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    if request["gids"] is not None:
        os.setgroups(request["gids"])
    if request["gid"] is not None:
        os.setregid(request["gid"], request["gid"])
    if request["uid"] is not None:
        os.setreuid(request["uid"], request["uid"])
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after execve
    encoding = locale.getpreferredencoding(False)
    lines, at_once = os.isatty(1), bool(request["environ"].get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, "r", encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False, buffering=1 if lines else -1)
    sys.stderr = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1)
    sys.stdout.reconfigure(write_through=at_once)
    sys.dont_write_bytecode = bool(request["environ"].get("PYTHONDONTWRITEBYTECODE"))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def show(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let /proc show them, as if this process had been started with them; empty words end the command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    pairs = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    pairs += f"{ROOM}=".encode().ljust(env_end - env_start - len(pairs) - 1, b" ")
    for start, end, data in ((arg_start, arg_end, words), (env_start, env_end, pairs)):
        assert len(data) < end - start
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))


def run(argv: Sequence[str]) -> None:
    """Run the program as Python's command line does."""
    sys.orig_argv = list(argv)
    if argv[1] == "-c":
        sys.argv = ["-c", *argv[3:]]
        sys.path[0:1] = [""]
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(argv[2], "<string>", "exec"), vars(main))
        return
    sys.argv = [argv[2], *argv[3:]]
    sys.path[0:1] = [str(Path.cwd())]
    for name in (argv[2], f"{argv[2]}.__main__"):
        if name != "gpurun":
            sys.modules.pop(name, None)
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)


def leave(argv: Sequence[str]) -> None:
    """Run the program, and end as Python ends, but for its last step: to free all memory costs more than the rest."""
    code: Any = 0
    try:
        run(argv)
    except SystemExit as leaving:
        code = leaving.code or 0
    except Exception:  # noqa: BLE001 (as Python prints what nobody catches)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python knows what to say and which code to end with
    os._exit(code & 0xFF)


def import_everything() -> None:
    """Import and make what commands, waiters and supervisors import and make as they run."""
    import gc

    import roomy_disk

    from gpurun.cli.main import COMMANDS, main

    for place in COMMANDS.values():
        importlib.import_module(place.where.partition(":")[0])
    importlib.import_module("gpurun.supervisor.__main__")
    roomy_disk.install()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        os.environ["GPURUN_HOME"] = os.devnull
        for words in (["version"], ["status", "--inventory", os.devnull]):
            with suppress(SystemExit):
                main(words)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_everything()
    serve(*(socket.socket(fileno=int(word)) for word in sys.argv[1:3]))
else:
    atexit.register(close)

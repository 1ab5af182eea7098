"""Run a program on the host: an argv, never a shell line.

``proc.run`` waits for the program and returns its exit code and output. It kills the program's whole session when the
call is cancelled, times out, or the agent exits: a program may put what it starts into process groups, as timeout(1)
does.
"""

import os
import signal
import subprocess
import threading
from typing import Any, Dict, List, Optional, Set

from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpError


class Child:
    """A program in a session of its own, which any thread can kill at any time."""

    def __init__(self, argv: List[str], env: Optional[Dict[str, str]], cwd: Optional[str]) -> None:
        if not argv or not isinstance(argv, list) or not all(isinstance(part, str) for part in argv):
            raise OpError("bad-request", "an argv must be a list of at least one text")
        if any("\0" in part for part in [*argv, *(env or {}).keys(), *(env or {}).values()]):
            raise OpError("bad-request", "a NUL character cannot be passed to a program")
        self._lock = threading.Lock()
        self._reaped = False
        self._over = threading.Event()
        self.is_beyond_reach = False
        self.process = subprocess.Popen(
            [os.fsencode(part) for part in argv],
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._over.set()

    def kill(self) -> None:
        """Kill the whole session. Does nothing after `wait` has returned.

        A group of which every process belongs to another user, such as one that sudo(8) started, is beyond reach: then
        nobody waits for it any longer.
        """
        with self._lock:
            if not self._reaped:
                try:
                    os.killpg(self.process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    if not self._over.is_set():
                        self.is_beyond_reach = True
                        self._over.set()
                processes.kill_session(self.process.pid)

    def wait_unreaped(self) -> None:
        """Wait for the program's end, but keep its pid reserved, so that its session can still be killed safely."""
        self._over.wait()

    def reap(self) -> int:
        """Kill what the program left behind in its session; return its exit code, or −signal."""
        self.kill()
        with self._lock:
            self._reaped = True
            return -signal.SIGKILL if self.is_beyond_reach else self.process.wait()


_children: Set[Child] = set()
_children_lock = threading.Lock()


def run(
    call: Call,
    argv: List[str],
    env: Optional[Dict[str, str]] = None,
    cwd: Optional[str] = None,
    time_limit_s: Optional[float] = None,
    max_output_bytes: int = 4 << 20,
) -> Dict[str, Any]:
    """Run `argv`; the request's payload is its stdin.

    Args:
        env: added to the agent's own environment.
        time_limit_s: when to kill it; None = when the call is cancelled, for example because it times out at the head.
        max_output_bytes: of stdout and of stderr each, how many of the *last* bytes are kept.

    Returns:
        ``{"code", "stdout", "stderr", "truncated"}``; texts are UTF-8 with surrogateescape; a program killed by a
        signal has the code −signal.

    Raises:
        OpError: ``bad-request`` for an argv that cannot be executed (empty, NUL in it); ``not-found`` or ``denied`` if
            the program cannot be started; ``timeout`` if it did not end in time, and was killed or is beyond reach.
    """
    stdin = call.payload
    child = Child(argv, env, cwd)
    with _children_lock:
        _children.add(child)
    timed_out = threading.Event()

    def expire() -> None:
        timed_out.set()
        child.kill()

    timer = threading.Timer(time_limit_s or 0, expire)
    timer.daemon = True
    if time_limit_s is not None:
        timer.start()
    call.on_cancel(child.kill)
    try:
        out, err = _communicate(child, stdin, max_output_bytes)
    finally:
        timer.cancel()
        code = child.reap()
        with _children_lock:
            _children.discard(child)
    call.check()
    if timed_out.is_set():
        last = {"stdout": _text(out[-4096:]), "stderr": _text(err[-4096:]), "goes_on": child.is_beyond_reach}
        raise OpError("timeout", "%s did not end within %g s" % (argv[0], time_limit_s or 0), **last)
    truncated = max(len(out), len(err)) >= max_output_bytes
    return {"code": code, "stdout": _text(out), "stderr": _text(err), "truncated": truncated}


def _communicate(child: Child, stdin: bytes, keep: int) -> "tuple[bytearray, bytearray]":
    """Feed stdin and collect the last `keep` bytes of both outputs until the program ends."""
    process = child.process
    assert process.stdin and process.stdout and process.stderr
    out, err = bytearray(), bytearray()
    threads = [
        threading.Thread(target=_collect, args=(process.stdout, out, keep), daemon=True),
        threading.Thread(target=_collect, args=(process.stderr, err, keep), daemon=True),
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True),
    ]
    for thread in threads:
        thread.start()
    child.wait_unreaped()
    # A process that left the session (a daemon) may still hold the pipes open: its output is not ours to wait for.
    for thread in threads:
        thread.join(0.5)
    return out, err


def _collect(stream: Any, into: bytearray, keep: int) -> None:
    with stream:
        while True:
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                return
            into += data
            if len(into) > keep:
                del into[: len(into) - keep]


def _feed(stream: Any, data: bytes) -> None:
    try:
        with stream:
            stream.write(data)
    except OSError:
        pass  # the program closed its stdin or ended: its exit code tells


def kill_all() -> None:
    """Kill every program that `run` started and that still runs."""
    with _children_lock:
        children = list(_children)
    for child in children:
        child.kill()


def _text(data: bytearray) -> str:
    return bytes(data).decode("utf-8", "surrogateescape")


OPS = {"run": run}

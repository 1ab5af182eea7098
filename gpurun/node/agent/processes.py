"""Processes of this host: ancestry, and which belong to a job, from /proc; and programs that an operation runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from gpurun.node.agent.frames import Call, OpError

_MOST_COMMAND = 1 << 16
"""No more of a command line is kept: a program can write megabytes into its own, a thousand times."""

_EXITING = 0x4
"""The kernel's PF_EXITING in field `flags` (man proc_pid_stat; include/linux/sched.h)."""
_KERNEL_THREAD = 0x200000
"""PF_KTHREAD, likewise."""
SESSION_S = 2.0
"""A process that is killed is gone at once, unless it waits for a device."""


class Process(NamedTuple):
    """One process. `started` (clock ticks since boot) tells a reused pid from the process it was."""

    pid: int
    parent: int
    started: int
    uid: int
    command: str


def list_processes() -> List[Process]:
    """Return every visible process; leaves out those that end meanwhile."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                found.append(process)
    return found


def open_files(pid: int, proc: str = "/proc") -> Dict[int, str]:
    """Return descriptor → its target; empty for a process that is gone, or another user's.

    Skips a descriptor that is closed meanwhile.
    """
    folder = "%s/%d/fd" % (proc, pid)
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for name in names:
        try:
            found[int(name)] = os.readlink("%s/%s" % (folder, name))
        except OSError:
            pass
    return found


def read_process(pid: int) -> "Process | None":
    """Return one process; None if there is none (a zombie counts as none)."""
    try:
        fields = _stat(pid)
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            command = stream.read(_MOST_COMMAND).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[19]), uid, command)


def is_ending(pid: int, started: int) -> bool:
    """Return whether a process is gone or will be: the kernel is ending it, and no signal or program can undo that.

    The first process of a PID namespace stays so until all others in it are gone, which takes seconds on a busy host.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING) or int(fields[19]) != started


def environment_once_begun(process: Process, until: float) -> Dict[str, str]:
    """Return a process's initial environment, empty if it has none; waits for an exec that is under way.

    `until`: give up then, on `time.monotonic`'s clock.
    """
    while True:
        found = environment_of(process.pid)
        if found is not None or not _is_in_an_exec(process) or time.monotonic() > until:
            return found or {}
        time.sleep(0.002)


def _is_in_an_exec(process: Process) -> bool:
    """Return whether a process without a command line will have one: it is no thread of the kernel, and not ending."""
    try:
        flags = int(_stat(process.pid)[6])
    except OSError:
        return False
    return not flags & _KERNEL_THREAD and not is_ending(process.pid, process.started)


def _stat(pid: int) -> List[bytes]:
    """Return a process's fields from its state on. Raises OSError if there is none."""
    with open("/proc/%d/stat" % pid, "rb") as stream:
        # The name is in parentheses and may hold anything, so split after the last one (man proc_pid_stat).
        return stream.read().rpartition(b")")[2].split()


def in_session(session: int) -> List[int]:
    """Return the processes of a session, whatever their process groups; zombies count as none."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = _stat(int(name))
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X") and int(fields[3]) == session:
                found.append(int(name))
    return found


def kill_session(session: int) -> None:
    """Kill the processes of a session, also those that are being started; gives up after a moment.

    The caller keeps its leader's pid reserved. Processes of other users stay.
    """
    refused = set()  # type: Set[int]
    deadline = time.monotonic() + SESSION_S
    while time.monotonic() < deadline:
        pids = set(in_session(session)) - refused
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                refused.add(pid)
        time.sleep(0.005)


def command_line(pid: int, proc: str = "/proc") -> List[str]:
    """Return a process's arguments; empty for a process that is gone or a thread of the kernel."""
    try:
        with open("%s/%d/cmdline" % (proc, pid), "rb") as stream:
            return stream.read(_MOST_COMMAND).decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []


def note_process(path: str, process: Optional[Process]) -> None:
    """Record a process for `noted`; without one, record that nothing is known."""
    if process is None:
        if os.path.lexists(path):
            os.unlink(path)
        return
    with open(path, "w", encoding="utf-8") as stream:
        json.dump({"pid": process.pid, "started": process.started}, stream)


def noted(path: str) -> "Tuple[int, int] | None":
    """Return the pid and start of the process recorded there; None if there is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        return int(found["pid"]), int(found["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def container_of(pid: int, proc: str = "/proc") -> str:
    """Return a process's Docker container, from its cgroup (``docker-ID.scope`` or ``/docker/ID``); "" if none."""
    try:
        with open("%s/%d/cgroup" % (proc, pid), encoding="utf-8", errors="replace") as stream:
            text = stream.read(1 << 14)
    except OSError:
        return ""
    for part in text.replace("\n", "/").replace("docker-", "/").replace(".scope", "/").split("/"):
        if len(part) == 64 and all(letter in "0123456789abcdef" for letter in part):
            return part
    return ""


def environment_of(pid: int, proc: str = "/proc") -> Optional[Dict[str, str]]:
    """Return a process's initial environment; empty if only its user may see it.

    None if the process is gone, or in the middle of an exec: for a moment it has neither an environment nor a command
    line.
    """
    try:
        raw = _read(proc, pid, "environ")
        if not raw:
            if not _read(proc, pid, "cmdline"):
                return None
            raw = _read(proc, pid, "environ")  # it may have become one in between
    except PermissionError:
        return {}
    except OSError:
        return None
    entries = raw.decode("utf-8", "surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _read(proc: str, pid: int, name: str) -> bytes:
    with open("%s/%d/%s" % (proc, pid, name), "rb") as stream:
        return stream.read(1 << 20)


def with_descendants(roots: Iterable[int], processes: List[Process]) -> List[Process]:
    """Return `roots` and all their descendants, parents first."""
    children: Dict[int, List[Process]] = {}
    by_pid = {process.pid: process for process in processes}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: List[Process] = []
    seen: Set[int] = set()
    waiting = [by_pid[pid] for pid in roots if pid in by_pid]
    while waiting:
        process = waiting.pop(0)
        if process.pid not in seen:
            seen.add(process.pid)
            found.append(process)
            waiting.extend(children.get(process.pid, []))
    return found


def of_job(markers: Iterable[str]) -> List[Process]:
    """Return processes whose command line contains one of a job's own paths or names, and their descendants.

    Leaves out this process, its ancestors and its other descendants.
    """
    wanted = list(markers)
    processes = list_processes()
    mine = _lineage(processes)
    roots = [p.pid for p in processes if p.pid not in mine and any(marker in p.command for marker in wanted)]
    return [process for process in with_descendants(roots, processes) if process.pid not in mine]


def _lineage(processes: List[Process]) -> Set[int]:
    """Return this process and its ancestors."""
    parents = {process.pid: process.parent for process in processes}
    lineage, pid = set(), os.getpid()
    while pid and pid not in lineage:
        lineage.add(pid)
        pid = parents.get(pid, 0)
    return lineage


def end(processes: Iterable[Process], grace_s: float) -> List[Process]:
    """Send SIGTERM, then SIGKILL after `grace_s`; return those that are still there."""
    left = list(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in left:
            _signal(process, number)
        deadline = time.monotonic() + patience_s
        while left and time.monotonic() < deadline:
            left = [process for process in left if is_same(process)]
            if left:
                time.sleep(0.01)
    return left


def is_same(process: Process) -> bool:
    """Return True while exactly this process lives."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started


def _signal(process: Process, number: int) -> None:
    if is_same(process):
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # gone, or not ours: `end` reports what stays


# Run a program on the host: an argv, never a shell line.


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
                kill_session(self.process.pid)

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

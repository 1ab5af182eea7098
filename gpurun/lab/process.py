"""Processes, locks, cgroups and programs of a lab: identify a process reliably, and end it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntFlag
from pathlib import Path

from gpurun.errors import BadInput, HostFailure
from gpurun.state import locks

# Errors of a lab, except wrong options.


class LabFailed(HostFailure):
    """The machine refused an operation that the lab needs, or a host of the lab did not start."""


class NotInstalled(BadInput):
    """The machine lacks programs or privileges for a lab; the lab started nothing."""


class NoSuchLab(BadInput):
    """No running lab, or no running host in it, has this name."""


_POLL_S = 0.02


@dataclass(frozen=True)
class ProcessId:
    """One process of this boot. The kernel reuses pids, but not a pid with the same start time.

    Attributes:
        start_ticks: clock ticks after boot at which it started, field 22 of ``/proc/PID/stat`` (proc(5)).
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has this pid now; None if there is none or it is a zombie."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def load(cls, record: Path) -> ProcessId | None:
        """Read the file that `save` wrote; None if it is missing or invalid."""
        try:
            fields = json.loads(record.read_text())
            return cls(int(fields["pid"]), int(fields["start_ticks"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, record: Path) -> None:
        """Write the process's identity atomically."""
        draft = record.with_name(f".{record.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(record)

    def alive(self) -> bool:
        """Return True if this exact process still runs."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if not self.alive():
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False after the time-out."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to `grace_s` seconds, then send SIGKILL; returns when the process has ended."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
            if self.wait(grace_s):
                return
        self.send(signal.SIGKILL)
        self.wait(10.0)


def _stat(pid: int) -> list[str] | None:
    """Return fields 3 and up of ``/proc/PID/stat``. The name before them may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


# Start process 1 of new namespaces. Its record exists before it does anything.


_RECORD_TIMEOUT_S = 20.0


def spawn_init(
    module: str, arguments: Sequence[str], *, record: Path, log: Path, netns: Path | None = None
) -> ProcessId:
    """Start ``python -m MODULE RECORD TELLER GATE ARGUMENTS…`` as process 1 of its own namespaces.

    The process always has its own mount and PID namespace. With `netns`, it also has its own UTS and IPC namespaces,
    inside that network namespace. It is not a child of the caller, and outlives it after its record exists.

    Args:
        record: file to which the process writes its `ProcessId` before anything else.
        log: file to which its own messages are appended.
        netns: file of the network namespace to enter; None = the machine's.

    Raises:
        LabFailed: the process ended before it wrote its record.
    """
    record.unlink(missing_ok=True)
    enter = ["nsenter", f"--net={netns}"] if netns else []
    own_names = ["--uts", "--ipc"] if netns else []
    heard, teller = os.pipe()
    gate, opener = os.pipe()
    try:
        with log.open("ab") as said:
            subprocess.run(
                [
                    *("setsid", "--fork"),
                    *enter,
                    *("unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child", *own_names),
                    *(sys.executable, "-m", module, str(record), str(teller), str(gate), *arguments),
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(teller, gate),
                check=True,
            )
        os.close(teller)
        told = select.select([heard], [], [], _RECORD_TIMEOUT_S)[0] and os.read(heard, 1)
        init = ProcessId.load(record)
        if not told or init is None:
            raise LabFailed(f"a namespace did not start: {_last_line(log)}", hint=f"read the end of the log {log}")
        os.write(opener, b"!")
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabFailed(f"a namespace did not start: {error}", hint=f"read the end of the log {log}") from error
    finally:
        for end in (heard, gate, opener):
            os.close(end)
    return init


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the command printed no message"


# One command at a time may change a lab, even shortly after that command was killed.


@contextmanager
def lab_alone(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on the file `path` and hold it. The holder may remove the file.

    The lock is inheritable on purpose: a child such as ``ip`` or ``tc`` holds it until it ends. So after a ``kill -9``,
    the next holder finds no command that still changes the lab. See `gpurun.lab.process.run_command`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locks.alone(path, inheritable=True):
        yield


# Check that this machine has everything that a lab needs. One message lists all missing parts.


PACKAGE_OF = {
    "containerd": "containerd",
    "dockerd": "docker.io",
    "gcc": "gcc",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "nsenter": "util-linux",
    "runc": "runc",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_program(program: str) -> str | None:
    """Return the absolute path of a program: searches the folders of system daemons first, then ``PATH``."""
    return shutil.which(program, path=SYSTEM_PATH) or shutil.which(program)


def require(*programs: str) -> None:
    """Check for Linux, root, and these programs.

    Raises:
        NotInstalled: the message lists everything that is missing, and the hint is the command that installs it.
    """
    if sys.platform != "linux":
        raise NotInstalled(
            "a lab needs Linux, because the hosts of a lab are Linux namespaces", hint="use a Linux machine or a VM"
        )
    if os.geteuid() != 0:
        raise NotInstalled(
            "a lab needs root to make namespaces and bridges", hint="run: sudo -E $(command -v gpurun) lab up"
        )
    missing = [program for program in programs if find_program(program) is None]
    if missing:
        packages = " ".join(sorted({PACKAGE_OF[program] for program in missing}))
        raise NotInstalled(
            f"a lab needs programs that are not installed: {', '.join(missing)}",
            hint=f"run: sudo apt-get install --no-install-recommends {packages}",
        )


# Run programs of the machine (``ip``, ``tc``, ``ssh-keygen`` …) as argument lists, never as shell text.


_TIMEOUT_S = 60.0
_ENV = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"}


def run_command(argv: Sequence[str], *, stdin: str = "", merge_stderr: bool = False) -> str:
    """Run a program to its end and return its stdout, with `merge_stderr` also its stderr.

    The program inherits the lab's lock. If the lab's process is killed, the lock stays held until the program has ended
    too.

    Raises:
        LabFailed: the program failed; the message contains its output.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=_ENV,
            check=False,
            close_fds=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabFailed(
            f"gpurun could not run {argv[0]}: {error}", hint="check that the machine has free memory and PIDs"
        ) from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LabFailed(
            f"`{' '.join(argv)}` failed: {'; '.join(said) or f'exit code {done.returncode}'}",
            hint="`gpurun lab down` removes what a failed command left",
        )
    return done.stdout + done.stderr if merge_stderr else done.stdout


# System calls that a lab needs and Python's ``os`` lacks: mount, umount, pivot_root, prctl.


_LIBC = ctypes.CDLL(None, use_errno=True)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1


class MountFlag(IntFlag):
    """Flags of mount(2), by their names in ``<sys/mount.h>``."""

    NONE = 0
    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    REMOUNT = 32
    BIND = 4096
    REC = 16384
    PRIVATE = 1 << 18
    SLAVE = 1 << 19


def mount(
    source: str | Path, target: str | Path, kind: str = "", flags: MountFlag = MountFlag.NONE, data: str = ""
) -> None:
    """Call mount(2).

    Raises:
        OSError: its file name is the target.
    """
    result = _LIBC.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(int(flags)), data.encode()
    )
    _check(result, target)


def bind(source: str | Path, target: str | Path, *, recursive: bool = False) -> None:
    """Mount the tree at `source` also at `target`."""
    mount(source, target, flags=MountFlag.BIND | (MountFlag.REC if recursive else MountFlag.NONE))


def unmount_lazily(target: str | Path) -> None:
    """Call umount2(2) with MNT_DETACH: removes the mount immediately, and frees it when its last user ends."""
    _check(_LIBC.umount2(os.fsencode(target), _MNT_DETACH), target)


def make_root(new_root: Path) -> None:
    """Make the mount point `new_root` this process's ``/`` and release the old one.

    pivot_root(".", ".") stacks the old root on the new one, so that one lazy unmount releases it: pivot_root(2),
    "pivot_root(., .)". The mount namespace must be private to the caller.
    """
    os.chdir(new_root)
    _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), new_root)
    unmount_lazily(".")
    os.chdir("/")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends: prctl(2), PR_SET_PDEATHSIG."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, target: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


# Control groups of a lab's containers, in every hierarchy the machine has (cgroup v1, v2 or both).


_EMPTY_TIMEOUT_S = 5.0


def hierarchies() -> tuple[Path, ...]:
    """Return the mount points of all cgroup hierarchies (proc_pid_mountinfo(5): type after the ``-``)."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _dash, after = line.partition(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split()[4]))
    return tuple(found)


@dataclass(frozen=True)
class Cgroup:
    """A cgroup by its path below the root of every hierarchy. Docker creates it; only the lab removes it."""

    name: str

    @property
    def path(self) -> str:
        """The path in the form of ``dockerd --cgroup-parent``."""
        return f"/{self.name}"

    def places(self) -> list[Path]:
        """Return its existing folders."""
        return [place for root in hierarchies() if (place := root / self.name).is_dir()]

    def remove(self) -> list[Path]:
        """Remove it with all child groups. Returns the folders that still contain processes."""
        deadline = time.monotonic() + _EMPTY_TIMEOUT_S
        while True:
            left = [place for place in self.places() if not _remove_tree(place)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def _remove_tree(place: Path) -> bool:
    """Remove a cgroup folder depth first. Removes only folders, because the files belong to the kernel."""
    for child in place.iterdir():
        if child.is_dir():
            _remove_tree(child)
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


# Check over a Unix socket whether a Docker engine answers.


DEFAULT_SOCKET = Path("/var/run/docker.sock")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def answers(path: Path, *, timeout_s: float = 2.0) -> bool:
    """Return True if an engine answers ``GET /_ping`` on this Unix socket."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("GET", "/_ping")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until_it_answers(path: Path, *, timeout_s: float) -> bool:
    """Poll until an engine answers; False if none answers in time."""
    deadline = time.monotonic() + timeout_s
    while not answers(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

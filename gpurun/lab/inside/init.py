"""A small init: starts services, reaps every orphan, restarts services that end, ends all on SIGTERM."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpurun.lab.process import MountFlag, ProcessId, bind, make_root, mount

_RESTART_AFTER_S = 1.0
_HEARD = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True)
class Service:
    """A program that init keeps running.

    Attributes:
        argv: the program, absolute, and its arguments.
        log: file to which its stdout and stderr are appended.
        stale: files that a crashed run leaves behind and that prevent the next start, such as a pid file.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    stale: tuple[str, ...] = ()


def hold_signals() -> None:
    """Block signals until `supervise` reads them. Process 1 would lose signals without a handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


def supervise(services: Sequence[Service], *, grace_s: float) -> None:
    """Act as init until SIGTERM; then end the services, last started first, and return.

    When process 1 exits, the kernel kills all other processes of the PID namespace.

    Args:
        grace_s: how long each service may take to end before SIGKILL.
    """
    hold_signals()
    running = {_start(service): service for service in services}
    due: dict[Service, float] = {}
    while True:
        heard = signal.sigtimedwait(_HEARD, _until(due))
        for pid in _reap():
            if pid in running:
                due[running.pop(pid)] = time.monotonic() + _RESTART_AFTER_S
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            break
        for service in [service for service, at in due.items() if at <= time.monotonic()]:
            del due[service]
            running[_start(service)] = service
    for pid in reversed(running):
        _end(pid, grace_s)


def _start(service: Service) -> int:
    for path in service.stale:
        Path(path).unlink(missing_ok=True)
    Path(service.log).parent.mkdir(parents=True, exist_ok=True)
    return os.posix_spawn(
        service.argv[0],
        service.argv,
        dict(service.env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, service.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
    )


def _until(due: Mapping[Service, float]) -> float:
    """Return the seconds until the next restart is due; an hour if none is due."""
    return max(0.0, min(due.values()) - time.monotonic()) if due else 3600.0


def _reap() -> list[int]:
    """Collect every child that has ended, including adopted children."""
    ended: list[int] = []
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


def _end(pid: int, grace_s: float) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if pid in _reap():
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
    os.kill(pid, signal.SIGKILL)


# The instructions for a host's process 1: one JSON file. ``gpurun lab up`` writes it with this module.


@dataclass(frozen=True)
class File:
    """A file of the host.

    Attributes:
        keep: write the file only if the host has none: users may have changed it.
        uid: owner and group.
    """

    path: str
    text: str
    mode: int = 0o644
    uid: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Copy:
    """A file of the host that is copied from the machine."""

    source: str
    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Boot:
    """One start of one host.

    Attributes:
        disk: folder that is the host's disk, or the mount point of `image`.
        image: file with an ext4 file system; None = `disk` itself is the disk.
        hardware: folder that appears in the host as ``/run/gpurun-lab``.
        devices: device nodes to create below ``/dev``; the stand-ins discard all input, like ``/dev/null``.
        homes: uid by user name.
        authorized_key: public key that these users accept.
    """

    name: str
    disk: str
    image: str | None
    hardware: str
    files: tuple[File, ...]
    copies: tuple[Copy, ...]
    devices: tuple[str, ...]
    homes: Mapping[str, int]
    authorized_key: str
    services: tuple[Service, ...]

    def save(self, path: Path) -> None:
        """Write the file. Only root may read it, because it contains the host's private key."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Boot:
        """Read the file that `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        fields["files"] = tuple(File(**each) for each in fields["files"])
        fields["copies"] = tuple(Copy(**each) for each in fields["copies"])
        fields["services"] = tuple(service_from(each) for each in fields["services"])
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)


def service_from(fields: Mapping[str, Any]) -> Service:
    """Return a `Service` from its JSON."""
    return Service(**{**fields, "argv": tuple(fields["argv"]), "stale": tuple(fields["stale"])})


# The handshake between a starter and its process 1: if one of them is killed, the other does not stay behind.


def announce(record: Path, teller: int, gate: int) -> None:
    """Record this process's pid, as the machine numbers processes. Continue only after the starter has read the record.

    The starter reads the pipe `teller` and writes the pipe `gate`. If the starter dies first, this process ends too, so
    that no namespace without a record keeps running. Call this while ``/proc`` is the machine's.
    """
    myself = ProcessId.of(int(Path("/proc/self").readlink().name))
    assert myself is not None
    myself.save(record)
    os.write(teller, b"!")
    os.close(teller)
    if os.read(gate, 1) == b"":
        sys.exit("the command that started this process has ended")
    os.close(gate)


# The file system of a host: its own disk as ``/``, with the machine's programs, and nothing else of the machine.


_FOLDERS = {
    **dict.fromkeys(("etc", "usr", "dev", "proc", "sys", "run", "home", "opt", "srv", "mnt", "media"), 0o755),
    **dict.fromkeys(("var", "var/cache", "var/lib", "var/lib/docker", "var/log", "var/spool"), 0o755),
    **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
    "root": 0o700,
    ".lab": 0o700,
}
_LINKS = {"var/run": "/run", "var/lock": "/run/lock"}
_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LAID_OVER = ("etc", "usr")
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
    "kmsg": "/run/gpurun-lab/kmsg",  # the kernel has one log for all hosts, so each host has a file instead
}
HARDWARE = "run/gpurun-lab"


def build_root(boot: Boot) -> None:
    """Mount the host's root, write its files, and change into it."""
    root = Path(boot.disk)
    if boot.image:
        subprocess.run(["/bin/mount", "-o", "loop,discard", boot.image, str(root)], check=True)
    else:
        bind(root, root)
    os.chdir(root)  # relative paths from here on keep the machine's paths out of mount options
    _make_folders(root)
    _lay_over(root)
    _link_programs(root)
    _mount_kernel(root)
    _make_devices(root / "dev", boot.devices)
    bind(boot.hardware, root / HARDWARE)
    for copy in boot.copies:
        _copy(root, copy)
    for file in boot.files:
        _write(root, file)
    for name, uid in boot.homes.items():
        _make_home(root, name, uid, boot.authorized_key)
    make_root(root)


def _make_folders(root: Path) -> None:
    root.chmod(0o755)
    for name, mode in _FOLDERS.items():
        folder = root / name
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    for name, target in _LINKS.items():
        if not (root / name).is_symlink():
            (root / name).symlink_to(target)


def _lay_over(root: Path) -> None:
    for name in _LAID_OVER:
        upper, work = f".lab/{name}", f".lab/{name}.work"
        for folder in (upper, work):
            Path(folder).mkdir(exist_ok=True)
        mount("overlay", root / name, "overlay", data=f"lowerdir=/{name},upperdir={upper},workdir={work}")


def _link_programs(root: Path) -> None:
    """Create ``/bin``, ``/lib`` …: links into ``/usr`` if the machine has links, otherwise its folders, read-only."""
    for name in _PROGRAMS:
        place, here = Path("/", name), root / name
        if place.is_symlink():
            if not here.is_symlink():
                here.symlink_to(place.readlink())
        elif place.is_dir():
            here.mkdir(exist_ok=True)
            bind(place, here)
            mount("", here, flags=MountFlag.BIND | MountFlag.REMOUNT | MountFlag.RDONLY)


def _mount_kernel(root: Path) -> None:
    quiet = MountFlag.NOSUID | MountFlag.NODEV
    mount("proc", root / "proc", "proc", quiet | MountFlag.NOEXEC)
    mount("sysfs", root / "sys", "sysfs", quiet | MountFlag.NOEXEC)
    bind("/sys/fs/cgroup", root / "sys/fs/cgroup", recursive=True)
    mount("tmpfs", root / "run", "tmpfs", quiet, "mode=755,size=1g")
    for name in ("run/lock", "run/sshd", HARDWARE):
        (root / name).mkdir()
    mount("tmpfs", root / "dev", "tmpfs", MountFlag.NOSUID, "mode=755,size=1m")
    (root / "dev/shm").mkdir()
    mount("tmpfs", root / "dev/shm", "tmpfs", quiet, "mode=1777")
    (root / "dev/pts").mkdir()
    mount("devpts", root / "dev/pts", "devpts", MountFlag.NOSUID, "newinstance,gid=5,mode=620,ptmxmode=666")


def _make_devices(dev: Path, stand_ins: tuple[str, ...]) -> None:
    for name, (major, minor) in {**_NODES, **dict.fromkeys(stand_ins, _NODES["null"])}.items():
        (dev / name).parent.mkdir(exist_ok=True)
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, target in _DEVICE_LINKS.items():
        (dev / name).symlink_to(target)


def _copy(root: Path, copy: Copy) -> None:
    target = root / copy.path.lstrip("/")
    if target.exists() and filecmp.cmp(copy.source, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copyfile(copy.source, target)
    target.chmod(copy.mode)


def _write(root: Path, file: File) -> None:
    """Write a file unless it already has this content, so that a host with a full disk still boots."""
    target = root / file.path.lstrip("/")
    if target.is_file() and not target.is_symlink() and (file.keep or target.read_bytes() == file.text.encode()):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # may be a link from the machine, such as /etc/resolv.conf
    target.touch(mode=0o600)
    target.write_text(file.text)
    os.chown(target, file.uid, file.uid)
    target.chmod(file.mode)


def _make_home(root: Path, name: str, uid: int, authorized_key: str) -> None:
    home = root / "home" / name
    for folder, mode in ((home, 0o755), (home / ".ssh", 0o700)):
        folder.mkdir(exist_ok=True)
        os.chown(folder, uid, uid)
        folder.chmod(mode)
    _write(root, File(f"/home/{name}/.ssh/authorized_keys", f"{authorized_key}\n", mode=0o600, uid=uid))

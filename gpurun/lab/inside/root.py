"""The file system of a host: its own disk as ``/``, with the machine's programs, and nothing else of the machine.

All mounts are in the host's own mount namespace, so they disappear with the host's last process.

=============  ==================================================================================
``/``          the host's disk: a folder, or an ext4 image where the disk has a size
``/usr /etc``  the machine's, with the host's own changes laid over them (overlayfs), on its disk
``/dev /run``  fresh tmpfs; ``/dev`` holds the usual nodes and stand-ins for GPUs and HCAs
``/proc /sys`` of the host's own PID and network namespaces; the machine's cgroups
=============  ==================================================================================
"""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
import subprocess
from pathlib import Path

from gpurun.lab.inside.boot import Boot, Copy, File
from gpurun.lab.kernel import MountFlag, bind, make_root, mount

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


def build(boot: Boot) -> None:
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

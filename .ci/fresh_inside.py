"""Process 1 of the machine that ``make fresh`` makes: builds its root from the inside, then runs the commands."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpurun.lab.process import MountFlag, bind, make_root, mount

NAME_SERVER = "10.0.2.3"  # slirp4netns answers there with this machine's own
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUIET = MountFlag.NOSUID | MountFlag.NODEV


@dataclass(frozen=True)
class Boot:
    """The input of process 1, as JSON on its stdin.

    Attributes:
        shared: the machine's folder, where it appears, whether it can be written, and which folders of it stay out.
        cgroups: mount points below /sys/fs/cgroup; ``.`` is that folder itself.
        group: the control group, in every hierarchy, that the new machine sees as its root.
    """

    root: str
    shared: Sequence[tuple[str, str, bool, Sequence[str]]]
    cgroups: Sequence[str]
    group: str
    clone: str
    commands: Sequence[str]
    environment: dict[str, str]

    def text(self) -> str:
        """As `main` reads it."""
        return json.dumps(asdict(self))


def main() -> int:
    """Wait until there is a network, become the machine, run the commands until one fails."""
    teller, gate = map(int, sys.argv[1:])
    boot = Boot(**json.loads(sys.stdin.read()))
    os.write(teller, b"!")
    os.close(teller)
    if os.read(gate, 1) == b"":
        return 1  # the process that started this has failed and reported why
    os.close(gate)
    os.umask(0o022)
    socket.sethostname("fresh")
    build(boot)
    for command in boot.commands:
        started = time.monotonic()
        print(f"== fresh: {command}", flush=True)
        code = run(command, boot)
        print(f"== fresh: {command}: {time.monotonic() - started:.0f} s, exit code {code}", flush=True)
        if code:
            return code
    return 0


def build(boot: Boot) -> None:
    """Mount everything below the new root, in this process's own mount namespace, and change into it."""
    root = Path(boot.root)
    bind(root, root)
    mount("proc", root / "proc", "proc", QUIET | MountFlag.NOEXEC)
    mount("sysfs", root / "sys", "sysfs", QUIET | MountFlag.NOEXEC)
    _mount_cgroups(root / "sys/fs/cgroup", boot)
    bind("/dev", root / "dev")  # the kernel has one: loop devices appear there when they are made
    mount("devpts", root / "dev/pts", "devpts", MountFlag.NOSUID, "newinstance,gid=5,mode=620,ptmxmode=666")
    mount("tmpfs", root / "dev/shm", "tmpfs", QUIET, "mode=1777")
    mount("tmpfs", root / "run", "tmpfs", QUIET, "mode=755")
    (root / "run/lock").mkdir(mode=0o1777)
    for source, target, writable, without in boot.shared:
        _share(Path(source), root / target, writable=writable, without=without)
    make_root(root)


def _mount_cgroups(folder: Path, boot: Boot) -> None:
    """Show the machine's group of every hierarchy as the hierarchy's root."""
    if "." not in boot.cgroups:
        mount("tmpfs", folder, "tmpfs", QUIET, "mode=755")
    for name in sorted(boot.cgroups):
        source, place = Path("/sys/fs/cgroup", name, boot.group), folder / name
        place.mkdir(exist_ok=True)
        bind(source, place)
        if (place / "cgroup.controllers").exists():
            _delegate(place)


def _delegate(place: Path) -> None:
    """Let groups below have the controllers (version 2): a group has processes or passes controllers on, not both."""
    (place / "init").mkdir()
    (place / "init/cgroup.procs").write_text("0")  # this process
    for controller in (place / "cgroup.controllers").read_text().split():
        (place / "cgroup.subtree_control").write_text(f"+{controller}")


def _share(source: Path, target: Path, *, writable: bool, without: Sequence[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    bind(source, target)
    if not writable:
        mount("", target, flags=MountFlag.BIND | MountFlag.REMOUNT | MountFlag.RDONLY)
    for name in without:
        own = target.parent / f".{target.name}-{name}"
        own.mkdir()
        bind(own, target / name)


def run(command: str, boot: Boot) -> int:
    """Run one shell command in the clone; end processes that it left running; reap its orphans."""
    environment = {"HOME": "/root", "PATH": PATH, "TERM": os.environ.get("TERM", "dumb"), **boot.environment}
    argv = ["/bin/sh", "-c", f"cd {boot.clone} && {command}"]
    actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    child = os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=True)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())

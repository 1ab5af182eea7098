#!/usr/bin/env python3
"""Run commands of a clean clone on a machine that has nothing but Debian, git, make and python3.

    sudo make fresh [RUN="make setup && make check"] [SUITE=trixie] [COLD=1]

The machine is a root folder that mmdebstrap makes, in namespaces and control groups of its own, with a network of its
own that reaches what this machine reaches (slirp4netns). It sees no file of this machine but copies of the settings
with which apt and pip reach their registries, folders that those settings name (read-only), and gpurun's downloads and
compiled wheels, so that they are not fetched and built each time; COLD=1 leaves those out, too.

The clone holds what is committed. The machine is gone when the last command ends, when one fails, and after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import debian
import fresh_inside

from gpurun.lab.process import Cgroup, die_with_parent, hierarchies
from gpurun.lab.spec import cache

HERE = Path(__file__).resolve().parent
PROGRAMS = {"git": "git", "mmdebstrap": "mmdebstrap", "slirp4netns": "slirp4netns", "unshare": "util-linux"}
PACKAGES = ("git", "make", "python3", "ca-certificates")  # what README.md asks for, and what lets apt and pip use TLS
CLONE = "srv/gpurun"  # a folder that every user can reach: tests run processes of several users
CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
NOT_SHARED = ("engine", "fresh", "lab", "lab-stand-in")  # of gpurun's cache: everything that is no download
FREE_GIB = 20
END_TIMEOUT_S = 60


@dataclass(frozen=True)
class Shared:
    """A folder of this machine that appears on the fresh one, too."""

    source: Path
    target: str
    writable: bool
    without: tuple[str, ...] = ()


def main() -> int:
    """Make the machine, run the commands one by one, remove the machine."""
    parser = argparse.ArgumentParser(description="Run commands of a clean clone on a fresh machine.")
    parser.add_argument("commands", help="shell commands, separated by &&")
    parser.add_argument("--suite", default="", help="Debian release; default: this machine's, else bookworm")
    parser.add_argument("--cold", action="store_true", help="share no download and no compiled wheel")
    options = parser.parse_args()
    check_this_machine()
    suite = options.suite or own_suite()
    with room() as folder:
        root = folder / "root"
        say(f"making a Debian {suite} with {' '.join(PACKAGES)}")
        debian.bootstrap(root, PACKAGES, suite)
        shared = [*settings(root), *([] if options.cold else caches())]
        clone(root / CLONE)
        say("starting it")
        return run(root, shared, options.commands)


def check_this_machine() -> None:
    """Exit with what is missing here to make another machine."""
    if os.geteuid() != 0:
        sys.exit("make fresh needs root, to make namespaces and mounts: sudo make fresh")
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        sys.exit(f"make fresh needs packages that are not installed: apt-get install {' '.join(missing)}")


def own_suite() -> str:
    """This machine's release if it is a Debian, else the release that gpurun's images are made from."""
    release = debian.machine_release()
    found = release.get("VERSION_CODENAME", "") if release.get("ID") == "debian" else ""
    return found or debian.SUITE


@contextmanager
def room() -> Iterator[Path]:
    """A folder for one machine at a time; what an earlier, killed run left in it is removed first."""
    folder = cache() / "fresh"
    folder.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(folder).free >> 30
    if free_gib < FREE_GIB:
        sys.exit(f"{folder} has {free_gib} GiB free; a fresh machine can need {FREE_GIB} GiB: set XDG_CACHE_HOME")
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another make fresh is running here ({folder}): wait for its end, or set XDG_CACHE_HOME")
        remove(folder / "root")
        try:
            yield folder
        finally:
            remove(folder / "root")


def remove(root: Path) -> None:
    """Remove a machine's files, also those that a test made append-only."""
    if root.exists():
        subprocess.run(["chattr", "-R", "-f", "-a", "-i", str(root)], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(root)


def settings(root: Path) -> list[Shared]:
    """Give the machine a name, and the settings that reach registries; returns the folders those name."""
    write = {
        "etc/hostname": "fresh\n",
        "etc/hosts": "127.0.0.1 localhost fresh\n::1 localhost\n",
        "etc/resolv.conf": f"nameserver {fresh_inside.NAME_SERVER}\n",
        "etc/pip.conf": pip_settings(),
    }
    for name, text in write.items():
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text)
    words = {Path(word.removeprefix("file://")) for word in write["etc/pip.conf"].split()}
    named = {word.parent if word.name == "simple" else word for word in words if word.is_absolute()}
    for path in {*named, Path("/", CA_BUNDLE)}:  # such as a file of constraints
        if path.is_file():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
    return [Shared(path, str(path).lstrip("/"), writable=False) for path in sorted(named) if path.is_dir()]


def pip_settings() -> str:
    """This machine's pip settings, files and environment together, as one pip.conf."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, dict[str, str]] = {}
    for line in sorted(said.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment wins
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        found.setdefault("global" if section == ":env:" else section, {})[key] = str(ast.literal_eval(value))
    lines = []
    for section, values in found.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {value}".replace("\n", "\n  ") for key, value in values.items()]
    return "\n".join(lines) + "\n"


def caches() -> list[Shared]:
    """gpurun's downloads and compiled wheels, and pip's downloads."""
    for name in NOT_SHARED:
        (cache() / name).mkdir(exist_ok=True)
    pip = cache().parent / "pip"
    pip.mkdir(exist_ok=True)
    return [
        Shared(cache(), "root/.cache/gpurun", writable=True, without=NOT_SHARED),
        Shared(pip, "root/.cache/pip", writable=True),
    ]


def clone(into: Path) -> None:
    """Clone what is checked out here."""
    top = HERE.parent
    changed = subprocess.run(
        ["git", "-C", str(top), "status", "--porcelain"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    if changed:
        say(f"not in the clone, since not committed: {len(changed.splitlines())} files")
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", f"file://{top}", str(into)], check=True)


def run(root: Path, shared: list[Shared], commands: str) -> int:
    """Start the machine, connect it, run the commands; returns the exit code of the last one."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    group = group_of(root)
    end(group)  # an earlier run was killed
    boot = fresh_inside.Boot(
        root=str(root),
        shared=[(str(each.source), each.target, each.writable, each.without) for each in shared],
        cgroups=[str(place.relative_to("/sys/fs/cgroup")) for place in hierarchies()],
        group=group.name,
        clone=f"/{CLONE}",
        commands=[command.strip() for command in commands.split("&&")],
        environment={name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
    )
    heard, teller = os.pipe()
    gate, opener = os.pipe()
    unshare = ["unshare", "--mount", "--propagation=private", "--uts", "--ipc", "--net", "--pid", "--fork"]
    inside = [sys.executable, str(HERE / "fresh_inside.py"), str(teller), str(gate)]
    with ExitStack() as undo:  # also when a signal comes in the middle
        undo.callback(end, group)
        make_groups(group)
        machine = subprocess.Popen(
            [*unshare, "--kill-child", "--cgroup", *inside], stdin=subprocess.PIPE, pass_fds=(teller, gate),
            start_new_session=True, preexec_fn=lambda: enter(group),
        )  # fmt: skip
        undo.callback(kill, machine)
        os.close(teller)
        os.close(gate)
        assert machine.stdin is not None
        machine.stdin.write(boot.text().encode())
        machine.stdin.close()
        if os.read(heard, 1):
            leave(machine.pid)
            undo.callback(kill, connect(machine.pid))
            os.write(opener, b"!")
        return machine.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that this program started. Its own child processes are in its namespaces and end with it."""
    process.kill()
    process.wait()


def group_of(root: Path) -> Cgroup:
    """The control group of the machine with this root folder; the next machine in the same folder has the same."""
    return Cgroup(f"gpurun-fresh-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}")


def make_groups(group: Cgroup) -> None:
    """Make the control group in every hierarchy; a cpuset (version 1) is empty until somebody fills it."""
    for hierarchy in hierarchies():
        place = hierarchy / group.name
        place.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (place / name).exists() and not (place / "cgroup.controllers").exists():
                (place / name).write_text((hierarchy / name).read_text())


def enter(group: Cgroup) -> None:
    """In the child: be in the group, and die when this program does."""
    die_with_parent()
    for place in group.places():
        (place / "cgroup.procs").write_text(str(os.getpid()))


def leave(pid: int) -> None:
    """Take ``unshare`` itself out of the group: in version 2 a group that passes controllers on has no process."""
    for hierarchy in hierarchies():
        (hierarchy / "cgroup.procs").write_text(str(pid))


def end(group: Cgroup) -> None:
    """Wait until the kernel has ended the machine's last process; remove its control group."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := group.remove():
        if time.monotonic() > deadline:
            sys.exit(f"processes of the fresh machine do not end: {' '.join(map(str, left))}")


def connect(pid: int) -> subprocess.Popen[bytes]:
    """Give the process's network namespace a card that reaches what this machine reaches."""
    heard, teller = os.pipe()
    argv = ["slirp4netns", "--configure", "--mtu=65520", f"--ready-fd={teller}", str(pid), "tap0"]
    process = subprocess.Popen(
        argv, pass_fds=(teller,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    os.close(teller)
    ready = os.read(heard, 1)
    os.close(heard)
    if not ready:
        raise SystemExit(f"the fresh machine got no network: slirp4netns ended with {process.wait()}")
    return process


def say(text: str) -> None:
    """One line of progress, with the time since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(f"make fresh: {error}")

"""Run the shell blocks of a how-to on a separate head: a mount namespace with its own accounts, homes and state."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from users import OwnPlaces, open_python
from waiting import LIMIT_S

import gpurun

PRIVATE = {
    "etc": "/etc",
    "home": "/home",
    "lib": "/var/lib",
    "mail": "/var/mail",
    "opt": "/opt",
    "systemd": "/run/systemd",
}
BLOCK = re.compile(r"^( *)```\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A shell block of a document.

    Attributes:
        users: who runs it, as its first line says.
        script: the lines below.
    """

    title: str
    users: tuple[str, ...]
    script: str


def blocks_of(document: Path) -> list[Block]:
    """The shell blocks, in order. Each must say who runs it."""
    found = []
    for indent, text in BLOCK.findall(document.read_text()):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        said = re.fullmatch(r"# as ([a-z, ]+?)(?:, (?:in|for) .*)?", lines[0])
        assert said, f"the first line does not say who runs the block: {text!r}"
        found.append(Block(lines[0], tuple(re.split(r", | and ", said[1])), "\n".join(lines[1:])))
    return found


class OwnHead:
    """A mount namespace in which accounts, homes and ``/var/lib`` are the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree("/etc", folder / "etc", symlinks=True, ignore_dangling_symlinks=True)
        for name in PRIVATE:
            (folder / name).mkdir(exist_ok=True)
        self._install(folder / "opt" / "gpurun" / "bin")
        self._move_root_s_home(folder / "etc" / "passwd")
        binds = {place: folder / name for name, place in PRIVATE.items() if Path(place).is_dir()}
        self._places = OwnPlaces(binds)
        self.environ = {"PATH": "/opt/gpurun/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

    def _move_root_s_home(self, passwd: Path) -> None:
        """Give root another home in its account: OpenSSH uses the account's home and ignores HOME."""
        lines = passwd.read_text().splitlines()
        moved = [re.sub(r":[^:]*(:[^:]*)$", rf":{self.folder}/root\1", line) for line in lines if line[:5] == "root:"]
        passwd.write_text("\n".join([*moved, *(line for line in lines if line[:5] != "root:"), ""]))

    def _install(self, folder: Path) -> None:
        """What the document's first block does, from this tree instead of from package indexes."""
        folder.mkdir(parents=True)
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        path = f"{Path(gpurun.__file__).parent.parent}:{packages}"
        (folder / "gpurun").write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {open_python()} -m gpurun "$@"\n')
        (folder / "gpurun").chmod(0o755)

    def run(self, user: str, script: str, *, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a script as a user, with the groups that the user has at this moment."""
        home = str(self.folder / "root") if user == "root" else f"/home/{user}"
        return subprocess.run(
            [*self._places.entered(user, user, "--init-groups"), "sh", "-ec", f"cd; {script}"], check=False,
            env={**self.environ, "HOME": home, "USER": user, "LOGNAME": user}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s, start_new_session=True,
        )  # fmt: skip

    def do(self, user: str, script: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Like `run`, but return the script's output. Its exit code must be one of these."""
        done = self.run(user, script)
        assert done.returncode in codes, f"{user}: {script}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def pids(self) -> list[int]:
        """Return the processes of this head, except the process that holds its namespace."""
        mine, found = Path(f"/proc/{self._places.pid}/ns/mnt").readlink(), []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and (process / "ns" / "mnt").readlink() == mine:
                    found.append(int(process.name))
        return [pid for pid in found if pid != self._places.pid]

    def close(self) -> None:
        """End the processes of this head."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._places.close()


def has_account_here(name: str) -> bool:
    """Return whether the machine itself has this account. It must not after a test that makes its own accounts."""
    with suppress(KeyError):
        return pwd.getpwnam(name) is not None
    return False

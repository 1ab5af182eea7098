"""Other users for tests: temporary uids of one group, with real processes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import forked

import gpurun
from gpurun.node.agent.processes import list_processes

GROUP = 62_000
ALICE, BOB, TRAIN, STRANGER = 61_001, 61_002, 61_003, 61_004


NEEDS_OPEN_PYTHON = (
    "needs a clone and a Python that every user can reach: move the clone out of closed folders, such as /root"
)


def open_python() -> str | None:
    """A Python of this version that every user can start; None if this machine has none."""
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        real = Path(candidate).resolve()
        above = [real, *real.parents, *Path(sys.prefix).parents]
        if real.exists() and all(path.stat().st_mode & stat.S_IXOTH for path in above):
            return candidate
    return None


class OwnPlaces:
    """A mount namespace in which some files and folders are the test's own. Only processes that enter it see them."""

    def __init__(self, binds: Mapping[str, Path]) -> None:
        """`binds`: what lies at each place there, which must exist."""
        mounts = "".join(f"mount --bind '{source}' '{place}'; " for place, source in binds.items())
        argv = ["unshare", "--mount", "--propagation", "private"]
        self._holder = subprocess.Popen(
            [*argv, "sh", "-c", f"set -e; {mounts}echo ready; exec sleep infinity"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        self.pid = self._holder.pid

    def entered(self, uid: int | str, gid: int | str, *groups: str) -> list[str]:
        """The argv before that of a command which is to run there, as a user."""
        return ["nsenter", "--mount", f"--target={self.pid}", "setpriv", f"--reuid={uid}", f"--regid={gid}", *groups]

    def close(self) -> None:
        """End the processes of the namespace: it and its mounts disappear with the last process."""
        self._holder.kill()
        self._holder.communicate()


class Accounts(OwnPlaces):
    """Accounts that the machine itself does not know: OpenSSH's programs refuse users without one."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "passwd"
        shutil.copyfile("/etc/passwd", self._file)
        self._file.chmod(0o644)
        super().__init__({"/etc/passwd": self._file})

    def add(self, user: User) -> None:
        """Give a user an account with its own home, which is what OpenSSH goes by; root is given another home."""
        self.remove(user)
        name = f"user{user.uid}" if user.uid else "root"
        with self._file.open("a") as lines:
            lines.write(f"{name}:x:{user.uid}:{user.uid}::{user.home}:/bin/sh\n")

    def remove(self, user: User) -> None:
        lines = self._file.read_text().splitlines(keepends=True)
        self._file.write_text("".join(line for line in lines if line.split(":")[2] != str(user.uid)))


@dataclass
class User:
    """A user: a uid, a home, and the environment of its processes. Without `accounts` it has no account."""

    uid: int
    home: Path
    environ: dict[str, str]
    groups: tuple[int, ...] = (GROUP,)
    accounts: Accounts | None = None

    def start(self, *argv: str, umask: int = 0o022) -> subprocess.Popen[str]:
        words, become = [str(open_python()), *argv], {"user": self.uid, "group": self.uid, "extra_groups": self.groups}
        if self.accounts is not None:
            groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
            entered = self.accounts.entered(self.uid, self.uid, groups)
            words, become = [*entered, "env", f"--chdir={self.home}", *words], {}
        start = forked.PopenOfCode if forked.are_used() else subprocess.Popen
        return start(
            words, umask=umask, env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, **become,
        )  # fmt: skip

    def run(self, *argv: str, umask: int = 0o022, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        process = self.start(*argv, umask=umask)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def python(self, code: str, umask: int = 0o022) -> str:
        """Run a piece of Python. Returns the last line of its output or its error."""
        done = self.run("-c", code, umask=umask)
        return (done.stdout + done.stderr).strip().rpartition("\n")[2]

    def gpurun(self, *args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "gpurun", *args, timeout_s=timeout_s)


def make_user(uid: int, folder: Path, state: Path, *, groups: tuple[int, ...] = (GROUP,), **environ: str) -> User:
    """A user with a home below `folder`, which everybody can pass through."""
    home = folder / f"home-{uid}"
    home.mkdir()
    os.chown(home, uid, uid)
    home.chmod(0o700)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL", "TERM")}
    python_path = f"{Path(gpurun.__file__).parent.parent}:{packages}"
    own = {"HOME": str(home), "LOGNAME": f"user{uid}", "GPURUN_HOME": str(state), "PYTHONPATH": python_path}
    return User(uid, home, {**kept, **own, **environ}, groups)


def left_over(state: Path) -> list[int]:
    """Processes that use a state directory."""
    found = []
    for process in list_processes():
        with suppress(OSError):
            if f"GPURUN_HOME={state}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process.pid)
    return found


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody can pass through; pytest's own are closed, again at every start of any session."""
    with tempfile.TemporaryDirectory(prefix="gpurun-users-") as name:
        Path(name).chmod(0o711)
        yield Path(name)

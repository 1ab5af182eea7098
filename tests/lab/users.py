"""Other users for tests: throw-away uids of one group, as which real processes run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import gpurun
from gpurun.node.processes import list_processes

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


@dataclass
class User:
    """A user: a uid, a home, and what its processes' environment says."""

    uid: int
    home: Path
    environ: dict[str, str]
    groups: tuple[int, ...] = (GROUP,)

    def start(self, *argv: str, umask: int = 0o022) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(open_python()), *argv], user=self.uid, group=self.uid, extra_groups=self.groups, umask=umask,
            env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *argv: str, umask: int = 0o022, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        process = self.start(*argv, umask=umask)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def python(self, code: str, umask: int = 0o022) -> str:
        """What a piece of Python prints: its last line, or its last error."""
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

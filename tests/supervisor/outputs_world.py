"""A job whose outputs lie on hosts of this machine: real agents over pipes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_agents import Hosts

from gpurun.jobs.folder import JobFolder
from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.launchers.launcher import Launcher
from gpurun.node.folder import below
from gpurun.remote.fleet import Results
from gpurun.state.paths import StatePath
from gpurun.supervisor.outputs.copy import HeadCopy

JOB = "j-00000001"


class OutputsJob(SimpleNamespace):
    """What the steps of a job's life need of it, and where its parts lie on this machine."""

    def amend(self, **changes: Any) -> None:
        vars(self.record).update(changes)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def head(self) -> Path:
        return self.folder.outputs

    def host(self, name: str = "h1") -> Path:
        """The host's folder of outputs."""
        return self.world.home(name) / ".gpurun/outputs" / JOB


class OutputsLinks:
    """Agents by host."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.silent: set[str] = set()

    def is_open(self, host: str) -> bool:
        return host not in self.silent and self.fleet.agents[host].alive

    def agent(self, host: str) -> Any:
        return self.fleet.agents[host]

    def each(self, call: Any, hosts: Any = None) -> Results[Any]:
        return self.fleet.map(
            call, [host for host in (self.fleet.agents if hosts is None else hosts) if host not in self.silent]
        )


def outputs_job(
    folder: Path, hosts: Hosts, *names: str, launcher: Launcher = GLOO, elastic: bool = False
) -> OutputsJob:
    made = JobFolder(StatePath(folder) / JOB)
    (folder / JOB).mkdir(exist_ok=True)
    job = OutputsJob(
        world=hosts, folder=made, outputs=HeadCopy(made, is_elastic=elastic), hosts=names, members=names, notes=[],
        links=OutputsLinks(hosts.fleet(*names)), lease=SimpleNamespace(job=JOB, attempt=1),
        spec=SimpleNamespace(outputs="/out", keeps_outputs=True, min_gpus=1 if elastic else None, retry=None),
        launcher=launcher,
        record=SimpleNamespace(outputs_left=None, reached="containers", outcome=None),
    )  # fmt: skip
    for name in names:
        job.host(name).mkdir(parents=True, exist_ok=True)
        mine = hosts.home(name) / ".gpurun/jobs" / JOB
        mine.mkdir(parents=True, exist_ok=True)
        (mine / "attempt").write_text("1\n")
    return job


def removed_later(folder: Path) -> Iterator[Path]:
    """A folder whose content pytest cannot remove: it is too deep. For a fixture."""
    yield folder
    below.remove_path(str(folder))


def shape(top: Path) -> dict[bytes, tuple[Any, ...]]:
    """Everything about a folder that a copy must have, by name as bytes. Runs as whoever may read all of it."""
    found = {}
    for folder, names, files in os.walk(os.fsencode(top)):
        for name in [*names, *files]:
            path = os.path.join(folder, name)  # noqa: PTH118 - names of any bytes
            status = os.lstat(path)
            kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
            if kind == stat.S_IFLNK:
                found[os.path.relpath(path, os.fsencode(top))] = (kind, os.readlink(path))  # noqa: PTH115
            elif kind == stat.S_IFREG:
                content = Path(os.fsdecode(path)).read_bytes()
                found[os.path.relpath(path, os.fsencode(top))] = (kind, mode, status.st_mtime_ns, content)
            elif kind == stat.S_IFDIR:
                found[os.path.relpath(path, os.fsencode(top))] = (kind, mode, status.st_mtime_ns)
    return found


@contextmanager
def meanwhile(act: Any) -> Iterator[None]:
    """Do something again and again in a thread, as a program in a container might."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            act()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def as_stranger(test: str) -> None:
    """Run the tests of a file again, as a user without rights: root may read and remove everything.

    Raises:
        AssertionError: one failed there.
    """
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    top = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        Path(folder).chmod(0o777)
        found = os.pathsep.join([str(top), sysconfig.get_path("purelib")])
        environ = {**os.environ, "HOME": folder, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": found}
        usable = "import os, sys, msgspec, pytest; sys.exit(not os.access(sys.executable, os.X_OK))"
        for python in (sys.executable, "/usr/bin/python3"):
            if not subprocess.run([*user, python, "-c", usable], check=False, env=environ, cwd="/").returncode:
                break
        else:
            pytest.skip("a user without rights cannot run this Python")
        argv = [*user, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", test]
        done = subprocess.run(argv, cwd=top, capture_output=True, text=True, check=False, timeout=250, env=environ)
        assert done.returncode == 0, done.stdout[-6000:]

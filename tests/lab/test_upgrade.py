"""Jobs of an installed gpurun run to their ends while pip and uv replace it under them, again and again."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import LOOK_S, TINY, Cluster
from faulting import kill_supervisor
from waiting import until

import gpurun
from gpurun.studies.store import SweepStore

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("upgrade")]

TOP = Path(__file__).parents[2]
PACKAGE = Path(gpurun.__file__).parent
STANDS_ALONE = ("runtime/", "content/inside.py", "doctor/bench_job/", "__init__.py")
"""Modules that run where there is no gpurun; and the one that says the version."""
MOVED = {
    "gpurun.remote.opening": "gpurun.remote.connecting", "gpurun.leases.allocate": "gpurun.leases.granting",
    "gpurun.supervisor.verdict.decide": "gpurun.supervisor.verdict.judge",
    "gpurun.inventory.validate": "gpurun.inventory.check2",
}  # fmt: skip
"""What the newer version has renamed: modules that functions import, and one that a module does."""
FROM_ONE_BUILD = """
import gpurun as _gpurun
assert _gpurun.__version__ == "{version}", "two versions of gpurun in one process"
"""
WITHIN = ("No module named", "ImportError", "two versions", "not found", "SyntaxError", "No such file")
GANGS, TRIALS, AT_LEAST, KILLS = 16, 6, 6, 3
PROGRAM = """
import os, time
import gpurun_runtime as gpurun
out = os.environ.get("GPURUN_OUTPUTS")
for step in range(1, 41):
    time.sleep(0.2)
    if out:
        with open(f"{out}/rank-{gpurun.gang().rank}", "w") as file:
            file.write(str(step))
    if gpurun.parameters():
        gpurun.report(step, accuracy=float(step))
print("rank", gpurun.gang().rank, "is done")
"""


def build(folder: Path, version: str, moved: dict[str, str]) -> Path:
    """Build a wheel of this gpurun with another version. Each module refuses to run in a process of another one."""
    tree = folder / version
    shutil.copytree(PACKAGE, tree / "gpurun", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copyfile(TOP / name, tree / name)
    begin = re.compile(r"^from __future__ import annotations\n", re.MULTILINE)
    for path in (tree / "gpurun").rglob("*.py"):
        text = path.read_text()
        for old, new in moved.items():
            text = re.sub(rf"\b{re.escape(old)}\b", new, text)
        if not str(path.relative_to(tree / "gpurun")).startswith(STANDS_ALONE):
            text, _ = begin.subn(lambda found: found[0] + FROM_ONE_BUILD.format(version=version), text, count=1)
        path.write_text(text)
    init = tree / "gpurun/__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', init.read_text()))
    for old, new in moved.items():
        (tree / f"{old.replace('.', '/')}.py").rename(tree / f"{new.replace('.', '/')}.py")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=tree, check=True,
                   capture_output=True)  # fmt: skip
    return folder / f"gpurun-{version}-py3-none-any.whl"


class Installation:
    """An environment with gpurun, which is replaced while it is used. It has all other packages of this one."""

    def __init__(self, folder: Path) -> None:
        self.wheels = [build(folder, "7.0", {}), build(folder, "8.0", MOVED)]
        self.count = 0
        self.python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        (mine,) = {path for path in sys.path if path.endswith("site-packages") and Path(path, "msgspec").is_dir()}
        (site / "zz-others.pth").write_text(f"{mine}\n")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._replace)
        self.problems: list[str] = []
        self.install()

    def install(self) -> None:
        """Install the other wheel over this one; pip and uv take turns."""
        wheel = self.wheels[self.count % 2]
        pip = (sys.executable, "-m", "pip", "-q", "--python", self.python, "install", "-U")
        uv = (sys.executable, "-m", "uv", "pip", "install", "--offline", "--reinstall", "--python", self.python)
        argv = (*uv, "--no-deps", wheel) if self.count % 4 > 1 else (*pip, "--force-reinstall", "--no-deps", wheel)
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            self.problems.append(done.stdout + done.stderr)
        self.count += 1

    def _replace(self) -> None:
        while not self._over.wait(4.0):
            self.install()

    def __enter__(self) -> Installation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path / "an installation")


def typed(cluster: Cluster, *argv: str) -> str:
    """Run a command, again if it began while gpurun was being replaced: that is a person's to see."""

    def ran():
        try:
            done = cluster.gpurun(*argv)
        except OSError:
            return None
        assert done.code == 0 or any(words in done.err for words in WITHIN), done
        return [done.out] if done.code == 0 else None

    return until(ran, every_s=LOOK_S)[0]


def submit_all(cluster: Cluster) -> list[str]:
    """Gangs on two hosts each; half of them have outputs."""
    found = []
    for number in range(GANGS):
        flags = ("--outputs", "/out", "--outputs-every", "1s") if number % 2 else ()
        found.append(typed(
            cluster, *cluster.submit_args("--launcher", "tasks", *flags, image=TINY), "--", "python3", "-c", PROGRAM
        ).strip())  # fmt: skip
    return found


def sweep(cluster: Cluster) -> str:
    points = ",".join(f"0.{number}" for number in range(1, TRIALS + 1))
    return typed(
        cluster, "sweep", "-i", str(cluster.inventory), "-n", "1", "--image", TINY, "--launcher", "tasks", "--name",
        "lr", "--metric", "accuracy:max", "--grid", f"lr={points}", "--max-parallel", "2",
        "--", "python3", "-c", PROGRAM,
    ).strip()  # fmt: skip


def disturb(cluster: Cluster, jobs: list[str], killed: Counter[str]) -> None:
    """Kill the supervisor of a running job, and type commands: one adopts it, one puts another job into the queue.

    Each job loses at most `KILLS` supervisors, because a new one must live until it has seen the end.
    """
    running = [job for job in jobs if cluster.record(job)["state"] == "RUNNING"]
    for job in [job for job in running if killed[job] < KILLS][:1]:
        with suppress(ValueError, ProcessLookupError):  # it has ended meanwhile
            kill_supervisor(cluster, job)
            killed[job] += 1
    typed(cluster, "status", "-i", str(cluster.inventory), "--json")
    for job in running[1:2]:
        if cluster.record(job)["attempt"] == 1:
            with suppress(AssertionError):  # it has ended meanwhile
                typed(cluster, "requeue", job, "--no-wait")


def said(cluster: Cluster) -> str:
    """What supervisors, waiters and conductors printed."""
    patterns = ("jobs/*/supervisor.log", "sweeps/*/conductor.log", "waiters/*")
    logs = [path for pattern in patterns for path in cluster.home.glob(pattern)]
    return "".join(f"{path.name}: {path.read_text(errors='replace')}" for path in logs)


def test_twenty_gangs_and_a_sweep_end_well_while_gpurun_is_replaced(cluster, installation, monkeypatch):
    monkeypatch.setattr(cluster, "command", [str(installation.python.with_name("gpurun"))])
    jobs, killed = submit_all(cluster), Counter[str]()
    waiting = [cluster.start("wait", *jobs), cluster.start("logs", "--follow", jobs[-1])]
    swept = sweep(cluster)
    with installation:
        while any(cluster.record(job)["ended_s"] is None for job in jobs) or installation.count < AT_LEAST:
            disturb(cluster, jobs, killed)
        until(lambda: SweepStore(cluster.home).get(swept).trials().counts()["complete"] == TRIALS, every_s=LOOK_S)
    records = [cluster.record(job) for job in jobs]
    attempts = [record["attempt"] for record in records]
    print(f"{installation.count} installations, {killed.total()} supervisors killed, attempts {attempts}")  # noqa: T201
    assert {record["state"] for record in records} == {"SUCCEEDED"}, cluster.saw()
    assert max(attempts) > 1 and killed
    for number, job in enumerate(jobs):
        assert cluster.log(job).count("is done") >= 2
        kept = cluster.home / "jobs" / job / "outputs"
        assert not number % 2 or [(kept / f"rank-{rank}").read_text() for rank in (0, 1)] == ["40", "40"]
    text = said(cluster)
    assert "Traceback" not in text and "two versions" not in text, text
    for command in waiting:
        _, err = command.communicate(timeout=60)
        assert command.returncode == 0, err
    assert installation.problems == []

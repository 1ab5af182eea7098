"""Shared by tests of whole jobs: gpurun's commands on a lab, with a separate state directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from waiting import until

from gpurun.lab.lab import Lab

TRAIN = "gpurun/train:tf2.15"
TORCH = "gpurun/train:torch"
TINY = "gpurun/tiny:1"
"""A shell, Python, and the trainer `ring`."""
SHELL = "gpurun/shell:1"
"""A shell and nothing else."""

ONE_THREAD = (
    "-e", "OMP_NUM_THREADS=1", "-e", "TF_NUM_INTRAOP_THREADS=1", "-e", "OMPI_MCA_mpi_yield_when_idle=1",
)  # fmt: skip
"""For `submit`: all ranks of a lab share few cores, and threads that spin take them from the others.

`TF_NUM_INTEROP_THREADS` stays as it is: with one, TensorFlow's parameter servers and workers wait for each other for
ever.
"""

LOOK_S = 0.2
"""How often a test looks at a job: looking takes CPU time from the job."""


@dataclass
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str


class Cluster:
    """A lab, an inventory of it, and a state directory."""

    command: Sequence[str] = (sys.executable, "-m", "gpurun")

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.home = folder / "home"
        self.inventory = lab.inventory
        self.environ = {**os.environ, "GPURUN_HOME": str(self.home)}

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command in the background, with stdin closed."""
        return subprocess.Popen(
            [*self.command, *args], env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def gpurun(self, *args: str, timeout_s: float = 240) -> Done:
        process = self.start(*args)
        out, err = process.communicate(timeout=timeout_s)
        return Done(process.returncode, out, err)

    def submit(self, *args: str, gpus: int = 2, image: str = TRAIN, command: Sequence[str] = ("true",)) -> Done:
        """``submit --follow`` of a gang with one GPU on each host."""
        return self.gpurun(*self.submit_args(*args, gpus=gpus, image=image), "--follow", "--", *command)

    def submit_args(self, *args: str, gpus: int = 2, image: str = TRAIN) -> list[str]:
        found = ["submit", "-i", str(self.inventory), "-n", str(gpus), "--image", image, *args]
        return found if "--gpus-per-host" in args else [*found, "--gpus-per-host", "1"]

    def status(self, job: str | None = None) -> dict:
        done = self.gpurun("status", *([job] if job else ["-i", str(self.inventory)]), "--json")
        return json.loads(done.out)

    def job(self, job: str) -> dict:
        return self.status(job)["jobs"][0]

    def wait_for(self, job: str, *states: str) -> dict:
        """Wait until the job is in one of these states; returns its record. Fails at once if it ends in another."""

        def reached() -> dict | None:
            found = self.record(job)
            assert found["state"] in states or found["ended_s"] is None, f"not {states}: {found}"
            return found if found["state"] in states else None

        return until(reached, lambda: f"not {states}: {self.record(job)}", every_s=LOOK_S)

    def record(self, job: str) -> dict:
        """The job's record, as its file has it: `gpurun status` takes a second of CPU time."""
        return json.loads((self.home / "jobs" / job / "state.json").read_text())

    def log(self, job: str) -> str:
        path = self.home / "jobs" / job / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, job: str, text: str, *, times: int = 1) -> None:
        """Wait until the log has the text so many times. Fails at once if the job ends before."""

        self.wait_until(job, lambda: self.log(job).count(text) >= times, f"{text!r} never appeared")

    def wait_until(self, job: str, condition: Callable[[], object], problem: str = "it does not come") -> None:
        """Wait for what a job that lives brings about. Fails at once if the job ends before."""

        def said() -> str:
            return f"{problem}:\n{self.log(job)[-5000:]}\n{self.record(job)}"

        def holds() -> bool:
            ended = self.record(job)["ended_s"] is not None
            found = bool(condition())
            assert found or not ended, said()
            return found

        until(holds, said, every_s=LOOK_S)

    def saw(self) -> str:
        """What a person needs when a test fails: each job's record, its last events and its last lines."""
        found = [f"load {Path('/proc/loadavg').read_text().strip()}"]
        for folder in sorted((self.home / "jobs").glob("j-*")):
            for name, most in (("state.json", 40), ("events.jsonl", 12), ("log", 12), ("supervisor.log", 12)):
                path = folder / name
                lines = path.read_text(errors="replace").splitlines()[-most:] if path.is_file() else []
                found += [f"{folder.name}/{name}:", *(f"  {line[:400]}" for line in lines)]
        return "\n".join(found)

    def cancel_all(self) -> None:
        """Cancel every job that has not ended."""
        for job in self.status()["jobs"]:
            if job["ended_s"] is None:
                self.gpurun("cancel", job["id"])

    def end_processes(self) -> None:
        """End processes that use this state directory, such as the keeper of a host that is never fenced."""
        mine = f"GPURUN_HOME={self.home}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mine in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # it has ended
                continue

    def assert_nothing_left(self) -> None:
        """Check that no lease, container, process, key or file of any job is left on the head or on any host."""
        assert list((self.home / "leases").glob("[!.]*")) == []
        hosts = self.status()["hosts"]
        assert all(host["free"] == host["gpus"] for host in hosts if host["state"] != "out"), hosts
        for host in self.lab.hosts:
            containers = self.lab.run(host.name, ["docker", "ps", "-aq", "--filter", "label=gpurun.job"])
            assert containers.stdout.strip() == b"", (host.name, containers.stdout)
            claims = self.lab.run(host.name, ["docker", "volume", "ls", "-q", "--filter", "name=gpurun-gpu-"])
            assert claims.stdout.strip() == b"", (host.name, claims.stdout)
            processes = self.lab.run(host.name, ["ps", "-eo", "args"]).stdout.decode()
            assert "gpurun-j-" not in processes, (host.name, processes)
            assert ".gpurun/jobs" not in processes, (host.name, processes)
            files = self.lab.run(
                host.name, ["sh", "-c", "ls -A ~train/.gpurun/jobs ~train/.gpurun/outputs 2>/dev/null"]
            )
            left = [line for line in files.stdout.decode().split() if line.startswith("j-")]
            assert left == [], (host.name, left)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)

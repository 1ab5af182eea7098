"""Measure the head's cost by gang size: `tasks` with a shell on 2, 8, 32 and 64 lab hosts, one rank per host.

Seconds from `gpurun submit` until the last rank reports that it runs, and from `gpurun cancel` until every host is
fenced; CPU seconds of the submit and of the supervisor, for each host; the supervisor's memory at its peak. All
hosts share this machine's cores, so wall times include the hosts' work. "busy" is the share of all cores that was in
use until the ranks ran. If it is near 1, this machine's cores limit the time.

    python benchmarks/bench_growth.py [--hosts 2,8,32,64] [--rounds 3] [--lab growth]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gpurun

GPURUN = [sys.executable, "-m", "gpurun"]
IMAGE = "gpurun/tiny:1"
WAIT_S = 300.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """The cost of one job of one size."""

    running_s: float
    busy: float
    fenced_s: float
    cpu_s: float
    memory_mib: float


def run(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def wait_until(is_so, what: str) -> float:
    """Wait until the condition holds. Returns the time, on the monotonic clock."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < WAIT_S, what
        time.sleep(0.05)
    return time.monotonic()


def machine_cpu_s() -> float:
    """Return the CPU seconds of all processes since this machine started."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + soft) * TICK_S


def supervisor_of(job: str) -> int:
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"gpurun.supervisor\0{job}\0".encode() in _read(entry / "cmdline")
    ]
    assert len(found) == 1, found
    return found[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Supervisor:
    """CPU and memory of a supervisor, read at each call. After its end, the last values remain."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self.cpu_s = self.memory_mib = 0.0

    def is_gone(self) -> bool:
        """Return whether it has ended. Reads its CPU and memory first."""
        fields = _read(self._folder / "stat").rpartition(b")")[2].split()
        if not fields or fields[0] == b"Z":
            return True
        self.cpu_s = sum(map(int, fields[11:15])) * TICK_S  # its own and that of children it has waited for
        for line in _read(self._folder / "status").splitlines():
            if line.startswith(b"VmHWM:"):
                self.memory_mib = int(line.split()[1]) / 1024
        return False


def measure(inventory: str, hosts: int) -> Cost:
    before = os.times()
    began, busy_s = time.monotonic(), machine_cpu_s()
    flags = ["-n", str(hosts), "--gpus-per-host", "1", "--image", IMAGE, "--launcher", "tasks", "-i", inventory]
    job = run([*GPURUN, "submit", *flags, "--", "sh", "-c", "echo runs; exec sleep 3600"]).strip()
    supervisor = Supervisor(supervisor_of(job))
    log = Path(os.environ["GPURUN_HOME"]) / "jobs" / job / "log"
    running_s = wait_until(lambda: _read(log).count(b"runs") >= hosts or supervisor.is_gone(), "ranks run") - began
    busy = (machine_cpu_s() - busy_s) / running_s / (os.cpu_count() or 1)
    assert not supervisor.is_gone(), log.read_text()
    asked_s = time.monotonic()
    run([*GPURUN, "cancel", job, "--no-wait"])
    fenced_s = wait_until(supervisor.is_gone, "the end") - asked_s
    (found,) = json.loads(run([*GPURUN, "status", job, "--json"]))["jobs"]
    assert found["state"] == "CANCELLED", found
    after = os.times()
    commands_s = sum(after[2:4]) - sum(before[2:4])
    return Cost(running_s, busy, fenced_s, commands_s + supervisor.cpu_s, supervisor.memory_mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,8,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lab", default="growth")
    arguments = parser.parse_args()
    compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)  # what pip does at installation
    sizes = [int(size) for size in arguments.hosts.split(",")]
    print("hosts  running s  busy  fenced s  CPU s of the head a host  memory MiB")
    with tempfile.TemporaryDirectory() as home:
        os.environ["GPURUN_HOME"] = home
        shape = ["--racks", "2", "--hosts", str(max(sizes) // 2), "--gpus", "1"]
        inventory = run([*GPURUN, "lab", "up", "--name", arguments.lab, *shape]).strip() + "/inventory.yaml"
        try:
            for size in sizes:
                measure(inventory, size)  # the image goes out, and host keys are known
                costs = [measure(inventory, size) for _ in range(arguments.rounds)]
                middle = [
                    statistics.median(getattr(cost, name) for cost in costs)
                    for name in ("running_s", "busy", "fenced_s", "cpu_s", "memory_mib")
                ]
                print(
                    f"{size:5d}  {middle[0]:9.2f}  {middle[1]:4.2f}  {middle[2]:8.2f}  {middle[3] / size:24.3f}"
                    f"  {middle[4]:10.1f}",
                    flush=True,
                )
        finally:
            run([*GPURUN, "lab", "down", "--name", arguments.lab, "--purge"])


if __name__ == "__main__":
    main()

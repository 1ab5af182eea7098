"""Measure `gpurun status` with many hosts and jobs: CPU seconds, lines and columns.

    python benchmarks/bench_status.py [--hosts 1000] [--jobs 300] [--columns 100] [--show]

The cluster and its jobs are those of bench_state.py. The command runs in its own terminal, as for a person, and
with a pipe. CPU seconds are those of the whole process, imports included; the median of seven runs.
"""

from __future__ import annotations

import argparse
import compileall
import os
import pty
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_state import State

import gpurun

TARGET_S = 0.35
RUNS = 7
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_terminal(columns: int, *words: str) -> str:
    """Return the command's output on a terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-m", "gpurun", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    ) as process:
        os.close(theirs)
        said = bytearray()
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # Linux returns EIO after the last writer has closed the terminal
                break
            if not data:
                break
            said += data
    os.close(ours)
    if process.returncode:
        raise SystemExit(said.decode())
    return said.decode()


def piped(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "gpurun", *words], capture_output=True, text=True, check=True).stdout


def report(name: str, run, target_s: float = TARGET_S) -> float:
    took, text = [], ""
    for _ in range(RUNS):
        before = used_s()
        text = run()
        took.append(used_s() - before)
    lines = [COLOURS.sub("", line.rstrip("\r")) for line in text.splitlines()]
    median = statistics.median(took)
    verdict = "" if median <= target_s else ": MISSED"
    print(f"{name:20} {median:6.3f} s of CPU{verdict}  {len(lines)} lines, widest {max(map(len, lines))} columns")
    return median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--show", action="store_true", help="print what a terminal gets")
    options = parser.parse_args()
    compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)  # what pip does at installation
    with tempfile.TemporaryDirectory() as folder:
        state = State(Path(folder), options.hosts)
        state.fill(options.jobs, seed=1)
        state.run_pass()
        time.sleep(0.2)  # the index leaves out files that have just changed
        state.run_pass()
        worst = max(
            report(f"{options.columns} columns", lambda: in_terminal(options.columns, "status")),
            report("60 columns", lambda: in_terminal(60, "status")),
            report("piped", lambda: piped("status")),
            report("--json", lambda: piped("status", "--json")),
        )
        if options.show:
            print(in_terminal(options.columns, "status"))
    print(f"target {TARGET_S} s of CPU")
    return int(worst > TARGET_S)


if __name__ == "__main__":
    sys.exit(main())

"""Measure `gpurun report` and `gpurun history` on a year's history of 200,000 attempts.

    python benchmarks/bench_accounts.py [ATTEMPTS]

Prints CPU seconds (user and system, of the whole process with its start) and the sizes of the files.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpurun.history import store
from gpurun.history.row import HistoryRow

YEAR_S = 365 * 86400.0
CAUSES = ("", "", "", "", "", "", "rank", "xid", "oom", "host-lost", "hang")


def rows(count: int, seed: int = 17) -> Iterator[HistoryRow]:
    chance, now = random.Random(seed), time.time()
    for number in range(count):
        gpus, ran_s, waited_s = (
            chance.choice((1, 2, 4, 8, 8, 16, 64)),
            chance.expovariate(1 / 5400),
            chance.random() * 7200,
        )
        ended_s = now - chance.random() * YEAR_S
        cause, host = chance.choice(CAUSES), chance.randrange(1000)
        yield HistoryRow(
            job=f"j-{number:08x}", attempt=1, user=f"u{chance.randrange(40)}",
            pool=chance.choice(("vision", "speech", "")),
            project=f"project-{chance.randrange(30)}", name=f"train-{number % 97}", image="me/train:1", gpus=gpus,
            generation=chance.choice(("pascal", "volta", "hopper")),
            hosts=" ".join(f"gpu-{(host + each) % 1000:04d}" for each in range(max(1, gpus // 8))),
            submitted_s=ended_s - ran_s - waited_s, granted_s=ended_s - ran_s, started_s=ended_s - ran_s,
            ended_s=ended_s, waited_s=waited_s, gpu_s=gpus * ran_s, outcome="FAILED" if cause else "SUCCEEDED",
            reason=f"gpu-{host:04d}: rank 3 failed first, with exit code 1" if cause else "", cause=cause,
            cause_host=f"gpu-{host:04d}" if cause else "", use_percent=chance.random() * 100, memory_mib=30000,
            rank_uses=" ".join(["80/99"] * gpus), sparks=" ".join(["80"] * 24),
            steps_gpu_s=gpus * ran_s * 0.7, running_gpu_s=0.0, start_gpu_s=gpus * ran_s * 0.1, checkpoint_gpu_s=0.0,
            lost_gpu_s=gpus * ran_s * 0.15, idle_gpu_s=0.0, stopping_gpu_s=gpus * ran_s * 0.05, lost_cause=cause,
        )  # fmt: skip


def cpu_s(*argv: str, home: Path) -> tuple[float, float]:
    """Return CPU and wall seconds of one command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environ = {**os.environ, "GPURUN_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "gpurun", *argv], check=True, env=environ, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - began


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        began = time.process_time()
        with store.JobHistory(home).own(write=True) as connection:
            store.put(connection, rows(count))
        size = (home / "history" / str(os.getuid()) / store.FILE).stat().st_size
        print(f"{count} attempts: {size / 1e6:.0f} MB, made in {time.process_time() - began:.1f} s of CPU")
        page = str(home / "report.html")
        for argv in (
            ("report", "--json"), ("report",), ("report", "--html", page), ("report", "--since", "30d"),
            ("history",), ("history", "--since", "7d", "--json"),
        ):  # fmt: skip
            cpu, wall = cpu_s(*argv, home=home)
            print(f"gpurun {' '.join(argv[:3]).replace(page, 'FILE'):28} {cpu:5.2f} s of CPU, {wall:5.2f} s")


if __name__ == "__main__":
    main()

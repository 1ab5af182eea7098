"""What `gpurun sweep status` costs: CPU seconds for a sweep of many trials, most of which have reported and ended.

    python benchmarks/bench_sweep_status.py [--trials 10000] [--reports 1]

The sweep is marked as done, so that no command continues it. CPU seconds are those of the whole process, imports
included; the median of seven runs.
"""

from __future__ import annotations

import argparse
import compileall
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench_status import in_terminal, piped, report

import gpurun
from gpurun.jobs.spec import JobSpec
from gpurun.state import durable
from gpurun.studies.store import Journal, SweepStore
from gpurun.studies.sweep_plan import Wish
from gpurun.studies.trials import JournalEntry

TARGET_S = 0.5
JOB = JobSpec(name="train", image="gpurun/tiny:1", gpus=1, command=("train",))


def entries(trials: int, reports: int) -> Iterator[JournalEntry]:
    for trial in range(trials):
        yield JournalEntry("asked", float(trial), trial, job=f"j-{trial:08x}", parameters={"lr": trial + 1})
        for step in range(reports):
            yield JournalEntry("reported", trial + 1.0, trial, step=step, value=1 / (1 + trial * 7919 % trials))
        if trial % 10:
            yield JournalEntry("ended", trial + 2.0, trial, outcome="complete" if trial % 3 else "pruned")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--reports", type=int, default=1, help="of each trial")
    options = parser.parse_args()
    compileall.compile_dir(Path(gpurun.__file__).parent, quiet=1)  # what pip does at installation
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPURUN_HOME"] = folder
        values = tuple(str(number + 1) for number in range(options.trials))
        plan = Wish(grid={"lr": values}, metric="loss:min").plan(JOB, "/inventory.yaml", 1.0)
        sweep = SweepStore(Path(folder)).create(plan, None)
        journal = Journal(sweep)
        journal.add(*entries(options.trials, options.reports))
        journal.close()
        durable.write_bytes(sweep.done, b"")
        words = ("sweep", "status", sweep.id)
        worst = max(
            report("a terminal", lambda: in_terminal(120, *words), TARGET_S),
            report("piped", lambda: piped(*words), TARGET_S),
            report("--json", lambda: piped(*words, "--json"), TARGET_S),
        )
    print(f"target {TARGET_S} s of CPU")
    return int(worst > TARGET_S)


if __name__ == "__main__":
    sys.exit(main())

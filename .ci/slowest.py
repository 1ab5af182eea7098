#!/usr/bin/env python3
"""Show the slowest tests of one or more runs, and those that failed: what `tests/timing.py` wrote.

.ci/slowest.py [--most 15] build/times/*.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

PHASES = ("setup_s", "call_s", "teardown_s")


def main() -> None:
    """Print a table: seconds of all phases, of each phase, and of CPU. Print a line for each failure."""
    parser = argparse.ArgumentParser(description="Show the slowest tests.")
    parser.add_argument("--most", type=int, default=15)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    rows = [row for file in options.files if file.exists() for row in csv.DictReader(file.open(newline=""))]
    rows.sort(key=lambda row: -total(row))
    print("| seconds | set-up | call | tear-down | CPU of its process | test | shares |")
    print("|---|---|---|---|---|---|---|")
    for row in rows[: options.most]:
        cells = [f"{total(row):.1f}", *(row[name] for name in PHASES), row["cpu_s"]]
        print(f"| {' | '.join(cells)} | {row['test'].removeprefix('tests/')} | {row['shares']} |")
    for row in rows:
        if row["failed"]:
            print(f"failed: {row['test']}: {row['failed']}")


def total(row: dict[str, str]) -> float:
    """Wall seconds of all phases of a test."""
    return sum(float(row[name]) for name in PHASES)


if __name__ == "__main__":
    main()

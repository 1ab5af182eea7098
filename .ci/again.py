#!/usr/bin/env python3
"""Run the one or two lab tests that failed beside others once more, alone. More than two are no accident.

.ci/again.py build/times/change.csv
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

MOST = 2
PYTEST = ".venv/bin/pytest"


def main() -> None:
    """Replace this process by pytest, or exit with 1."""
    with Path(sys.argv[1]).open(newline="") as table:
        failed = [row for row in csv.DictReader(table) if row["failed"]]
    if not 0 < len(failed) <= MOST:
        sys.exit(f"{len(failed)} tests failed: none runs again")
    print(f"== {len(failed)} of the tests above failed beside others: once more, alone", flush=True)
    os.execv(PYTEST, [PYTEST, *map(name, failed)])


def name(row: dict[str, str]) -> str:
    """A test's name as pytest takes it: pytest-xdist adds the group."""
    group = row["shares"].split(" of ")[-1]
    return row["test"].removesuffix(f"@{group}")


if __name__ == "__main__":
    main()

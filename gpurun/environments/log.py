"""Short progress messages of a build."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from gpurun.documents.plain import printable
from gpurun.environments.inside import COMPILING
from gpurun.quantities.counts import count

Report = Callable[[str, float], object]
"""Told what a build does, and for how many seconds it has run; again and again."""

_INSTALLING = re.compile(r"Installing collected packages: (.+)")
_NAMED = re.compile(r"\s*(Downloading|Building wheel for|Getting requirements to build wheel)[:\s]+(\S+)")
_COMPILING = COMPILING.decode().strip()


LINE_EVERY_S, SAME_EVERY_S = 2.0, 10.0


class BuildLines:
    """A `Report` for people: prints a line on stderr when a new stage begins, and repeats it while the stage lasts."""

    def __init__(self) -> None:
        self._said_s = float("-inf")
        self._stage = ""

    def __call__(self, stage: str, elapsed_s: float) -> None:
        """Report the current stage."""
        since_s = time.monotonic() - self._said_s
        if since_s >= (SAME_EVERY_S if stage == self._stage else LINE_EVERY_S):
            self._said_s, self._stage = time.monotonic(), stage
            sys.stderr.write(f"        python: {printable(stage)} … {elapsed_s:.0f} s\n")
            sys.stderr.flush()


class BuildLog:
    """Derives the current stage from pip's lines."""

    def __init__(self) -> None:
        self.stage = "starting"
        self._collected = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        """Add more of pip's output, in pieces of any size."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._read(line[:4096])

    def _read(self, line: str) -> None:
        if found := _INSTALLING.match(line):
            self.stage = f"installing {count(len(found[1].split(',')), 'package')}"
        elif line.startswith("Collecting "):
            self._collected += 1
            self.stage = f"resolving, {self._collected} so far"
        elif line == _COMPILING:
            self.stage = "compiling"
        elif (found := _NAMED.match(line)) and not self.stage.startswith("installing"):
            name = found[2].rsplit("/", 1)[-1].strip("()")[:60]
            self.stage = f"{'downloading' if found[1] == 'Downloading' else 'building'} {name}"

"""Programs that save as people's do, in a time that the test moves; each says what a restart would read.

Wherever gpurun waits, and for each piece that a host sends, the programs go on.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PIECES = 20
PIECE_S = 0.2

Program = Iterator[float]
"""Does its next part each time; says how long it then waits."""


class TornError(Exception):
    """A restart would fail, or read parts of different steps."""


class VirtualTime:
    """Moves a program on, until the power is cut. Takes the place of `threading.Event` and of `time.monotonic`.

    Attributes:
        cut_s: when the power is cut.
    """

    def __init__(self, program: Program, cut_s: float) -> None:
        self.now_s, self.cut_s = 1000.0, 1000.0 + cut_s
        self._lock = threading.Lock()
        self._program = program
        self._next_s = self.now_s + next(program)

    def monotonic(self) -> float:
        return self.now_s

    def is_set(self) -> bool:
        return self.now_s >= self.cut_s

    def wait(self, seconds: float) -> bool:
        self.advance(seconds)
        return self.is_set()

    def advance(self, seconds: float) -> None:
        with self._lock:  # gpurun asks hosts in several threads
            until_s = min(self.now_s + max(seconds, 0.001), self.cut_s)
            while self._next_s <= until_s:
                self.now_s = self._next_s
                self._next_s += next(self._program)
            self.now_s = until_s

    def through(self, stream: Callable[..., Iterator[object]], piece_s: float) -> Callable[..., Iterator[object]]:
        """Let the program go on while a host sends."""

        def sent(*args: object, **options: object) -> Iterator[object]:
            for reply in stream(*args, **options):
                self.advance(piece_s)
                yield reply

        return sent


def _pieces(path: Path, step: int, *, count: int, size: int) -> Program:
    """Write a file in place, piece by piece."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(b"HEAD %06d" % step)
        file.flush()
        for _ in range(count):
            file.write(bytes([step % 256]) * size)
            file.flush()
            yield PIECE_S
        file.write(b"TAIL %06d" % step)


def _step_of(path: Path, *, count: int, size: int) -> int:
    """Return the step that a file holds."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        raise TornError(f"{path.name} is missing") from None
    if len(found) != 22 + count * size or found[:4] != b"HEAD" or found[-11:-6] != b"TAIL ":
        raise TornError(f"{path.name} has {len(found)} bytes")
    step = int(found[5:11])
    if found[11:-11] != bytes([step % 256]) * (count * size) or int(found[-6:]) != step:
        raise TornError(f"{path.name} holds parts of several steps")
    return step


class InPlace:
    """`torch.save(state, "snapshot.pt")`: one file, again and again, in 20 pieces that take 4 s."""

    hosts = 1
    size = 60_000

    def run(self, tops: Sequence[Path], rest_s: float, step: int = 0) -> Program:
        while True:
            yield rest_s
            step += 1
            yield from _pieces(tops[0] / "snapshot.pt", step, count=PIECES, size=self.size)

    def read(self, tops: Sequence[Path]) -> int:
        return _step_of(tops[0] / "snapshot.pt", count=PIECES, size=self.size)


class Declared(InPlace):
    """The same, which rests less than 5 s, and calls `gpurun_runtime.checkpointed`."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = runs

    def run(self, tops: Sequence[Path], rest_s: float, step: int = 0) -> Program:
        while True:
            step += 1
            yield from _pieces(tops[0] / "snapshot.pt", step, count=PIECES, size=self.size)
            new = self._runs[0] / "checkpoint.0.tmp"
            new.write_text(json.dumps({"step": step}))
            said_ns = new.stat().st_mtime_ns
            new.rename(new.with_suffix(""))
            while _now_ns(self._runs[0] / "clock") <= said_ns:
                time.sleep(0.001)  # the next save is in a later tick of the clock of files
            yield min(rest_s, 4.5)


def _now_ns(path: Path) -> int:
    """Return the time that a file gets now."""
    path.write_text("")
    return path.stat().st_mtime_ns


class Renamed(InPlace):
    """Writes beside and renames, and never rests."""

    def run(self, tops: Sequence[Path], rest_s: float, step: int = 0) -> Program:
        while True:
            step += 1
            new = tops[0] / "snapshot.tmp"
            yield from _pieces(new, step, count=PIECES, size=self.size)
            written_ns = new.stat().st_mtime_ns - 10_000_000  # as if its write and its rename were not in one tick
            os.utime(new, ns=(written_ns, written_ns))
            new.rename(tops[0] / "snapshot.pt")
            yield min(rest_s, 4.5)


class Shards:
    """8 shards on 4 hosts in a folder for each step; the first host then says in `latest` which step is whole."""

    hosts = 4

    def run(self, tops: Sequence[Path], rest_s: float, step: int = 0) -> Program:
        while True:
            yield rest_s
            step += 1
            for shard in range(8):
                yield from _pieces(tops[shard // 2] / f"step-{step}" / f"shard-{shard}", step, count=2, size=5000)
            (tops[0] / "latest").write_text(f"step-{step}")
            for top in tops:
                shutil.rmtree(top / f"step-{step - 2}", ignore_errors=True)

    def read(self, tops: Sequence[Path]) -> int:
        """Return the step that all hosts read: each has got everything."""
        steps = set()
        for top in tops:
            try:
                folder = top / (top / "latest").read_text()
            except FileNotFoundError:
                raise TornError("no latest") from None
            steps |= {_step_of(folder / f"shard-{shard}", count=2, size=5000) for shard in range(8)}
        if len(steps) != 1 or folder.name != f"step-{min(steps)}":
            raise TornError(f"shards of {steps} beside {folder.name}")
        return min(steps)


class CheckpointFolders:
    """Hugging Face's Trainer: `checkpoint-N/` with several files; a restart takes the highest N."""

    hosts = 1

    def run(self, tops: Sequence[Path], rest_s: float, step: int = 0) -> Program:
        while True:
            yield rest_s
            step += 1
            folder = tops[0] / f"checkpoint-{step}"
            for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
                yield from _pieces(folder / name, step, count=5, size=3000)
            shutil.rmtree(tops[0] / f"checkpoint-{step - 2}", ignore_errors=True)

    def read(self, tops: Sequence[Path]) -> int:
        numbers = [int(path.name.partition("-")[2]) for path in tops[0].iterdir()]
        if not numbers:
            raise TornError("no checkpoint")
        folder, steps = tops[0] / f"checkpoint-{max(numbers)}", set()
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
            steps.add(_step_of(folder / name, count=5, size=3000))
        if steps != {max(numbers)}:
            raise TornError(f"{folder.name} holds {steps}")
        return max(numbers)

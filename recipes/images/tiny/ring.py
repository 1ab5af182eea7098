#!/usr/bin/python3
"""Train on several hosts with the standard library alone: a ring all-reduce over TCP, checkpoints, resume.

    ring [--steps 40] [--step-s 0.5] [--save-every 1]

For tests of gangs, which need ranks that depend on each other but no framework. Start it with the launcher `tasks`.
Each step sums a vector over all ranks, prints ``step N with SIZE``, and moves eight weights towards their optimum.
Rank 0 writes the weights to ``$GPURUN_OUTPUTS/step``; another attempt continues from there, at any number of ranks.
After SIGTERM, all ranks make one more step together, save, and exit with 143. A rank that loses a neighbour exits
with 1, as a rank of NCCL or Gloo does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

WEIGHTS = 8
OPTIMUM = tuple(range(WEIGHTS))
RATE = 0.1
JOIN_S = 60.0
"""Ranks of one gang start within this time of each other."""


class Ring:
    """Connections to the rank after this one and from the rank before it."""

    def __init__(self, rank: int, size: int, addresses: list[str], port: int) -> None:
        self.size = size
        mine = socket.create_server(("", 0))
        address = addresses[int(os.environ["GPURUN_NODE"])]
        places = _meet(rank, size, (address, mine.getsockname()[1]), (addresses[0], port))
        self._next = socket.create_connection(tuple(places[(rank + 1) % size]), timeout=JOIN_S)
        self._before, _ = mine.accept()
        for each in (self._next, self._before):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def sum(self, values: list[float]) -> list[float]:
        """Return the sum over all ranks: each vector travels once around the ring."""
        form = struct.Struct(f"!{len(values)}d")
        total, passing = list(values), values
        for _ in range(self.size - 1):
            self._next.sendall(form.pack(*passing))
            passing = list(form.unpack(_read(self._before, form.size)))
            total = [a + b for a, b in zip(total, passing, strict=True)]
        return total


def _meet(rank: int, size: int, mine: tuple[str, int], first: tuple[str, int]) -> list[list]:
    """Return where each rank listens: rank 0 collects and distributes the addresses."""
    if rank:
        deadline = time.monotonic() + JOIN_S
        while True:
            try:
                met = socket.create_connection(first, timeout=JOIN_S)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        with met, met.makefile("rw") as lines:
            print(json.dumps([rank, mine]), file=lines, flush=True)
            return json.loads(lines.readline())
    places: list = [mine] * size
    with socket.create_server(("", first[1])) as server:
        server.settimeout(JOIN_S)
        others = [server.accept()[0] for _ in range(size - 1)]
    files = [other.makefile("rw") for other in others]
    for file in files:
        number, place = json.loads(file.readline())
        places[number] = place
    for file in files:
        print(json.dumps(places), file=file, flush=True)
    for each in (*files, *others):
        each.close()
    return places


def _read(stream: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = stream.recv(count - len(found))
        if not part:
            raise ConnectionError("the rank before this one has ended")
        found += part
    return found


def load(path: Path) -> tuple[int, list[float]]:
    """Return the last step and its weights; step 0 if there is no checkpoint."""
    try:
        step, *weights = path.read_text().split()
        return int(step), [float(weight) for weight in weights]
    except FileNotFoundError:
        return 0, [0.0] * WEIGHTS


def save(path: Path, step: int, weights: list[float]) -> None:
    """Write the checkpoint beside the old one, then replace it."""
    draft = path.with_suffix(".tmp")
    draft.write_text(" ".join([str(step), *map(repr, weights)]))
    draft.replace(path)


def train(ring: Ring, rank: int, options: argparse.Namespace) -> int:
    """Make all steps. Returns the exit code: 143 if a rank was told to stop."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    path = Path(os.environ.get("GPURUN_OUTPUTS", "/tmp"), "step")
    first, weights = load(path)
    first = int(ring.sum([first if rank == 0 else 0.0])[0])  # rank 0 has the checkpoint
    weights = ring.sum(weights if rank == 0 else [0.0] * WEIGHTS)
    for step in range(first + 1, options.steps + 1):
        time.sleep(options.step_s)
        gradient = [weight - best for weight, best in zip(weights, OPTIMUM, strict=True)]
        ranks, stop, *total = ring.sum([1.0, float(bool(told)), *gradient])
        assert ranks == ring.size
        weights = [weight - RATE * part / ring.size for weight, part in zip(weights, total, strict=True)]
        print(f"step {step} with {ring.size}", flush=True)
        if rank == 0 and (stop or step % options.save_every == 0 or step == options.steps):
            save(path, step, weights)
            _declare(step)
        if stop:
            ring.sum([0.0])  # rank 0 has saved
            return 128 + signal.SIGTERM
    return 0


def _declare(step: int) -> None:
    """Tell gpurun of the checkpoint, if it has sent its module."""
    sys.path.append("/gpurun/python")
    try:
        import gpurun_runtime  # noqa: PLC0415  exists only where gpurun started this rank
    except ImportError:
        return
    gpurun_runtime.checkpointed(step)


def main() -> int:
    """Join the gang and train."""
    parser = argparse.ArgumentParser(description="Train on several hosts with the standard library alone.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that a step takes")
    parser.add_argument("--save-every", type=int, default=1, metavar="STEPS")
    options = parser.parse_args()
    rank, size = int(os.environ["GPURUN_RANK"]), int(os.environ["GPURUN_SIZE"])
    try:
        ring = Ring(rank, size, os.environ["GPURUN_ADDRESSES"].split(","), int(os.environ["GPURUN_PORT"]))
        return train(ring, rank, options)
    except OSError as error:
        print(f"rank {rank} lost a neighbour: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

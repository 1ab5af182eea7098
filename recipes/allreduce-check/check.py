"""Reduce known vectors over all ranks, with Horovod and (started by mpirun) with MPI, and compare every element.

The vectors hold small whole numbers whose sums every checked type represents exactly, so the order of additions
does not matter and anything but equality is an error. Also checked: that ranks, local ranks and sizes add up.
Prints a line a rank; exits 1 if anything differs on any rank.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TextIO

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

LENGTHS = (1, 7, 1000, 65_537, 1_000_003)
TYPES = ("uint8", "int32", "int64", "float16", "float32", "float64")
MPI_TYPES = tuple(name for name in TYPES if name != "float16")  # MPI has no half precision
# The largest n such that all whole numbers up to n are exact.
EXACT = {
    "uint8": 2**8 - 1,
    "int32": 2**31 - 1,
    "int64": 2**63 - 1,
    "float16": 2**11,
    "float32": 2**24,
    "float64": 2**53,
}
PATTERN = 5

Reduce = Callable[[str, np.ndarray], np.ndarray]


def weight(rank: int) -> int:
    """What rank `rank` multiplies the pattern by; neighbours differ, so a doubled or missing rank shows."""
    return rank % 3 + 1


def vector(length: int, kind: str, factor: int) -> np.ndarray:
    """1, 2, 3, 4, 5, 1, 2, … times `factor`."""
    return ((np.arange(length) % PATTERN + 1) * factor).astype(kind)


def checkable(kinds: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The types that hold the sum over `size` ranks exactly."""
    largest = PATTERN * sum(weight(rank) for rank in range(size))
    return tuple(kind for kind in kinds if largest <= EXACT[kind])


def wrong_sums(reduce: Reduce, kinds: tuple[str, ...], rank: int, size: int) -> Iterator[str]:
    """Every reduction whose result is not exactly the sum over all ranks, with its first wrong element."""
    total = sum(weight(other) for other in range(size))
    for kind in kinds:
        for length in LENGTHS:
            found = reduce(f"{kind}_{length}", vector(length, kind, weight(rank)))
            expected = vector(length, kind, total)
            if found.dtype != expected.dtype or found.shape != expected.shape:
                yield f"{kind}[{length}] came back as {found.dtype}{list(found.shape)}"
            elif not np.array_equal(found, expected):
                at = int(np.argmax(found != expected))
                yield f"{kind}[{length}][{at}] is {found[at]}, not {expected[at]}"


def horovod_sum(name: str, values: np.ndarray) -> np.ndarray:
    return hvd.allreduce(tf.constant(values), op=hvd.Sum, name=name).numpy()


def fused_sums_wrong(rank: int, size: int) -> Iterator[str]:
    """Many tensors in one go, which Horovod fuses into one buffer."""
    total = sum(weight(other) for other in range(size))
    lengths = range(1, 200)
    mine = [tf.constant(vector(length, "float32", weight(rank))) for length in lengths]
    for length, found in zip(lengths, hvd.grouped_allreduce(mine, op=hvd.Sum, name="fused"), strict=True):
        if not np.array_equal(found.numpy(), vector(length, "float32", total)):
            yield f"fused float32[{length}] is not the sum"


def wrong_ranks() -> Iterator[str]:
    """What does not add up in ranks and sizes, from every rank's own account."""
    account = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    everyone = [(name, *numbers) for name, numbers in hvd.allgather_object((socket.gethostname(), account))]
    if [rank for _, rank, *_ in everyone] != list(range(hvd.size())):
        yield f"ranks are {[rank for _, rank, *_ in everyone]}, not 0 to {hvd.size() - 1}"
    on_host = Counter(host for host, *_ in everyone)
    for host, rank, size, _, local_size, _, cross_size in everyone:
        if size != hvd.size() or cross_size != len(on_host):
            yield f"rank {rank} counts {size} ranks on {cross_size} hosts, not {hvd.size()} on {len(on_host)}"
        if local_size != on_host[host]:
            yield f"rank {rank} counts {local_size} ranks on {host}, not {on_host[host]}"
    for host, count in on_host.items():
        locals_ = sorted(local_rank for other, _, _, local_rank, *_ in everyone if other == host)
        if locals_ != list(range(count)):
            yield f"local ranks on {host} are {locals_}"


def mpi_problems() -> tuple[int, list[str]]:
    """Number of reductions done by MPI itself, and what is wrong with them."""
    from mpi4py import MPI  # noqa: PLC0415  importing it starts MPI: only where mpirun has made a world

    world = MPI.COMM_WORLD

    def mpi_sum(_name: str, values: np.ndarray) -> np.ndarray:
        found = np.empty_like(values)
        world.Allreduce(values, found, op=MPI.SUM)
        return found

    rank, size = world.Get_rank(), world.Get_size()
    kinds = checkable(MPI_TYPES, size)
    return len(kinds) * len(LENGTHS), [f"MPI: {text}" for text in wrong_sums(mpi_sum, kinds, rank, size)]


def say(text: str, stream: TextIO = sys.stdout) -> None:
    # The line and its end in one write: the launcher puts the rank before whatever it reads at a time.
    print(text + "\n", end="", flush=True, file=stream)


def main() -> int:
    in_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    mpi_count, problems = mpi_problems() if in_mpi else (0, [])
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rank, size = hvd.rank(), hvd.size()
    if in_mpi and os.environ["OMPI_COMM_WORLD_RANK"] != str(rank):
        problems.append(f"MPI calls rank {rank} {os.environ['OMPI_COMM_WORLD_RANK']}")
    kinds = checkable(TYPES, size)
    problems += wrong_ranks()
    problems += [f"Horovod: {text}" for text in wrong_sums(horovod_sum, kinds, rank, size)]
    problems += [f"Horovod: {text}" for text in fused_sums_wrong(rank, size)]
    by_mpi = f"{mpi_count} by MPI" if in_mpi else "none by MPI (not started by mpirun)"
    outcome = f"{len(problems)} WRONG" if problems else "all exact"
    say(
        f"rank {rank} of {size}, local {hvd.local_rank()} of {hvd.local_size()} on {socket.gethostname()}: "
        f"{len(kinds) * len(LENGTHS) + 1} reductions by Horovod, {by_mpi}: {outcome}"
    )
    if left_out := set(TYPES) - set(kinds):
        say(f"too many ranks for exact sums of {', '.join(sorted(left_out))}")
    for problem in problems:
        say(problem, sys.stderr)
    wrong = float(hvd.allreduce(tf.constant(float(len(problems))), op=hvd.Sum, name="problems"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

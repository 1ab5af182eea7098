"""Measure a gang: latency and bandwidth between hosts, allreduce by message size. Runs on every rank, under mpirun.

Needs mpi4py; needs Horovod with TensorFlow only for ``--engine horovod`` or on GPUs. Rank 0 writes one JSON document to
``--output``. The program does not know the hosts' names; the head knows the host of each rank.

Only two ranks work at a time (or, with ``--at-once``, one pair per host). The others sleep and poll, because MPI's own
barrier would keep a core busy on every host and so disturb the measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# By name: import-linter keeps these out of whatever may run on the head.
MPI: Any = None

KIB, MIB = 1 << 10, 1 << 20
DATA, LAST, PING, FIGURES = 1, 2, 3, 4
DEPTH = 4
"""Messages under way at once: enough to fill a link, few enough that the last of them do not blur the figure."""

WARM_S = 0.25
"""Lets TCP find its window and empties the token bucket of a shaped link."""

PINGS, PING_WARM = 200, 20
LARGE, SMALL = 256 * KIB, 64 * KIB
SLOW_BYTES_PER_S = 60e6
ENOUGH_BYTES = 32 * MIB
LONGEST_S = 4.0

SUSPECT, REPEATS = 0.9, 3
"""A link slower than this fraction of similar links is measured again, up to `REPEATS` times."""


def main() -> None:
    """Run one rank's part."""
    global MPI  # noqa: PLW0603 - imported where it exists
    options = _options()
    MPI = importlib.import_module("mpi4py.MPI")
    world = MPI.COMM_WORLD
    leaders = [int(rank) for rank in options.leaders.split(",")]
    result: dict[str, Any] = {
        "version": 1,
        "world": world.Get_size(),
        "mpi": MPI.Get_library_version().split(",")[0],
        "pairs": _pairs(world, leaders, json.loads(options.racks), options.seconds, options.at_once),
        "allreduce": [],
        "skipped": {},
    }
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.engine in ("auto", "mpi"):
        result["allreduce"] += _allreduce(world, sizes, options.seconds, "mpi", _mpi_allreduce(world))
    run, why = _horovod_allreduce(options.engine)
    if run is not None:
        result["allreduce"] += _allreduce(world, sizes, options.seconds, why, run)
    elif options.engine != "mpi":
        result["skipped"]["horovod"] = why
    if world.Get_rank() == 0:
        Path(options.output).write_text(json.dumps(result), encoding="utf-8")
        _say("done")


def _say(text: str) -> None:
    sys.stdout.write(f"bench: {text}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--leaders", required=True, help="the first rank of each host, separated by commas")
    parser.add_argument(
        "--racks",
        default="{}",
        help="JSON object that maps host names to racks; only links between the same racks are compared",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each measurement, after a warm-up")
    parser.add_argument("--sizes", default="8,1024,65536,1048576,8388608,67108864", help="allreduce sizes, bytes")
    parser.add_argument("--engine", choices=["auto", "mpi", "horovod"], default="auto")
    parser.add_argument("--at-once", action="store_true", help="measure several pairs at once, each host in one pair")
    return parser.parse_args()


# -- pairs -------------------------------------------------------------------------------------------------


def rounds(leaders: list[int], at_once: bool) -> list[list[tuple[int, int]]]:
    """Plan which pairs measure at the same time: one pair, or one pair per host, by the circle method."""
    if not at_once:
        return [[(a, b)] for at, a in enumerate(leaders) for b in leaders[at + 1 :]]
    players = list(leaders) + ([-1] if len(leaders) % 2 else [])
    found = []
    for _ in range(len(players) - 1):
        facing = [(players[at], players[-1 - at]) for at in range(len(players) // 2)]
        found.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def _pairs(
    world: Any, leaders: list[int], racks: dict[str, str], seconds: float, at_once: bool
) -> list[dict[str, Any]]:
    """Measure every pair, then repeat those that look slow. A figure stays low only if all repetitions are low."""
    best = {(one["source"], one["target"]): one for one in _pass(world, rounds(leaders, at_once), seconds)}
    names = world.allgather(MPI.Get_processor_name())
    group_of = {leader: racks.get(names[leader], "") for leader in leaders}
    for _ in range(REPEATS):
        again = world.bcast(suspects(list(best.values()), group_of), root=0)
        if not again:
            break
        for one in _pass(world, [[pair] for pair in again], 2 * seconds):
            known = best[one["source"], one["target"]]
            if _rate(one) > _rate(known):
                best[one["source"], one["target"]] = {**one, "latency_us": min(one["latency_us"], known["latency_us"])}
    return list(best.values())


def suspects(figures: list[dict[str, Any]], group_of: dict[int, str]) -> list[tuple[int, int]]:
    """Return pairs with a direction well below the better ones between the same two groups, the worst first."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in figures:
        ends = sorted((group_of[one["source"]], group_of[one["target"]]))
        kinds.setdefault(("same",) if ends[0] == ends[1] else tuple(ends), []).append(one)
    found: dict[tuple[int, int], float] = {}
    for alike in kinds.values():
        rates = sorted(_rate(one) for one in alike)
        good = rates[-(len(rates) // 4 + 1)]
        for one in alike:
            if _rate(one) < good * SUSPECT:
                pair = (min(one["source"], one["target"]), max(one["source"], one["target"]))
                found[pair] = min(found.get(pair, 1.0), _rate(one) / good)
    return sorted(found, key=lambda pair: found[pair])[: 2 * len(group_of)]


def _rate(one: dict[str, Any]) -> float:
    return one["bytes"] / one["seconds"] if one["seconds"] else 0.0


def _pass(world: Any, plan: list[list[tuple[int, int]]], seconds: float) -> list[dict[str, Any]]:
    """Measure these pairs, round by round. Rank 0 returns all figures, other ranks return none."""
    me = world.Get_rank()
    mine: list[dict[str, Any]] = []
    for number, pairs in enumerate(plan, 1):
        if me == 0 and (number == 1 or number % 10 == 0 or number == len(plan)):
            _say(f"pairs {number} of {len(plan)}")
        _rest_until_all_are_here(world)
        for first, second in pairs:
            if me == first:
                mine += _measure(world, second, seconds, leads=True)
            elif me == second:
                mine += _measure(world, first, seconds, leads=False)
    _rest_until_all_are_here(world)
    gathered = world.gather(mine, root=0)
    return [one for part in gathered or [] for one in part]


def _measure(world: Any, peer: int, seconds: float, leads: bool) -> list[dict[str, Any]]:
    """Measure the latency, then both directions. The receiver records each figure."""
    me = world.Get_rank()
    latency_us = _ping(world, peer, leads)
    incoming = []
    for sends in (leads, not leads):
        if sends:
            _send(world, peer)
        else:
            size, took_s = _receive(world, peer, seconds)
            incoming.append({"source": peer, "target": me, "bytes": size, "seconds": took_s, "latency_us": latency_us})
    return incoming


def _ping(world: Any, peer: int, leads: bool) -> float:
    """Return half the median round-trip time of one byte, in microseconds."""
    byte, trips = bytearray(1), []
    for _ in range(PING_WARM + PINGS):
        started = time.perf_counter()
        if leads:
            world.Send([byte, MPI.BYTE], peer, PING)
            world.Recv([byte, MPI.BYTE], peer, PING)
        else:
            world.Recv([byte, MPI.BYTE], peer, PING)
            world.Send([byte, MPI.BYTE], peer, PING)
        trips.append(time.perf_counter() - started)
    return sorted(trips[PING_WARM:])[PINGS // 2] / 2 * 1e6


def _send(world: Any, peer: int) -> None:
    """Send to a peer at full rate: first a warm-up, then with the size and time that the peer requests."""
    _stream(world, peer, SMALL, WARM_S)
    size, wanted_s = world.recv(source=peer, tag=FIGURES)
    _stream(world, peer, size, wanted_s)


def _stream(world: Any, peer: int, size: int, seconds: float) -> None:
    buffer = bytearray(size)
    under_way: list[Any] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if len(under_way) == DEPTH:
            under_way.pop(0).Wait()
        under_way.append(world.Isend([buffer, MPI.BYTE], peer, DATA))
    under_way.append(world.Isend([buffer, MPI.BYTE], peer, LAST))
    for request in under_way:
        request.Wait()


def _receive(world: Any, peer: int, seconds: float) -> tuple[int, float]:
    """Return (bytes, seconds) of the data between the first message and the last, after the warm-up."""
    size, took_s = _drain(world, peer, SMALL)
    rate = size / took_s if took_s else 0.0
    wanted_s = max(seconds, min(LONGEST_S, ENOUGH_BYTES / rate)) if rate else LONGEST_S
    message = LARGE if rate > SLOW_BYTES_PER_S else SMALL
    world.send((message, wanted_s), dest=peer, tag=FIGURES)
    return _drain(world, peer, message)


def _drain(world: Any, peer: int, size: int) -> tuple[int, float]:
    buffers = [bytearray(size) for _ in range(DEPTH)]
    under_way = [world.Irecv([buffer, MPI.BYTE], peer, MPI.ANY_TAG) for buffer in buffers]
    status = MPI.Status()
    started, ended, count, slot = 0.0, 0.0, 0, 0
    while True:
        under_way[slot].Wait(status)
        ended = time.perf_counter()
        started = started or ended
        count += 1
        if status.Get_tag() == LAST:
            break
        under_way[slot] = world.Irecv([buffers[slot], MPI.BYTE], peer, MPI.ANY_TAG)
        slot = (slot + 1) % DEPTH
    for at, request in enumerate(under_way):
        if at != slot:
            request.Cancel()
            request.Wait()
    return (count - 1) * size, ended - started


def _rest_until_all_are_here(world: Any) -> None:
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


# -- allreduce ---------------------------------------------------------------------------------------------


def _allreduce(
    world: Any, sizes: list[int], seconds: float, engine: str, run: Callable[[int], Callable[[], None]]
) -> list[dict[str, Any]]:
    """Return the mean time of one allreduce of each size, for the slowest rank; iterations back to back, as in
    nccl-tests.
    """
    found = []
    for size in sizes:
        step = run(size)
        world.Barrier()
        started = time.perf_counter()
        step()
        once_s = world.allreduce(time.perf_counter() - started, op=MPI.MAX)
        iterations = int(min(1000, max(3, seconds / max(once_s, 1e-6))))
        world.Barrier()
        started = time.perf_counter()
        for _ in range(iterations):
            step()
        took_s = world.allreduce(time.perf_counter() - started, op=MPI.MAX)
        found.append({"engine": engine, "bytes": size, "time_us": took_s / iterations * 1e6, "iterations": iterations})
        if world.Get_rank() == 0:
            _say(f"allreduce ({engine}) of {size} bytes")
    return found


def _mpi_allreduce(world: Any) -> Callable[[int], Callable[[], None]]:
    """Sum float32 in host memory with MPI."""

    def run(size: int) -> Callable[[], None]:
        count = max(1, size // 4)
        source, target = array("f", bytes(4 * count)), array("f", bytes(4 * count))
        return lambda: world.Allreduce([source, MPI.FLOAT], [target, MPI.FLOAT], op=MPI.SUM)

    return run


def _horovod_allreduce(engine: str) -> tuple[Callable[[int], Callable[[], None]] | None, str]:
    """Sum float32 tensors with Horovod (with NCCL if it was built with it); or return None and the reason."""
    if engine == "mpi":
        return None, "not asked for"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if engine == "auto":
            return None, "the container has no CUDA driver, so there is only host memory to measure"
    try:
        hvd = importlib.import_module("horovod.tensorflow")
        tf = importlib.import_module("tensorflow")
    except ImportError as error:
        return None, str(error)
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    elif engine == "auto":
        return None, "TensorFlow sees no GPU"
    name = "horovod, NCCL" if gpus and hvd.nccl_built() else "horovod"

    def run(size: int) -> Callable[[], None]:
        with tf.device("/GPU:0" if gpus else "/CPU:0"):
            tensor = tf.zeros([max(1, size // 4)], tf.float32)

        def step() -> None:
            # .numpy() of one element waits for the result; the tensor itself stays where it is.
            hvd.allreduce(tensor, op=hvd.Sum, name=f"bench.{size}")[:1].numpy()

        return step

    return run, name


if __name__ == "__main__":
    main()

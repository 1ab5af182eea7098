"""Measure the scheduler: one placement, one pass, and a real trace compared with a second simulator.

    python benchmarks/bench_scheduler.py [TRACE.csv]

Timings are CPU seconds of this process, so that other load does not distort them. Placements and passes are medians of
several runs with garbage collection off. The trace is replayed by the scheduler and by a second, independent simulator
(`yardstick`) in the same run.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.jobs.spec import Constraints, JobSpec, Wants
from gpurun.scheduler.model import DEFAULT, HOUR_S, Gang, Running, Snapshot, new_gang
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.placement import Index, try_place
from gpurun.simulate.replay import FIFO, SJF, TraceJob, read_trace, replay
from gpurun.simulate.report import mean_wait, report_replay

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "itp-cluster06.csv"
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128), (40, 15, 15, 15, 8, 4, 2, 1)
RUNS = 5
WANTS = Constraints(generations=("hopper",))


def cluster(racks: int, hosts: int, gpus: int = 8) -> Inventory:
    found = tuple(Host(f"gpu-r{r}-{h:02d}", f"r{r}", "hopper", gpus, "ib") for r in range(racks) for h in range(hosts))
    names = (tuple(host.name for host in found[r * hosts : (r + 1) * hosts]) for r in range(racks))
    return Inventory(found, tuple(Rack(f"r{r}", name) for r, name in enumerate(names)), {})


def half_full(inventory: Inventory, seed: int) -> Snapshot:
    """Place gangs of the mix one after the other, then end random gangs until half of the GPUs are free."""
    rng = random.Random(seed)
    index, running, number = Index(Snapshot(inventory)), [], 0
    while index.total_free > inventory.total_gpus // 50:
        number += 1
        gang = Gang(
            f"r{number:06d}",
            rng.choices(SIZES, WEIGHTS)[0],
            wants=Wants(time_limit_s=rng.choice([None, 3600.0, 36000.0])),
        )
        placement = try_place(index, gang)
        if placement is None:
            continue
        index.take(index.masks(placement))
        granted_s = -rng.uniform(0, 3000)
        running.append(Running(gang, placement, granted_s, granted_s))
    rng.shuffle(running)
    while index.total_free < inventory.total_gpus // 2:
        index.give(index.masks(running.pop().placement))
    return Snapshot(inventory, tuple(running))


def timed(work: Callable[[], object], runs: int = RUNS) -> float:
    """Return the median seconds of several runs."""
    took = []
    for _ in range(runs):
        gc.collect()
        gc.disable()
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
        gc.enable()
    return statistics.median(took)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) if n == 0 else cell.rjust(width) for n, (cell, width) in
                        enumerate(zip(row, widths, strict=True))))  # fmt: skip


def placements() -> None:
    rows = []
    for racks, limit_ms in ((6, ""), (63, "1"), (625, "5")):
        inventory = cluster(racks, 16)
        snapshot = half_full(inventory, seed=racks)
        built_s = timed(lambda snapshot=snapshot: Index(snapshot))
        p50s, p99s = [], []
        for seed in range(RUNS):
            took = one_by_one(Index(snapshot), random.Random(seed))
            p50s.append(took[len(took) // 2])
            p99s.append(took[int(len(took) * 0.99)])
        rows.append(
            (
                f"{len(inventory.hosts)} hosts × 8, half full",
                f"{1e3 * statistics.median(p50s):.3f}",
                f"{1e3 * statistics.median(p99s):.3f}",
                limit_ms,
                f"{1e3 * built_s:.1f}",
            )
        )
    table("One placement (ms)", ("cluster", "p50", "p99", "at most", "index, once per pass"), rows)


def one_by_one(index: Index, rng: random.Random) -> list[float]:
    """Return seconds of single placements, ascending. Gangs start and end, so that the cluster stays half full."""
    took, placed = [], []
    gc.collect()
    gc.disable()
    for number in range(600):
        gang = Gang(f"g{number}", rng.choices(SIZES, WEIGHTS)[0])
        began = time.process_time()
        placement = try_place(index, gang)
        took.append(time.process_time() - began)
        if placement is not None:
            index.take(index.masks(placement))
            placed.append(placement)
        if len(placed) > 20:
            index.give(index.masks(placed.pop(rng.randrange(len(placed)))))
    gc.enable()
    return sorted(took)


def as_decoded(number: int, rng: random.Random, limit_s: float | None) -> Gang:
    """Return a queued gang as a pass decodes it from files: it shares no object with other gangs."""
    spec = JobSpec("n", "i", rng.choices(SIZES, WEIGHTS)[0], ("true",), time_limit_s=limit_s, constraints=WANTS)
    decoded = msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec)
    return new_gang(decoded, job=f"q{number:06d}", submitted_s=float(number))


def passes() -> None:
    rows = []
    for queued, racks in ((1000, 63), (10000, 63)):
        snapshot = half_full(cluster(racks, 16), seed=7)
        rng = random.Random(queued)
        for name, limits in (("no time limits", [None]), ("time limits", [None, 1800.0, 7200.0])):
            queue = tuple(as_decoded(n, rng, rng.choice(limits)) for n in range(queued))
            full = replace(snapshot, queue=queue, now_s=float(queued))
            started = len(schedule(full).starts)
            took_s = timed(lambda full=full: schedule(full))
            limit = "150" if queued == 10000 else ""
            rows.append((f"{queued} queued, {racks * 16} hosts, {name}", f"{1e3 * took_s:.0f}", limit, f"{started}"))
    rows += [choosy(10000, 500, lambda rng, names: {"wants": Wants(constraints=three_of(rng, names))})]
    rows += [choosy(2000, 300, lambda rng, names: {"avoid": tuple(rng.sample(names, 8))})]
    table("One pass (ms)", ("queue", "median", "at most", "started"), rows)


def three_of(rng: random.Random, names: Sequence[str]) -> Constraints:
    return Constraints(hosts=tuple(rng.sample(names, 3)))


def choosy(
    queued: int, limit_ms: int, ask: Callable[[random.Random, Sequence[str]], dict[str, Any]]
) -> tuple[str, ...]:
    """Return the row of a pass over gangs that each name or avoid hosts of their own, on a full cluster."""
    inventory, rng = cluster(63, 16), random.Random(1)
    names = [host.name for host in inventory.hosts]
    first = Snapshot(inventory, queue=tuple(Gang(f"r{n:04d}", 8) for n in range(len(names))))
    running = tuple(Running(gang, placement, 0.0, 0.0) for gang, placement in schedule(first).starts)
    queue = tuple(Gang(f"q{n:06d}", 8, float(n), **ask(rng, names)) for n in range(queued))
    took_s = timed(lambda: schedule(Snapshot(inventory, running, queue, now_s=1e5)))
    what = "name three hosts" if queue[0].wants.constraints.hosts else "avoid eight hosts"
    return f"{queued} queued that each {what}, {len(names)} hosts", f"{1e3 * took_s:.0f}", f"{limit_ms}", "0"


# an independent check, which shares no code with the scheduler


def yardstick(jobs: Sequence[TraceJob], hosts: int, shortest_first: bool, size: int = 8) -> list[float]:
    """Return waits under a strict queue with consolidated placement, in the order of `jobs`. Uses only free counts."""
    free, queue, running, waits, following, now = [size] * hosts, [], [], [0.0] * len(jobs), 0, 0.0
    while following < len(jobs) or queue or running:
        arrival = jobs[following].submitted_s if following < len(jobs) else float("inf")
        now = min(arrival, running[0][0] if running else float("inf"))
        while running and running[0][0] <= now:
            for host, gpus in heapq.heappop(running)[2]:
                free[host] += gpus
        while following < len(jobs) and jobs[following].submitted_s <= now:
            key = jobs[following].duration_s if shortest_first else jobs[following].submitted_s
            heapq.heappush(queue, (key, following))
            following += 1
        while queue and (hosts_used := consolidated(free, jobs[queue[0][1]].gpus, size)):
            number = heapq.heappop(queue)[1]
            for host, gpus in hosts_used:
                free[host] -= gpus
            waits[number] = now - jobs[number].submitted_s
            heapq.heappush(running, (now + jobs[number].duration_s, number, hosts_used))
    return waits


def consolidated(free: Sequence[int], gpus: int, size: int) -> list[tuple[int, int]]:
    if gpus <= size:
        fitting = [(f, host) for host, f in enumerate(free) if f >= gpus]
        return [(min(fitting)[1], gpus)] if fitting else []
    whole, rest = divmod(gpus, size)
    order = sorted((host for host, f in enumerate(free) if f), key=lambda host: -free[host])
    used = [(host, size) for host in order[:whole] if free[host] == size]
    if len(used) < whole or (rest and (len(order) <= whole or free[order[whole]] < rest)):
        return []
    return [*used, (order[whole], rest)] if rest else used


def trace(path: Path) -> None:
    if not path.exists():
        print(f"\nno trace at {path}: give one as an argument")
        return
    jobs = read_trace(path)
    limited = tuple(replace(job, time_limit_s=job.duration_s) for job in jobs)
    inventory = cluster(1, 16)
    rows, base = [], None
    plan = (
        ("fifo", jobs, FIFO),
        ("sjf, durations known", jobs, SJF),
        ("default", jobs, DEFAULT),
        *(
            (f"default, patience {hours} h", jobs, replace(DEFAULT, patience_s=hours * HOUR_S))
            for hours in (960, 480, 120, 60, 0)
        ),
        ("default, limits = durations", limited, DEFAULT),
    )
    for name, lines, policy in plan:
        began = time.process_time()
        done = replay(lines, inventory, policy)
        figures = report_replay(done, time.process_time() - began)
        large = mean_wait(done.outcomes, more_than_gpus=8)
        base = base or (figures.avg_wait_s, large)
        rows.append(
            row(name, figures.avg_wait_s, large, base, figures.avg_jct_s, figures.p99_wait_s, figures.elapsed_s)
        )
    for name, shortest in (("second opinion: fifo", False), ("second opinion: sjf", True)):
        began = time.process_time()
        waits = yardstick(jobs, 16, shortest)
        took = time.process_time() - began
        large = statistics.mean(wait for wait, job in zip(waits, jobs, strict=True) if job.gpus > 8)
        jct = statistics.mean(wait + job.duration_s for wait, job in zip(waits, jobs, strict=True))
        p99 = statistics.quantiles(waits, n=100, method="inclusive")[98]
        rows.append(row(name, statistics.mean(waits), large, base, jct, p99, took))
    header = ("policy", "avg wait s", "× fifo", "gangs > 8", "× fifo", "avg JCT s", "p99 wait s", "replay CPU s")
    table(f"{path.name}: {len(jobs)} jobs on 16 hosts × 8", header, rows)
    print("published (HeliosArtifact): fifo 57,771 / JCT 82,204 / p99 393,155; sjf 12,036 / 36,470 / 149,325")


def row(
    name: str, wait: float, large: float, base: tuple[float, float], jct: float, p99: float, took: float
) -> tuple[str, ...]:
    return (
        name,
        f"{wait:,.0f}",
        f"{wait / base[0]:.2f}",
        f"{large:,.0f}",
        f"{large / base[1]:.2f}" if base[1] else "",
        f"{jct:,.0f}",
        f"{p99:,.0f}",
        f"{took:.2f}",
    )


if __name__ == "__main__":
    placements()
    passes()
    trace(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)

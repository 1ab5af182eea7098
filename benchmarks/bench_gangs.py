"""Simulate random gangs in virtual time, and check that each ends once, in time and for the right reason.

    bench_gangs.py --histories 100000      # the promise
    bench_gangs.py --broken                # how many histories until each deliberately broken build is caught
    bench_gangs.py --replay 1234           # one history, shrunk if it breaks a promise

The simulation is in tests/gangs; `make test-unit` runs a sample.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gangs"))

import gang_run
from broken_gangs import BUILDS
from gang_plan import draw

MOST = 1000
CHUNK = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--replay", type=int, help="print the history with this number")
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--runs", type=int, default=5, help="of each broken build")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.broken:
        return try_broken(args.runs)
    if args.replay is not None:
        with gang_run.simulated():
            print(_short(args.replay))
        return 0
    return try_sound(args.histories, args.seed, args.processes)


def try_sound(histories: int, first: int, processes: int) -> int:
    failed: list[tuple[int, str]] = []
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    starts = range(first, first + histories, CHUNK)
    with multiprocessing.Pool(processes) as pool:
        jobs = [(at, min(CHUNK, first + histories - at)) for at in starts]
        for done, (found, ended) in enumerate(pool.imap(_some, jobs), start=1):
            if done % 50 == 0:
                print(f"{done * CHUNK} histories after {time.monotonic() - began_s:.0f} s", flush=True)
            failed += found
            ends.update(ended)
            for seed, violation in found:
                print(f"seed {seed}: {violation}", flush=True)
    wall_s = time.monotonic() - began_s
    print(
        f"{histories} histories from seed {first}: {len(failed)} broke a promise; {wall_s:.0f} s with {processes} "
        f"processes, {60 * histories / wall_s:.0f} a minute; attempts ended {dict(ends.most_common())}"
    )
    if failed:
        with gang_run.simulated():
            print(_short(failed[0][0]))
    return bool(failed)


def _some(seeds: tuple[int, int]) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Run a few histories. Returns those that broke a promise, and how attempts ended."""
    failed, ends = list[tuple[int, str]](), Counter[str]()
    with gang_run.simulated():
        for seed in range(seeds[0], sum(seeds)):
            episode = gang_run.run(draw(seed))
            ends.update(outcome.value for _, outcome in episode.ends)
            failed += [(seed, episode.violations[0])] if episode.violations else []
    return failed, ends


def _short(seed: int) -> str:
    plan = draw(seed)
    return gang_run.told(gang_run.shrunk(plan) if gang_run.run(plan).violations else plan)


def try_broken(runs: int) -> int:
    print(f"histories until a broken build is caught, of at most {MOST}, {runs} runs each: caught, median, most")
    for name, broken in BUILDS.items():
        found = [gang_run.caught_after(broken, first=1_000_000 * run, most=MOST) for run in range(1, runs + 1)]
        caught = [number for number in found if number is not None]
        middle = f"{statistics.median(caught):.0f}, {max(caught)}" if caught else "-"
        print(f"{name}: {len(caught)} of {runs}, {middle}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run random steps on simulated hosts with real lease files and records; check that no GPU is ever held twice.

    bench_ownership.py --steps 100000            # the promise
    bench_ownership.py --broken --runs 20        # how many steps until each deliberately broken build is caught
    bench_ownership.py --seed 1234 --episodes 1  # replay one episode, with a short history if it fails

The simulation is in tests/ownership; `make test-unit` runs a sample.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ownership"))

import ownership_run
import ownership_steps
from broken_builds import BUILDS

MOST_STEPS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--episodes", type=int, help="instead of --steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--runs", type=int, default=5, help="of each broken build")
    args = parser.parse_args()
    if args.broken:
        return try_broken(args.runs)
    return try_sound(args.episodes or -(-args.steps // ownership_run.STEPS), args.seed)


def try_sound(episodes: int, first: int) -> int:
    taken, failed, began_s, cpu_s = 0, [], time.monotonic(), time.process_time()
    for seed in range(first, first + episodes):
        episode = ownership_run.run(ownership_steps.draw(seed, ownership_run.STEPS))
        taken += episode.taken
        if episode.violations:
            failed.append(seed)
            print(f"seed {seed}: {episode.violations[0]}", flush=True)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    print(
        f"{taken} steps in {episodes} episodes from seed {first}: {len(failed)} episodes broke a promise; "
        f"{wall_s:.0f} s, {cpu_s:.0f} s of CPU, {taken / cpu_s:.0f} steps per second of CPU"
    )
    if failed:
        plan = ownership_steps.draw(failed[0], ownership_run.STEPS)
        print(ownership_run.told(failed[0], ownership_run.shrunk(plan, runs=150)))
    return bool(failed)


def try_broken(runs: int) -> int:
    print(f"steps until a broken build is caught, of at most {MOST_STEPS}, {runs} runs each: caught, median, most")
    for name, broken in BUILDS.items():
        found = [ownership_run.steps_until_caught(broken, seed=seed, most=MOST_STEPS) for seed in range(1, runs + 1)]
        caught = [steps for steps in found if steps is not None]
        middle = f"{statistics.median(caught):.0f}, {max(caught)}" if caught else "-"
        print(f"{name}: {len(caught)} of {runs}, {middle}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

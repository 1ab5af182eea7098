"""Race for a host's GPUs from different state directories: both jobs must never run at once, and both must run.

    python benchmarks/bench_claims.py [--races 200] [--hosts 2] [--scenario heads|names] [--json FILE]

heads  two heads, each with its own state directory, submit a job for all GPUs of the same host
names  one head has two inventories that call the machine by different names, and submits one job against each

The second job is submitted up to two seconds after the first, so that they meet in all steps before the start. Races
on different hosts run in parallel. Exits with 1 if both jobs ran at once, or a job did not run. Needs root
and Docker's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from crashing import build_image
from racing import IMAGE, LAUNCHER, SCENARIOS, Race, race

from gpurun.lab import Lab, LabSpec

MOST_DELAY_S = 2.0


def run(lab: Lab, scenario: str, races: int, folder: Path, seed: int) -> list[Race]:
    """Race on all hosts of the lab in parallel until enough races are done."""
    done: list[Race] = []
    lock = threading.Lock()
    left = iter(range(races))

    def work(host: str) -> None:
        sides = SCENARIOS[scenario](lab, folder, host)
        chance = random.Random(f"{seed} {host}")
        while True:
            with lock:
                if next(left, None) is None:
                    return
            found = race(sides, delay_s=chance.choice((0.0, chance.uniform(0.0, MOST_DELAY_S))))
            with lock:
                done.append(found)
                if not found.loser_ran_afterwards:
                    print(f"  {scenario} on {host}: {found}", flush=True)
                if len(done) % 20 == 0:
                    print(f"  {scenario}: {len(done)} races", flush=True)

    threads = [threading.Thread(target=work, args=(host.name,)) for host in lab.hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--scenario", choices=SCENARIOS)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lab = Lab(f"bench-claims-{os.getpid()}")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build_image(folder, IMAGE, LAUNCHER)
        try:
            lab.up(LabSpec(lab.name, racks=1, hosts=arguments.hosts))
            for scenario in [arguments.scenario] if arguments.scenario else SCENARIOS:
                place = folder / scenario
                place.mkdir()
                rows.append(row(scenario, run(lab, scenario, arguments.races, place, arguments.seed)))
                print(
                    "{scenario}: races={races} both={both} neither={neither} loser ran afterwards={afterwards}; a host "
                    "refused in {refused} of them; a race took {median_s:.1f} s (median)".format(**rows[-1]),
                    flush=True,
                )
        finally:
            lab.down(purge=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return any(each["both"] or each["afterwards"] != each["races"] for each in rows)


def row(scenario: str, races: list[Race]) -> dict:
    return {
        "scenario": scenario,
        "races": len(races),
        "both": sum(each.both for each in races),
        "neither": sum(each.neither for each in races),
        "afterwards": sum(each.loser_ran_afterwards for each in races),
        "refused": sum(each.refused > 0 for each in races),
        "median_s": statistics.median(each.took_s for each in races),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Crash gpurun at every fault point and stress the leases: no GPU may be granted twice, no job lost.

    python benchmarks/bench_reliability.py [--crashes 300] [--stress 60] [--labs 2] [--json FILE]

crashes  on labs of two real hosts: the supervisor, the waiter and each command (submit, cancel, recover, status as the
         adopter) get SIGKILL at one fault point after the other. Then one command recovers, and every promise of the
         design is checked: jobs end correctly, logs are complete, no GPU is in two leases, nothing is left behind
stress   16 processes submit, cancel and recover for a while, a tenth of all supervisors is killed, and one more process
         reads the leases continuously

Exits with 1 if a promise was broken. Needs root, Linux and Docker's packages for the first part.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from cluster import Cluster
from crashing import SCENARIOS, build_image, check_invariants
from stress_leases import stress

from gpurun.lab import Lab, LabSpec

PROCESSES = 16
ENOUGH_LIVED = 3
"""A scenario's round ends after its victim has survived this many fault points in a row."""
MOST_POINTS = 120


@dataclass
class Tally:
    """The results of one scenario's crashes."""

    crashes: int = 0
    lived: int = 0
    places: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Crashes:
    """Returns (scenario, point) until there are enough crashes: all points of each scenario in turn, then again."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.tally: dict[str, Tally] = defaultdict(Tally)
        self._lived: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._cases = self._all()

    def _all(self) -> Iterator[tuple[str, int]]:
        while True:
            self._lived.clear()
            for point in range(1, MOST_POINTS):
                for name in SCENARIOS:
                    if self._lived[name] < ENOUGH_LIVED:
                        yield name, point

    def take(self) -> tuple[str, int] | None:
        with self._lock:
            done = sum(tally.crashes for tally in self.tally.values()) >= self.wanted
            return None if done else next(self._cases)

    def note(self, name: str, point: int, place: str | None, broken: str | None, took_s: float) -> None:
        with self._lock:
            tally = self.tally[name]
            tally.took_s += took_s
            tally.crashes += place is not None or broken is not None
            tally.lived += place is None and broken is None
            self._lived[name] = 0 if place is not None or broken is not None else self._lived[name] + 1
            if place is not None:
                tally.places.add(place)
            if broken is not None:
                tally.broken.append(f"point {point}: {broken}")
                print(f"BROKEN {name} {point}: {broken}", flush=True)
            total = sum(tally.crashes for tally in self.tally.values())
            print(f"  {total:4} {name} {point} {place or 'lived'} {took_s:.1f} s", flush=True)


def crash_all(wanted: int, labs: int) -> dict[str, Tally]:
    """Run at least `wanted` crashes over all scenarios, on `labs` labs at once."""
    crashes = Crashes(wanted)
    with tempfile.TemporaryDirectory() as folder:
        build_image(Path(folder))
    threads = [threading.Thread(target=_crash_on, args=(f"reliable-{number}", crashes)) for number in range(labs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return crashes.tally


def _crash_on(name: str, crashes: Crashes) -> None:
    lab = Lab(name)
    lab.down(purge=True)  # an interrupted run leaves containers on its disks
    lab.up(LabSpec(name, racks=1, gpus=2))
    try:
        while (case := crashes.take()) is not None:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                began = time.monotonic()
                place = broken = None
                cluster = Cluster(lab, Path(folder))
                try:
                    place = SCENARIOS[case[0]](cluster, case[1]).place
                    check_invariants(cluster)
                except Exception:  # noqa: BLE001 (whatever it is, it is a finding)
                    broken = traceback.format_exc()
                    _clean(cluster)
                crashes.note(*case, place, broken, time.monotonic() - began)
    finally:
        lab.down(purge=True)


def _clean(cluster: Cluster) -> None:
    """Remove leftovers after a broken promise, so that they do not affect the next crash."""
    (cluster.home / "state-of-a-broken-promise").touch()
    for job in [entry.name for entry in (cluster.home / "jobs").glob("j-*")]:
        cluster.gpurun("cancel", "--no-wait", job)
    time.sleep(10)
    for host in cluster.lab.hosts:
        forget = "docker ps -aq --filter label=gpurun.job | xargs -r docker rm -f; rm -rf ~train/.gpurun"
        cluster.lab.run(host.name, ["sh", "-c", forget])


def show(tally: dict[str, Tally]) -> None:
    print(f"\n{'victim':40} {'crashes':>8} {'places':>7} {'broken':>7} {'s each':>7}")
    for name, found in tally.items():
        each = found.took_s / max(1, found.crashes + found.lived)
        print(f"{name:40} {found.crashes:8} {len(found.places):7} {len(found.broken):7} {each:7.1f}")
    total = [sum(tally.crashes for tally in tally.values()), len(set().union(*(t.places for t in tally.values())))]
    print(f"{'all':40} {total[0]:8} {total[1]:7} {sum(len(t.broken) for t in tally.values()):7}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=300)
    parser.add_argument("--stress", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--labs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {}
    failed = False
    if options.stress:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = stress(Path(folder), PROCESSES, options.stress)
        result["stress"] = {"seconds": options.stress, **found}
        failed = any(found[key] for key in ("double_grants", "leaked_gpus", "unfinished_jobs", "tracebacks"))
        for key, value in found.items():
            print(f"  {key:20} {value:>8}", flush=True)
    if options.crashes:
        tally = crash_all(options.crashes, options.labs)
        show(tally)
        failed |= any(each.broken for each in tally.values())
        result["crashes"] = {
            name: {"crashes": t.crashes, "places": len(t.places), "broken": t.broken} for name, t in tally.items()
        }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

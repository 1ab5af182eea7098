"""Cut the head's power, and check gpurun's promises on every state directory that may result.

    python benchmarks/bench_power.py [--states 3000] [--ext4 40] [--seed 1] [--json FILE]

states  real processes submit, cancel, cordon, run and end gangs, and are killed; strace records every change of a
        file. The states that a file system may have after a power cut follow from that: unsynced data is there,
        lost, torn or zeros, in any combination (tests/power/power_disk.py). On each state, commands run as
        after a boot
ext4    the same work on a real ext4, on a loop device, which the kernel shuts down at a random moment. Half of the
        runs use the weakest mount options (data=writeback,noauto_da_alloc,commit=300). Needs root

After each: no file is damaged, no GPU is in two leases, every container's GPUs are leased to its job, and no
acknowledged submission, cancel, cordon, checkpoint or log line is lost. After some commands every job has ended
correctly, nothing is left on a host, and all GPUs can be leased. Exits with 1 if one of these promises was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "power"))

import power_boot
import power_disk
import power_ext4
import power_recording
import power_work

JOBS = 12
PER_RECORDING = 600
"""The most states that are booted per recording. A new recording has other races."""


@dataclass
class Tally:
    """Counts of tried states, and the broken promises."""

    recordings: int = 0
    operations: int = 0
    syncs: int = 0
    derived: int = 0
    booted: int = 0
    leases: int = 0
    containers: int = 0
    broken: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def note(self, verdict: power_boot.Verdict, where: str) -> None:
        self.booted += 1
        self.leases += verdict.leases
        self.containers += verdict.boxes
        for what in verdict.broken:
            self.broken.append(f"{where}: {what}")
            print(f"BROKEN {where}: {what}", flush=True)


def derive(wanted: int, seed: int) -> Tally:
    """Boot from at least this many derived states."""
    tally, began = Tally(), time.monotonic()
    while tally.booted < wanted:
        with tempfile.TemporaryDirectory(dir=_fast()) as folder:
            _one_recording(Path(folder), seed + tally.recordings, min(PER_RECORDING, wanted - tally.booted), tally)
        print(f"  {tally.booted} of {wanted} states, {len(tally.broken)} broken", flush=True)
    tally.took_s = time.monotonic() - began
    return tally


def _one_recording(place: Path, seed: int, wanted: int, tally: Tally) -> None:
    root, inventory = place / "root", place / "inventory.yaml"
    root.mkdir()
    argv = power_work.argv(root / "state", root / "world", seed, JOBS)
    environ = power_work.environ(root / "state", inventory)
    operations = power_recording.record(argv, root, place / "strace", environ)
    os.environ["GPURUN_INVENTORY"] = str(inventory)
    found = power_disk.distinct(power_disk.Disk(operations, exact=["world"], seed=seed).crashes())
    tally.recordings += 1
    tally.operations += len(operations)
    tally.syncs += Counter(op.kind for op in operations)["sync"]
    tally.derived += len(found)
    chosen = random.Random(seed).sample(found, min(wanted, len(found)))
    for crash, verdict in power_boot.boots(chosen, place):
        tally.note(verdict, f"seed {seed}, cut after {crash.at}, lost {crash.lost}, bytes {crash.bytes_are}")


def cut_ext4(wanted: int, seed: int) -> Tally:
    """Cut a real file system's power this many times."""
    tally, began, chance = Tally(), time.monotonic(), random.Random(seed)
    power_boot.warm()
    for number in range(wanted):
        after_s, options = chance.uniform(0.2, 2.0), power_ext4.OPTIONS[number % len(power_ext4.OPTIONS)]
        with tempfile.TemporaryDirectory(dir=_fast()) as folder:
            power_ext4.cut(Path(folder), seed + number, after_s, options)
            os.environ["GPURUN_INVENTORY"] = str(Path(folder) / "inventory.yaml")
            tally.note(power_boot.boot(Path(folder)), f"ext4 {options}, seed {seed + number}, after {after_s:.2f} s")
    tally.took_s = time.monotonic() - began
    return tally


def _fast() -> str | None:
    """Return a folder in memory, because the speed of this machine's disk does not matter."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def show(tallies: dict[str, Tally]) -> None:
    columns = ("recordings", "operations", "syncs", "derived", "booted", "leases", "containers", "broken", "took_s")
    print(f"\n{'':8}" + "".join(f"{name:>12}" for name in columns))
    for name, tally in tallies.items():
        values = [len(tally.broken) if column == "broken" else getattr(tally, column) for column in columns]
        print(f"{name:8}" + "".join(f"{value:12.0f}" for value in values))


def can_run(part: str, module: ModuleType) -> bool:
    """Return True if the module can run here; else print its requirements."""
    if module.available():
        return True
    print(f"{part}: left out: {module.NEEDS}", file=sys.stderr)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=3000)
    parser.add_argument("--ext4", type=int, default=40, metavar="CUTS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tallies = {}
    if options.states and can_run("states", power_recording):
        tallies["derived"] = derive(options.states, options.seed)
    if options.ext4 and can_run("ext4", power_ext4):
        tallies["ext4"] = cut_ext4(options.ext4, options.seed)
    show(tallies)
    if options.json:
        options.json.write_text(json.dumps({name: vars(tally) for name, tally in tallies.items()}, indent=1))
    return int(any(tally.broken for tally in tallies.values()) or not tallies)


if __name__ == "__main__":
    sys.exit(main())

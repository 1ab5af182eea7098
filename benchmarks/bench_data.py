"""Measure copying a data set to hosts of a lab: time, and bytes that the head sends.

    python benchmarks/bench_data.py [--mib 2048] [--racks 3] [--hosts 3]

One host of the lab joins later and gets the set from a neighbour.
Bytes are counted at the head's network interface, headers and SSH included. Needs root, Linux and Docker's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpurun.content.data import read_folder
from gpurun.content.staging import StageReport, Staging, stage
from gpurun.inventory.read import load_inventory
from gpurun.lab import Lab, LabSpec, network
from gpurun.remote import Fleet
from gpurun.supervisor.links import target_of

MIB = 1 << 20
FILES = 512
RESULTS: dict[str, float] = {}


def note(name: str, value: float, unit: str = "", goal: str = "") -> None:
    """Print one figure, and keep it for the JSON at the end."""
    RESULTS[name] = round(value, 4)
    print(f"  {name:56} {value:>10.4g} {unit:6} {goal}", flush=True)


def make(top: Path, mib: int) -> None:
    """Write `FILES` files with random bytes, and a thousand small files."""
    (top / "small").mkdir(parents=True)
    for number in range(FILES):
        (top / f"{number:04}.bin").write_bytes(os.urandom(mib * MIB // FILES))
    for number in range(1000):
        (top / f"small/{number}").write_bytes(os.urandom(100))


def timed(call: Callable[[], StageReport], lab: str) -> tuple[StageReport, float, int]:
    """Return the report, the seconds, and the bytes that the head sent meanwhile."""
    before, began = network.traffic(lab)["head"].from_bytes, time.monotonic()
    report = call()
    assert not report.failed, report.failed
    return report, time.monotonic() - began, network.traffic(lab)["head"].from_bytes - before


def measure(top: Path, lab: Lab) -> None:
    """Copy to all hosts except one, copy again, then copy to the last host."""
    began = time.monotonic()
    tree = read_folder(top)
    note("digest, nothing known", time.monotonic() - began, "s")
    began = time.monotonic()
    tree = read_folder(top)
    note("digest again, nothing changed", time.monotonic() - began, "s")
    inventory = load_inventory(lab.inventory)
    names = [host.name for host in inventory.hosts]
    with Fleet.open([target_of(host, inventory) for host in inventory.hosts]) as fleet:
        assert not fleet.failures, fleet.failures
        how = Staging(fleet, inventory, quotas=dict.fromkeys(names, 2 * tree.size))
        report, took_s, sent = timed(lambda: stage(tree.digest, tree, names[:-1], how), lab.name)
        note(f"to {len(report.hosts)} hosts", took_s, "s")
        note("copies that the head sent", sent / tree.size, "", "≤ 1.2")
        report, took_s, sent = timed(lambda: stage(tree.digest, tree, names[:-1], how), lab.name)
        note("second time", took_s, "s")
        note(
            "bytes of data that hosts got the second time", sum(each.bytes_received for each in report.hosts), "B", "0"
        )
        note("bytes that the head sent the second time", sent, "B")
        report, took_s, sent = timed(lambda: stage(tree.digest, tree, names[-1:], how, neighbours=names[:-1]), lab.name)
        note("a host that joins", took_s, "s")
        note("copies that the head sent to it", sent / tree.size, "", "0 but for the entries")


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--racks", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=3)
    options = parser.parse_args()
    lab = Lab("bdata")
    lab.down(purge=True)
    try:
        lab.up(LabSpec("bdata", racks=options.racks, hosts=options.hosts, disk_mib=4 * options.mib + 2048))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            make(Path(folder) / "data", options.mib)
            measure(Path(folder) / "data", lab)
    finally:
        lab.down(purge=True)
    print(json.dumps(RESULTS))


if __name__ == "__main__":
    main()

"""Measure copying a job's outputs to the head, compared with `rsync` over ssh on the same link in the same run.

    python benchmarks/bench_outputs.py [--only trees,big,small,hole] [--trees 1000] [--mib 8192] [--files 100000]

trees  generated folders that change during the copy, on one host and on two: the head has the final files
big    a few big files through a link of 1 Gbit/s; --mib is their sum
small  many files of 0 to 4 KiB, then again after 1 % of them changed
hole   one file of 20 GiB with 1 GiB of data in it

gpurun's copy is on disk when it ends, rsync's in memory. So rsync is measured both alone and with `sync -f`.
Small files go to a new ext4 file system in a file. An ext4 without a journal checks each inode that was freed in the
last minute whenever it creates a file, so removing one round's copy made the next round up to five times slower.
Only ratios are meaningful: everything here shares one machine. Needs root, Linux, Docker's packages and Debian's rsync
(.ci/install-packages installs it). Exits with 1 if a tree was not copied.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "supervisor"))

import outputs_trees
from ship_peers import CIPHER

from gpurun.inventory.read import load_inventory
from gpurun.jobs.folder import JobFolder
from gpurun.lab import Lab, LabSpec, host, network
from gpurun.remote import Fleet
from gpurun.state.paths import StatePath
from gpurun.supervisor.links import target_of
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.outputs import copy_outputs

NAME, JOB = "boutputs", "j-00000001"
LINK_BPS = 1_000_000_000
MIB = 1 << 20
HOLE_BYTES, DATA_BYTES = 20 << 30, 1 << 30
DISK_BYTES = 8 << 30
SHARES = (0.5, 0.25, 0.15, 0.1)
"""The share of each big file in their total size."""
RESULTS: dict[str, object] = {}


def note(name: str, value: float | str, unit: str = "", goal: str = "") -> None:
    """Print one figure, and keep it for the JSON at the end."""
    RESULTS[name] = value
    shown = f"{value:.3g}" if isinstance(value, float) else value
    print(f"  {name:58} {shown:>8} {unit:6} {goal}", flush=True)


# -- trees ------------------------------------------------------------------------------------------------------------


def one_tree(case: tuple[str, int]) -> str:
    """Return the errors of one seed's copy; empty if it is correct."""
    kind, seed = case
    folder = tempfile.mkdtemp(prefix="gpurun-trees-")
    try:
        getattr(outputs_trees, kind)(Path(folder), seed)
    except Exception:  # noqa: BLE001 (whatever it is, it is a finding)
        return f"{kind} {seed}: {traceback.format_exc()}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def trees(count: int, first: int) -> bool:
    """Return whether every copy is correct."""
    print(f"trees: {count} of one host, {count} of two, changed while they are copied")
    cases = [(kind, seed) for seed in range(first, first + count) for kind in ("of_one_host", "of_two_hosts")]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        wrong = []
        for done, said in enumerate(pool.imap_unordered(one_tree, cases), 1):
            if said:
                wrong.append(said)
                print(said, flush=True)
            if done % 100 == 0:
                print(f"  {done} of {len(cases)}", file=sys.stderr, flush=True)
    note("generated trees, of one host and of two", str(len(cases)))
    note("trees that the head's copy is not equal to", str(len(wrong)), "", "0")
    return not wrong


# -- one host behind a link -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The cost of one copy: wall seconds, CPU seconds of the head and of the host, bytes over the link."""

    wall_s: float
    head_s: float
    host_s: float
    sent: int


class Host:
    """A host of a lab behind a link, its folder of outputs, and an open connection."""

    def __init__(self, lab: Lab, fleet: Fleet, scratch: Path) -> None:
        (self.name,) = (each.name for each in lab.hosts)
        self.outputs = lab.folder / "hosts" / self.name / "disk/home/train/.gpurun/outputs" / JOB
        self.scratch = scratch
        self._lab = lab
        self._fleet = fleet

    def give(self) -> None:
        """Give the outputs to the host's user."""
        owner = self.outputs.parents[2].stat().st_uid
        subprocess.run(["chown", "-R", f"{owner}:{owner}", str(self.outputs.parents[1])], check=True)

    def clear(self) -> None:
        for folder in (self.outputs, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def head(self, name: str) -> SimpleNamespace:
        """Return a job without outputs on the head."""
        (self.scratch / name / JOB).mkdir(parents=True)
        folder = JobFolder(StatePath(self.scratch) / name / JOB)
        return SimpleNamespace(
            links=SimpleNamespace(agent=self._fleet.agents.__getitem__, each=self._fleet.map), folder=folder,
            outputs=HeadCopy(folder), members=(self.name,), lease=SimpleNamespace(job=JOB),
            spec=SimpleNamespace(min_gpus=None),
        )  # fmt: skip

    def gpurun(self, job: SimpleNamespace) -> Cost:
        """Copy everything. Ends the program with gpurun's own words if something does not fit on the head's disk."""

        def copy() -> None:
            if unfit := copy_outputs(job):
                raise SystemExit(f"{unfit[0].words}; the copies need about 4 times --mib on this disk")

        return self._cost(copy, resource.RUSAGE_SELF)

    def rsync(self, to: Path) -> Cost:
        ssh = f"ssh -F {self._lab.ssh_config} -c {CIPHER}"
        argv = ["rsync", "-aHS", "--delete", "-e", ssh, f"{self.name}:.gpurun/outputs/{JOB}/", f"{to}/"]
        return self._cost(lambda: subprocess.run(argv, check=True), resource.RUSAGE_CHILDREN)

    def _cost(self, copy: Callable[[], object], whose: int) -> Cost:
        subprocess.run(["sync"], check=True)
        before = (_cpu_s(resource.getrusage(whose)), self._host_cpu_s(), self._sent())
        began = time.monotonic()
        copy()
        wall_s = time.monotonic() - began
        after = (_cpu_s(resource.getrusage(whose)), self._host_cpu_s(), self._sent())
        return Cost(wall_s, after[0] - before[0], after[1] - before[1], after[2] - before[2])

    def _sent(self) -> int:
        return network.traffic(self._lab.name)[self.name].from_bytes

    def _host_cpu_s(self) -> float:
        """Return CPU seconds of the host's processes, including reaped processes."""
        ticks = 0
        for process in host.processes(self._lab.hosts[0].netns):
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


@contextmanager
def host_behind_link() -> Iterator[Host]:
    lab = Lab(NAME)
    lab.down(purge=True)
    lab.up(LabSpec(NAME, racks=1, hosts=1, host_link_bps=LINK_BPS, rack_uplink_bps=LINK_BPS))
    try:
        inventory = load_inventory(lab.inventory)
        with (
            Fleet.open([target_of(each, inventory) for each in inventory.hosts]) as fleet,
            tempfile.TemporaryDirectory(prefix="gpurun-outputs-") as folder,
        ):
            yield Host(lab, fleet, Path(folder) / "head")
    finally:
        lab.down(purge=True)


@contextmanager
def new_disk(at: Path) -> Iterator[None]:
    """Yield a new, empty file system with a journal."""
    with tempfile.TemporaryDirectory(prefix="gpurun-disk-") as folder:
        image = Path(folder) / "disk"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        features = "lazy_itable_init=0,lazy_journal_init=0"
        subprocess.run(["mkfs.ext4", "-q", "-F", "-i", "8192", "-E", features, str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", str(at)], check=True)


def compare(host: Host, rounds: int, what: str, goal: str) -> list[Cost]:
    """Copy the host's outputs to an empty head, with gpurun and with rsync in turn. Returns gpurun's cost."""
    ours, theirs, synced = [], [], []
    for number in range(rounds):
        ours.append(host.gpurun(host.head(f"{number}")))
        assert is_equal(host.outputs, host.scratch / f"{number}/{JOB}/outputs")
        shutil.rmtree(host.scratch / f"{number}")
        theirs.append(host.rsync(host.scratch / "rsync"))
        began = time.monotonic()
        subprocess.run(["sync", "-f", str(host.scratch)], check=True)
        synced.append(theirs[-1].wall_s + time.monotonic() - began)
        shutil.rmtree(host.scratch / "rsync")
    ratios = sorted(peer.wall_s / mine.wall_s for mine, peer in zip(ours, theirs, strict=True))
    durable = sorted(peer / mine.wall_s for mine, peer in zip(ours, synced, strict=True))
    note(f"{what}: gpurun", statistics.median(cost.wall_s for cost in ours), "s")
    note(f"{what}: rsync", statistics.median(cost.wall_s for cost in theirs), "s")
    note(f"{what}: rsync and sync -f", statistics.median(synced), "s")
    note(f"{what}: rsync / gpurun", statistics.median(ratios), "", goal)
    note(f"{what}: each round", " ".join(f"{ratio:.2f}" for ratio in ratios))
    note(f"{what}: rsync and sync -f / gpurun", statistics.median(durable))
    for name, part in (("head", "head_s"), ("host", "host_s")):
        mine, peer = (statistics.median(getattr(cost, part) for cost in costs) for costs in (ours, theirs))
        note(f"{what}: CPU of the {name}, gpurun and rsync", f"{mine:.1f} {peer:.1f}", "s")
    return ours


def is_equal(one: Path, other: Path) -> bool:
    """Return whether two folders have the same names and contents, according to diff(1)."""
    return subprocess.run(["diff", "-rq", "--no-dereference", one, other], check=False).returncode == 0


def big(host: Host, mib: int, rounds: int) -> None:
    print(f"big: {mib} MiB in {len(SHARES)} files, link {LINK_BPS // 1_000_000} Mbit/s")
    host.clear()
    block = os.urandom(64 * MIB)
    for number, share in enumerate(SHARES):
        left = int(mib * share) * MIB
        with (host.outputs / f"checkpoint-{number}.pt").open("wb") as file:
            while left > 0:
                file.write(number.to_bytes(4, "big") + left.to_bytes(8, "big"))
                left -= file.write(memoryview(block)[: min(left, len(block))])
    host.give()
    compare(host, rounds, "big", "≥ 0.9")


def small(host: Host, files: int, rounds: int) -> None:
    print(f"small: {files} files of 0 to 4 KiB, link {LINK_BPS // 1_000_000} Mbit/s")
    host.clear()
    chance, paths = random.Random(1), []
    for number in range(files):
        path = host.outputs / f"epoch-{number // 1000:03}" / f"sample {number}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(chance.randbytes(chance.randrange(4096)))
        paths.append(path)
    host.give()
    with new_disk(host.scratch):
        compare_small(host, rounds, paths, chance)


def compare_small(host: Host, rounds: int, paths: Sequence[Path], chance: random.Random) -> None:
    """Copy everything, then repeatedly copy the changes: 1 % of the files."""
    firsts = compare(host, rounds, "small", "≥ 1")
    job = host.head("again")
    firsts.append(host.gpurun(job))
    seconds, rsyncs = [], []
    host.rsync(host.scratch / "rsync")
    for _ in range(rounds):
        for path in chance.sample(paths, len(paths) // 100):
            path.write_bytes(chance.randbytes(2048))
        seconds.append(host.gpurun(job))
        assert is_equal(host.outputs, job.folder.outputs)
        rsyncs.append(host.rsync(host.scratch / "rsync"))
    second_s = statistics.median(cost.wall_s for cost in seconds)
    note("small, 1 % changed: gpurun", second_s, "s")
    note("small, 1 % changed: rsync", statistics.median(cost.wall_s for cost in rsyncs), "s")
    first_s = statistics.median(cost.wall_s for cost in firsts)
    note("small: first copy / copy of 1 %", first_s / second_s, "", "≥ 5")
    for name, part in (("head", "head_s"), ("host", "host_s")):
        first, second = (statistics.median(getattr(cost, part) for cost in costs) for costs in (firsts, seconds))
        note(f"small: CPU of the {name}, first copy and copy of 1 %", f"{first:.2f} {second:.2f}", "s")


def hole(host: Host) -> None:
    print(f"hole: one file of {HOLE_BYTES >> 30} GiB, {DATA_BYTES >> 30} GiB of data in it")
    host.clear()
    piece, pieces = os.urandom(16 * MIB), DATA_BYTES // (16 * MIB)
    with (host.outputs / "memory.bin").open("wb") as file:
        file.truncate(HOLE_BYTES)
        for number in range(pieces):
            file.seek(number * (HOLE_BYTES // pieces))
            file.write(piece)
    host.give()
    job = host.head("hole")
    cost = host.gpurun(job)
    copy = job.folder.outputs / "memory.bin"
    assert copy.stat().st_size == HOLE_BYTES
    note("hole: gpurun", cost.wall_s, "s")
    note("hole: bytes over the link / data", cost.sent / DATA_BYTES, "", "≤ 1.05")
    note("hole: bytes on the head's disk / data", copy.stat().st_blocks * 512 / DATA_BYTES, "", "≤ 1.05")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="trees,big,small,hole")
    parser.add_argument("--trees", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--mib", type=int, default=8192)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    chosen = set(options.only.split(","))
    if chosen - {"trees"} and shutil.which("rsync") is None:
        sys.exit("rsync is not installed: apt-get install rsync")
    right = "trees" not in chosen or trees(options.trees, options.first_seed)
    if chosen - {"trees"}:
        with host_behind_link() as host:
            if "big" in chosen:
                big(host, options.mib, options.rounds)
            if "small" in chosen:
                small(host, options.files, options.rounds)
            if "hole" in chosen:
                hole(host)
    print(json.dumps(RESULTS, indent=2))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

"""Measure loading, reloading and editing an inventory; check that edits keep unrelated lines.

    python benchmarks/bench_inventory.py [--edits 200] [--seconds 10]

Times are CPU seconds of this process, the median of several rounds, so that a busy machine does not blur them;
whole commands are measured as CPU seconds of their process. Needs no lab.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpurun.inventory.change import Author, InventoryFile
from gpurun.inventory.edit import AddHosts, Edit, RemoveHosts, SetFields, apply, parse_settings
from gpurun.inventory.hostset import expand
from gpurun.inventory.read import load_inventory, parse_inventory

HEAD = """\
version: 1
defaults: {user: train, fabric: roce25}  # everybody
fabrics:
  roce25: {kind: roce, interface: ens1f0, hcas: [mlx5_0], traffic_class: 106}
racks:
"""
FLOW_RACK = """\
  rRACK: {defaults: {gpus: 4, generation: pascal}, hosts: {"gpu-rRACK-[01-16]": { },  "extra-RACK": {gpus:  2}}}  # RACK
"""
BLOCK_RACK = """\
  rRACK:
    defaults: {generation: volta, gpus: 8}
    hosts:
      'gpu-rRACK-[01-08]':   # first half of RACK
        gpus:   8
        # why not
        port: 22

      gpu-rRACK-[09-16]: { labels: {row: a} } # second half of RACK
      extra-RACK: {}
"""
ROUNDS = 7


def folded(hosts: int) -> str:
    """Racks of 16 hosts, a line each."""
    racks = [
        f'  r{rack}: {{defaults: {{generation: pascal, gpus: 4}}, hosts: {{"gpu-r{rack}-[01-16]": {{}}}}}}  # {rack}\n'
        for rack in range(hosts // 16)
    ]
    return HEAD + "".join(racks)


def written_out(hosts: int) -> str:
    """A line for every host, each with its own fields."""
    lines = [HEAD]
    for number in range(hosts):
        if number % 100 == 0:
            lines.append(f"  r{number // 100}:\n    hosts:\n")
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        lines.append(f"      gpu-{number:05}: {{generation: pascal, gpus: 4, address: {address}}}  # slot {number}\n")
    return "".join(lines)


def cpu_s(do: Callable[[], object]) -> float:
    """The median of ROUNDS."""
    took = []
    for _ in range(ROUNDS):
        began = time.process_time()
        do()
        took.append(time.process_time() - began)
    return statistics.median(took)


def command_cpu_s(*argv: str) -> float:
    """Return CPU seconds of a gpurun command, the median of ROUNDS. A first, uncounted run fills caches."""
    took = []
    for _ in range(ROUNDS + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "gpurun", *argv], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(took[1:])


def commented(random_: random.Random) -> str:
    """Return a realistic file: comments, blank lines, several styles, ranges and single hosts."""
    lines = ["# our cluster\n", *HEAD.splitlines(keepends=True)]
    for rack in range(8):
        lines.append(f"  # rack {rack}, {random_.choice(['row A', 'row B', 'spare'])}\n")
        lines.append((FLOW_RACK if random_.random() < 0.5 else BLOCK_RACK).replace("RACK", str(rack)))
    return "".join(lines)


def random_edit(random_: random.Random, names: list[str], number: int) -> tuple[Edit, set[str]]:
    """Return a random edit, and the hosts it names."""
    hosts = tuple(random_.sample(names, random_.choice([1, 1, 2, 5])))
    kind = random_.randrange(4)
    if kind == 0:
        return RemoveHosts(hosts), set(hosts)
    if kind == 1:
        return SetFields(hosts, parse_settings([f"gpus={random_.randint(1, 16)}"])), set(hosts)
    if kind == 2:
        return SetFields(hosts, parse_settings([f"labels.batch=b{number}"])), set(hosts)
    return AddHosts(
        expand(f"new-{number}-[1-4]"), f"r{random_.randrange(10)}", parse_settings(["gpus=1", "generation=x"])
    ), set()


def unrelated_lines_changed(edits: int) -> tuple[int, int, float]:
    """Return counts over generated edits: unrelated lines that changed, wrong results; and CPU seconds per edit."""
    random_, source = random.Random(7), Path("/inventory.yaml")
    unrelated = wrong = 0
    took = 0.0
    for number in range(edits):
        text = commented(random_)
        before = parse_inventory(text.encode(), source)
        edit, touched = random_edit(random_, [host.name for host in before.hosts], number)
        began = time.process_time()
        after = apply(text.encode(), source, edit).decode()
        took += time.process_time() - began
        kept = set(after.splitlines())
        for line in text.splitlines():
            if line not in kept and not may_change(line, edit, touched):
                unrelated += 1
        found = parse_inventory(after.encode(), source).by_name
        wrong += any(found.get(name) != host for name, host in before.by_name.items() if name not in touched)
    return unrelated, wrong, took / edits


def may_change(line: str, edit: Edit, touched: set[str]) -> bool:
    """Return whether a line is about hosts of the edit, or is the flow mapping of a rack that grows."""
    rack = line.strip().partition(":")[0].strip("'\"")
    if isinstance(edit, AddHosts):
        return rack == edit.rack
    numbers = {name.split("-")[1].removeprefix("r") for name in touched}
    inside = line.strip() in ("gpus:   8", "port: 22")
    return inside or any(f"gpu-r{number}-" in line or f"extra-{number}" in line for number in numbers)


def _edit_until(path: Path, home: Path, name: str, until: float, done: multiprocessing.Queue) -> None:
    file, count = InventoryFile(path, home), 0
    while time.monotonic() < until:
        count += 1
        edit = AddHosts((f"{name}-{count}",), name, parse_settings(["gpus=1", "generation=x"]))
        file.commit(lambda data, edit=edit: apply(data, path, edit), Author(name, "bench", time.time()))
    done.put((name, count))


def lost_changes(seconds: float, folder: Path) -> tuple[int, int]:
    """Return changes made and changes lost when two processes edit one file as fast as they can."""
    path, home = folder / "contended.yaml", folder / "home"
    path.write_text(folded(64))
    done: multiprocessing.Queue = multiprocessing.Queue()
    until = time.monotonic() + seconds
    workers = [
        multiprocessing.Process(target=_edit_until, args=(path, home, name, until, done)) for name in ("one", "two")
    ]
    for worker in workers:
        worker.start()
    counts = dict(done.get() for _ in workers)
    for worker in workers:
        worker.join()
    names = load_inventory(path).by_name
    lost = sum(f"{name}-{n}" not in names for name, count in counts.items() for n in range(1, count + 1))
    return sum(counts.values()), lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(XDG_CACHE_HOME=f"{folder}/cache", GPURUN_HOME=f"{folder}/state", HOME=name)
        rows = list(measure(folder, arguments.edits, arguments.seconds))
    width = max(len(row[0]) for row in rows)
    print(f"{'what':{width}}  {'measured':>12}  {'wanted':>12}")
    for what, measured, wanted in rows:
        print(f"{what:{width}}  {measured:>12}  {wanted:>12}")


def measure(folder: Path, edits: int, seconds: float):
    texts = {"folded": folded(10_000), "written out": written_out(10_000)}
    for kind, wanted in (("folded", "≤ 150 ms"), ("written out", "≤ 1000 ms")):
        path = folder / f"{kind}.yaml"
        path.write_text(texts[kind])
        data = path.read_bytes()
        found = parse_inventory(data, path)
        assert len(found.hosts) == 10_000
        yield (
            f"load 10,000 hosts, {kind}",
            f"{cpu_s(lambda d=data, p=path: parse_inventory(d, p)) * 1e3:.0f} ms",
            wanted,
        )
        time.sleep(0.2)
        load_inventory(path)
        yield f"load 10,000 hosts, {kind}, cached", f"{cpu_s(lambda p=path: load_inventory(p)) * 1e3:.0f} ms", ""
    thousand = folder / "thousand.yaml"
    thousand.write_text(written_out(1_000))
    relabel = SetFields(expand("gpu-[00100-00199]"), parse_settings(["labels.row=b"]))
    for hosts in (1_000, 10_000):
        text = written_out(hosts).encode()
        took = cpu_s(lambda text=text: apply(text, thousand, relabel))
        yield f"relabel 100 of {hosts:,} hosts, written out", f"{took:.2f} s", ""
    time.sleep(0.2)
    yield "gpurun --help, CPU", f"{command_cpu_s('--help') * 1e3:.0f} ms", "≤ 300 ms"
    yield (
        "gpurun status --json of 1,000 hosts, CPU",
        f"{command_cpu_s('status', '--json', '-i', str(thousand)) * 1e3:.0f} ms",
        "≤ 300 ms",
    )
    yield (
        "gpurun inventory list of 1,000 hosts, CPU",
        f"{command_cpu_s('inventory', 'list', '-i', str(thousand)) * 1e3:.0f} ms",
        "",
    )
    unrelated, wrong, each = unrelated_lines_changed(edits)
    yield f"{edits} generated edits: unrelated lines changed", str(unrelated), "0"
    yield f"{edits} generated edits: wrong models", str(wrong), "0"
    yield "one edit of such a file", f"{each * 1e3:.0f} ms", ""
    made, lost = lost_changes(seconds, folder)
    yield f"two processes, {seconds:g} s: changes made", str(made), ""
    yield f"two processes, {seconds:g} s: changes lost", str(lost), "0"


if __name__ == "__main__":
    main()

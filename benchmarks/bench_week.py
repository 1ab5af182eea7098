"""Simulate a supervisor's week: memory, descriptors and threads after many joins of hosts and many transfers.

    python benchmarks/bench_week.py [--joins 2000] [--ships 300]

joins  a host joins an elastic gang's links, receives the outputs, sends its own, and leaves; hosts take turns
ships  a new blob of 1 MiB goes through a chain of three hosts, as an image's layer does (TLS, verified by chunk)

The hosts are real agents over pipes, and the code of the head is what a supervisor runs: links, outputs, relay.
Docker and SSH are not part of it. Reconnects over SSH have their own test (docs/decisions/0022). Exits with 1 if
memory, descriptors or threads grow by more than 5 % between two fifths of the way and the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "supervisor"))

from local_agents import Hosts
from outputs_world import outputs_job

from gpurun.content.chain import Want, chain
from gpurun.content.relay import Relay
from gpurun.content.seats import Options
from gpurun.content.store import LayerStore
from gpurun.supervisor.links import Links
from gpurun.supervisor.outputs.outputs import collect_leaving, copy_outputs, send_outputs

MIB = 1 << 20
MOST_GROWTH = 1.05
NAMES = tuple(f"h{number}" for number in range(8))


@dataclass(frozen=True)
class Held:
    """The resources that this process holds while it is idle."""

    rss_kib: int
    descriptors: int
    threads: int


def held() -> Held:
    gc.collect()
    found = [_held_now() for _ in range(10) if not time.sleep(0.1)]
    return Held(*(min(getattr(each, name) for each in found) for name in ("rss_kib", "descriptors", "threads")))


def _held_now() -> Held:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return Held(int(line.split()[1]), len(os.listdir("/proc/self/fd")), threading.active_count())


class LocalLinks(Links):
    """A supervisor's links to agents over pipes."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(None, ())  # type: ignore[arg-type]
        self._hosts = hosts

    def join(self, host: str) -> None:
        """Connect a host, like `add` and `open`."""
        self.targets = {**self.targets, host: None}  # type: ignore[dict-item]
        fleet = self._hosts.fleet(host)
        self._hosts.fleets.remove(fleet)
        with self._lock:
            self.fleet.absorb(fleet)

    def leave(self, host: str) -> None:
        """Disconnect a host that has left: stop its agent and forget the host."""
        self.cut([host], "it has left")
        self.drop([host])
        process = self._hosts.processes.pop(host)
        process.wait(20)
        for thread in threading.enumerate():  # its descriptor may be reused, and the thread must not read from it then
            if thread.name == f"agent {host}":
                thread.join(20)
        assert process.stdout
        process.stdout.close()


def joins(folder: Path, count: int) -> list[Held]:
    hosts = Hosts(folder)
    job = outputs_job(folder, hosts, *NAMES, elastic=True)
    for fleet in hosts.fleets:
        fleet.close()
    for process in hosts.processes.values():
        process.wait(20)
    hosts.fleets.clear()
    job.links = links = LocalLinks(hosts)
    job.hosts = job.members = (NAMES[0],)
    links.join(NAMES[0])

    def join(number: int) -> None:
        host = NAMES[1 + number % (len(NAMES) - 1)]
        links.join(host)
        job.members = (NAMES[0], host)
        job.hosts = (host,)
        send_outputs(job)
        job.host(host).mkdir(parents=True, exist_ok=True)
        (job.host(host) / f"of {host}").write_bytes(os.urandom(20_000))
        copy_outputs(job)
        job.members = (NAMES[0],)
        unbrought = collect_leaving(job, [host])
        assert not unbrought, unbrought
        links.leave(host)

    try:
        return at_fifths(count, join)
    finally:
        links.close()
        hosts.close()


def ships(folder: Path, count: int) -> list[Held]:
    hosts, store = Hosts(folder), LayerStore(folder)
    names = NAMES[:3]
    fleet = hosts.fleet(*names)

    def ship(_number: int) -> None:
        stored = store.put([os.urandom(MIB)])
        wants = [Want(name, "r1", (stored.digest,)) for name in names]
        relay = Relay(fleet, [chain(wants, {stored.digest: stored.size})], Options())
        try:
            relay.open()
            relay.announce(stored)
            while not relay.finished([stored.digest]):
                relay.step()
            assert not relay.failed, relay.failed
        finally:
            relay.close()
        for name in names:
            (hosts.spool(name) / stored.digest.partition(":")[2]).unlink(missing_ok=True)
        stored.path.unlink()

    try:
        return at_fifths(count, ship)
    finally:
        hosts.close()


def at_fifths(count: int, act: Callable[[int], object]) -> list[Held]:
    """Return the held resources after each fifth of the rounds."""
    found = []
    for number in range(count):
        act(number)
        if (number + 1) % (count // 5) == 0:
            found.append(held())
            print(f"    after {number + 1}: {found[-1]}", flush=True)
    return found


def growth(found: list[Held]) -> dict[str, float]:
    """Compare the end with two fifths of the rounds. The first rounds fill caches and the heaps of threads."""
    return {name: getattr(found[-1], name) / getattr(found[1], name) for name in ("rss_kib", "descriptors", "threads")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=2000)
    parser.add_argument("--ships", type=int, default=300)
    options = parser.parse_args()
    results = {}
    for name, act, count in (("ships", ships, options.ships), ("joins", joins, options.joins)):
        print(f"{name}: {count}", flush=True)
        with tempfile.TemporaryDirectory(prefix="gpurun-week-") as folder:
            results[name] = growth(act(Path(folder), count))
        print(f"  at the end, against two fifths of the way: {results[name]}", flush=True)
    print(json.dumps(results, indent=2))
    return int(any(ratio > MOST_GROWTH for found in results.values() for ratio in found.values()))


if __name__ == "__main__":
    sys.exit(main())

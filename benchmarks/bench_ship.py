"""Measure shipping an image, compared with other methods in the same lab and the same run.

    python benchmarks/bench_ship.py [--only transfer,nothing,first,change] [--image gpurun/train:tf2.15] [--mib 1700]

transfer  one blob to 16 hosts in 4 racks over slow links, against one plain copy to one host; bytes over each link
nothing   to 16 hosts that have the image
first     the whole image to 4 empty hosts, against `docker save | ssh docker load` and a registry
change    5 MiB more on top of it, against `docker save | ssh docker load`

--mib sets the image's size, by two more layers with this machine's own programs.
Only ratios are meaningful: everything here shares one machine.
Needs root, Linux, Docker's packages, and the training image.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ship_peers import Cluster, NoRegistry, plain_copy, push_pull, save_load

from gpurun.content.chain import Want, chain
from gpurun.content.relay import Relay
from gpurun.content.seats import options_for, rack_of
from gpurun.content.ship import ship
from gpurun.content.store import LayerStore, Stored
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import load_inventory
from gpurun.lab import Lab, LabSpec, network
from gpurun.remote import Fleet
from gpurun.supervisor.links import target_of

MIB = 1 << 20
BLOB_BYTES = 64 * MIB
SLOW_BPS = 100_000_000
ROUNDS = 3
RESULTS: dict[str, object] = {}


def note(name: str, value: float | str, unit: str = "", goal: str = "") -> None:
    """Print one figure, and keep it for the JSON at the end."""
    RESULTS[name] = value
    shown = f"{value:.3g}" if isinstance(value, float) else value
    print(f"  {name:48} {shown:>10} {unit:6} {goal}", flush=True)


@contextmanager
def lab_of(name: str, **options: int) -> Iterator[tuple[Lab, Inventory, Cluster]]:
    """Yield a lab; remove it with its disks afterwards."""
    lab = Lab(name)
    lab.down(purge=True)
    lab.up(LabSpec(name, **options))
    try:
        inventory = load_inventory(lab.inventory)
        assert inventory.docker_host
        yield lab, inventory, Cluster(inventory.docker_host, lab.ssh_config, [host.name for host in inventory.hosts])
    finally:
        lab.down(purge=True)


def fleet_of(inventory: Inventory) -> Fleet:
    return Fleet.open([target_of(host, inventory) for host in inventory.hosts])


def transfer_and_nothing(want: Callable[[str], bool]) -> None:
    """16 hosts in 4 racks on slow links."""
    with (
        lab_of("bship16", racks=4, hosts=4, host_link_bps=SLOW_BPS, rack_uplink_bps=SLOW_BPS) as (
            lab,
            inventory,
            cluster,
        ),
        fleet_of(inventory) as fleet,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert not fleet.failures
        if want("transfer"):
            transfer(lab, inventory, cluster, fleet, Path(folder))
        if want("nothing"):
            nothing(inventory, cluster, fleet)


def transfer(lab: Lab, inventory: Inventory, cluster: Cluster, fleet: Fleet, folder: Path) -> None:
    print(f"transfer: {BLOB_BYTES // MIB} MiB, 16 hosts in 4 racks, every link {SLOW_BPS // 1_000_000} Mbit/s")
    plain, chained, uplinks, sent = [], [], [], []
    for number in range(ROUNDS):
        stored = LayerStore(folder).put(os.urandom(MIB) for _ in range(BLOB_BYTES // MIB))
        plain.append(plain_copy(cluster, cluster.hosts[number], stored.path))
        before = network.traffic(lab.name)
        chained.append(through_chain(inventory, fleet, stored))
        after = network.traffic(lab.name)
        racks = {host.rack for host in inventory.hosts}
        uplinks += [(after[f"{rack}-up"].to_bytes - before[f"{rack}-up"].to_bytes) / stored.size for rack in racks]
        sent.append((after["head"].from_bytes - before["head"].from_bytes) / stored.size)
    packed = through_chain(inventory, fleet, LayerStore(folder).put(programs()))
    note("plain copy to one host", statistics.median(plain), "s")
    note("chain to 16 hosts", statistics.median(chained), "s")
    note("chain / plain copy", statistics.median(c / p for c, p in zip(chained, plain, strict=True)), "", "≤ 1.2")
    note("chain, programs instead of noise / plain copy", packed / statistics.median(plain), "", "≤ 1.2")
    note("most copies over a rack's uplink, headers included", max(uplinks), "", "≤ 1.02 of the layers' bytes")
    note("most copies the head sent, headers included", max(sent), "", "≤ 1.02 of the layers' bytes")


def programs() -> Iterator[bytes]:
    """Collect this many bytes of typical layer content: this machine's programs and libraries."""
    left = BLOB_BYTES
    for path in sorted(Path("/usr/lib").rglob("*.so*")) + sorted(Path("/usr/bin").iterdir()):
        if left and path.is_file() and not path.is_symlink():
            content = path.read_bytes()[:left]
            left -= len(content)
            yield content


def through_chain(inventory: Inventory, fleet: Fleet, stored: Stored) -> float:
    hosts = [host.name for host in inventory.hosts]
    wants = [Want(host, rack_of(inventory, host), (stored.digest,)) for host in hosts]
    began = time.monotonic()
    relay = Relay(fleet, [chain(wants, {stored.digest: stored.size})], options_for(inventory, hosts))
    try:
        relay.open()
        relay.announce(stored)
        while not relay.finished([stored.digest]):
            relay.step()
        took = time.monotonic() - began
        assert not relay.failed, relay.failed
        return took
    finally:
        relay.close()


def nothing(inventory: Inventory, cluster: Cluster, fleet: Fleet) -> None:
    print("nothing missing: 16 hosts, connections stand")
    options = {"inventory": inventory, "hosts": cluster.hosts, "docker_host": cluster.docker_host}
    ship("gpurun/tiny:1", fleet, **options)
    took = []
    for _ in range(5):
        began = time.monotonic()
        report = ship("gpurun/tiny:1", fleet, **options)
        took.append(time.monotonic() - began)
        assert {host.state for host in report.hosts} == {"present"}
    note("ship of what is there, 16 hosts", statistics.median(took), "s", "≤ 0.5")


def first_and_change(want: Callable[[str], bool], image: str, mib: int | None) -> None:
    """4 hosts with fast links, which share this machine's disk and cores."""
    with lab_of("bship4") as (lab, _, cluster), tempfile.TemporaryDirectory() as folder:
        environ = {**cluster.environ, "XDG_CACHE_HOME": f"{folder}/cache", "GPURUN_HOME": f"{folder}/home"}
        command = [sys.executable, "-m", "gpurun", "ship", "-i", str(lab.inventory), "--json"]
        image = grown_image(cluster, image, mib) if mib else image
        if want("first"):
            first(cluster, [*command, image], environ, image)
        if want("change"):
            bench_change(cluster, command, environ, image, Path(folder))
        if mib:
            subprocess.run(["docker", "rmi", image], env=cluster.environ, check=True, stdout=subprocess.DEVNULL)


def gpurun_ship(argv: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Return seconds of the whole command, and its peak memory in MiB."""
    began = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ)
    with peaks(lambda pid, _argv: pid == process.pid) as memory:
        out, _ = process.communicate()
        took = time.monotonic() - began
    assert process.returncode == 0 and {host["state"] for host in json.loads(out)["hosts"]} == {"done"}
    return took, memory.get(process.pid, 0.0)


def first(cluster: Cluster, argv: list[str], environ: dict[str, str], image: str) -> None:
    print(f"first time: {image}, {size_of(cluster, image) // MIB} MiB, to 4 hosts that have nothing")
    with peaks(lambda _pid, argv: b"-ISc" in argv) as agents:
        ours, memory = gpurun_ship(argv, environ)
    note("gpurun ship, nothing cached", ours, "s")
    note("memory of the head, at most", memory, "MiB", "≤ 64")
    note("memory of an agent, at most", max(agents.values(), default=0.0), "MiB", "≤ 64")
    cluster.everywhere("docker", "rmi", "-f", image)
    peer = save_load(cluster, image)
    note("docker save | ssh docker load, all hosts at once", peer, "s")
    note("save | load / gpurun, first time", peer / ours, "", "> 1")
    cluster.everywhere("docker", "rmi", "-f", image)
    try:
        peer = push_pull(cluster, image)
    except NoRegistry as error:
        note("registry on the head, ssh -R, docker pull", f"not measured: {error}")
        return
    note("registry on the head, ssh -R, docker pull", peer, "s")
    note("registry / gpurun, first time", peer / ours, "", "> 1")


@contextmanager
def peaks(wanted: Callable[[int, list[bytes]], bool]) -> Iterator[dict[int, float]]:
    """Record the peak MiB of every process that is `wanted` by pid and argv, during the block.

    Uses the kernel's peak value, not wait4(), which counts the parent's memory before exec as the child's.
    """
    found: dict[int, float] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError, IndexError):
                    if wanted(int(process.name), (process / "cmdline").read_bytes().split(b"\0")):
                        status = (process / "status").read_text()
                        found[int(process.name)] = int(status.split("VmHWM:")[1].split()[0]) / 1024

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def bench_change(cluster: Cluster, command: list[str], environ: dict[str, str], image: str, folder: Path) -> None:
    print(f"a change of 5 MiB on top of {image}, 4 hosts")
    subprocess.run([*command, image], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    ours, peer = [], []
    for number in range(ROUNDS):
        changed = changed_image(cluster, image, folder, f"gpurun/changed:{number}")
        ours.append(gpurun_ship([*command, changed], environ)[0])
        cluster.everywhere("docker", "rmi", "-f", changed)
        if number == 0:  # minutes each
            peer.append(save_load(cluster, changed))
            cluster.everywhere("docker", "rmi", "-f", changed)
        subprocess.run(["docker", "rmi", changed], env=cluster.environ, check=True, stdout=subprocess.DEVNULL)
    note("gpurun ship of a change, the whole command", statistics.median(ours), "s", "≤ 3")
    note("the same by docker save | ssh docker load", peer[0], "s")
    note("save | load / gpurun, a change", peer[0] / statistics.median(ours), "", "≥ 25")


def changed_image(cluster: Cluster, image: str, folder: Path, name: str) -> str:
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir()
    (context / "code.bin").write_bytes(os.urandom(5 * MIB))
    build(cluster, context, f"FROM {image}\nCOPY code.bin /code.bin\n", name)
    return name


def grown_image(cluster: Cluster, image: str, mib: int) -> str:
    """Return the image with two more layers, so that it has this many MiB."""
    missing = mib * MIB - size_of(cluster, image)
    files = (path for path in sorted(Path("/usr").rglob("*")) if path.is_file() and not path.is_symlink())
    name, lines = f"gpurun/grown:{mib}", [f"FROM {image}"]
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            left = missing // 2
            with tarfile.open(Path(folder) / f"{number}.tar", "w") as tar:
                while left > 0:
                    path = next(files)
                    tar.add(path)
                    left -= path.stat().st_size
            lines.append(f"ADD {number}.tar /more/{number}/")
        build(cluster, Path(folder), "\n".join(lines), name)
    return name


def size_of(cluster: Cluster, image: str) -> int:
    argv = ["docker", "image", "inspect", "-f", "{{.Size}}", image]
    return int(subprocess.run(argv, env=cluster.environ, check=True, stdout=subprocess.PIPE).stdout)


def build(cluster: Cluster, context: Path, dockerfile: str, name: str) -> None:
    (context / "Dockerfile").write_text(dockerfile)
    subprocess.run(
        ["docker", "build", "-q", "-t", name, str(context)],
        env={**cluster.environ, "DOCKER_BUILDKIT": "0"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="transfer,nothing,first,change")
    parser.add_argument("--image", default="gpurun/train:tf2.15")
    parser.add_argument("--mib", type=int)
    arguments = parser.parse_args()
    chosen = set(arguments.only.split(","))
    if chosen & {"transfer", "nothing"}:
        transfer_and_nothing(chosen.__contains__)
    if chosen & {"first", "change"}:
        first_and_change(chosen.__contains__, arguments.image, arguments.mib)
    print(json.dumps(RESULTS, indent=2))


if __name__ == "__main__":
    main()

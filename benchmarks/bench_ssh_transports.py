"""Compare the two SSH transports on an sshd of this machine: opening, one call, and a long stream.

    python benchmarks/bench_ssh_transports.py [--rounds 5] [--mib 1024]

The transports take turns. Only ratios are meaningful: the head, the sshd and the agent share one machine.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpurun.remote import Agent, Fleet, Target

MIB = 1 << 20
CALLS = 200
PIECE = bytes(MIB)
WAYS = ("paramiko", "system", "shared")
"""Paramiko; the machine's ssh, which logs in each time; and the machine's ssh over an open connection."""


@contextmanager
def own_sshd(folder: Path) -> Iterator[Path]:
    """Start an sshd on a high port. Its configuration reaches it as ``host``, and as ``shared`` over one connection."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port, public = random.randrange(10_000, 20_000), (folder / "host_key.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {public}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    (folder / "config").write_text(
        f"Host *\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/key\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known\n GlobalKnownHostsFile none\nHost shared\n ControlPath {folder}/s\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ["PATH"])
    with subprocess.Popen([str(sshd), "-D", "-e", "-f", f"{folder}/sshd_config"], stderr=subprocess.DEVNULL) as server:
        plain = ["ssh", "-F", f"{folder}/config"]
        opens = [*plain, "-o", "ControlMaster=auto", "-o", "ControlPersist=yes", "shared", "true"]
        while subprocess.run(opens, stderr=subprocess.DEVNULL, check=False).returncode:
            time.sleep(0.1)
        try:
            yield folder / "config"
        finally:
            subprocess.run([*plain, "-O", "exit", "shared"], capture_output=True, check=False)
            server.terminate()


def target(way: str, config: Path) -> Target:
    """Return the host as a target of this transport."""
    if way == "shared":
        return Target("shared", ssh_config=str(config), ssh="system")
    return Target("host", ssh_config=str(config), ssh=way)


def opened(where: Target) -> Fleet:
    """Start the host's agent."""
    fleet = Fleet.open([where])
    assert not fleet.failures, fleet.failures
    return fleet


def opening(where: Target) -> float:
    """Return seconds until the agent runs."""
    began_s = time.perf_counter()
    with opened(where):
        return time.perf_counter() - began_s


def calling(where: Target) -> float:
    """Return seconds of one call."""
    with opened(where) as fleet:
        return timed(lambda agent: [agent.call("files.stat", path="/") for _ in range(CALLS)], fleet) / CALLS


def timed(work: Callable[[Agent], object], fleet: Fleet) -> float:
    """Return seconds of some work with the host's only agent."""
    (agent,) = fleet.agents.values()
    began_s = time.perf_counter()
    work(agent)
    return time.perf_counter() - began_s


def sending(where: Target, mib: int, file: Path) -> float:
    """Return seconds to stream this much to the host."""
    with opened(where) as fleet:
        return timed(
            lambda a: list(a.stream("files.write", path=str(file), payload_in=(PIECE for _ in range(mib)))), fleet
        )


def fetching(where: Target, mib: int, file: Path) -> float:
    """Return seconds to read it back, in calls of 16 MiB."""
    step = 16 * MIB

    def work(agent: Agent) -> None:
        for offset in range(0, mib * MIB, step):
            agent.call("files.read", path=str(file), offset=offset, max_bytes=step)

    with opened(where) as fleet:
        return timed(work, fleet)


def main() -> None:
    """Print medians of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="g") as made, own_sshd(Path(made)) as config:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = made
        file = Path(made) / "stream"
        measures: dict[str, Callable[[Target], float]] = {
            "open an agent (ms)": lambda where: opening(where) * 1e3,
            "one call (ms)": lambda where: calling(where) * 1e3,
            f"send {args.mib} MiB (s)": lambda where: sending(where, args.mib, file),
            f"fetch {args.mib} MiB (s)": lambda where: fetching(where, args.mib, file),
        }
        for name, measure in measures.items():
            rounds = [{way: measure(target(way, config)) for way in WAYS} for _ in range(args.rounds)]
            medians = {way: statistics.median(one[way] for one in rounds) for way in WAYS}
            ratios = [statistics.median(one[way] / one["paramiko"] for one in rounds) for way in WAYS]
            said = ", ".join(
                f"{way} {medians[way]:.2f} (x {ratio:.2f})" for way, ratio in zip(WAYS, ratios, strict=True)
            )
            print(f"{name}: {said}", flush=True)
        with suppress(FileNotFoundError):
            file.unlink()


if __name__ == "__main__":
    main()

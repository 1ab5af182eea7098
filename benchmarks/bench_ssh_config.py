"""Measure resolving the SSH routes to an inventory's hosts: uncached, in the next command, in the same command.

python benchmarks/bench_ssh_config.py [HOSTS]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from gpurun.remote import Target
from gpurun.remote.route import resolve_all

SETTLED_S = 0.2


def measure(folder: Path, hosts: int) -> None:
    """Three passes in two processes, with a configuration of two files and a jump host."""
    config = folder / "config"
    (folder / "more.conf").write_text("Host gpu-*\n  User train\n  IdentityFile ~/.ssh/cluster\n")
    lines = [f"Host gpu-{i}\n  HostName 10.0.{i // 250}.{i % 250}\n" for i in range(hosts)]
    config.write_text(f"Include {folder}/*.conf\nHost gpu-*\n  ProxyJump bastion\n" + "".join(lines))
    time.sleep(SETTLED_S)
    for name in ("nobody asked yet", "the next command"):
        child = os.fork()
        if child == 0:
            passes(config, hosts, name)
            os._exit(0)
        os.waitpid(child, 0)


def passes(config: Path, hosts: int, name: str) -> None:
    """Resolve all hosts twice, in a process that has not done so before."""
    targets = [Target(f"gpu-{i}", ssh_config=str(config)) for i in range(hosts)]
    for what in (name, "  again in the same process"):
        before, began_s = os.times(), time.monotonic()
        assert len(resolve_all(targets)) == hosts
        took_s, after = time.monotonic() - began_s, os.times()
        cpu_s = sum(after[:4]) - sum(before[:4])
        print(f"{what}: {took_s:.2f} s, {cpu_s:.2f} s of CPU with its children", flush=True)


def main() -> None:
    """Measure in an empty folder with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = f"{folder}/cache"
        measure(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 1000)


if __name__ == "__main__":
    main()

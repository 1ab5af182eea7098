"""Probe many lab hosts: `gpurun inventory probe` against `pdsh -f 64` running the same zipapp.

    sudo apt-get install pdsh
    .venv/bin/python benchmarks/bench_probe.py --hosts 64

The hosts have the zipapp before the measurement of pdsh; gpurun sends its code every time. The runs alternate, so that
other load on the machine affects both. A lab host takes about 140 MB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpurun.lab.lab import Lab
from gpurun.lab.spec import LabSpec

REMOTE = "/tmp/gpurun-probe.pyz"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", type=int, default=64)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--lab", default="probe-bench")
    options.add_argument("--keep", action="store_true", help="leave the lab up")
    chosen = options.parse_args()
    if shutil.which("pdsh") is None:
        sys.exit("pdsh is not installed: apt-get install pdsh")
    lab = Lab(chosen.lab)
    started = time.monotonic()
    racks = 4 if chosen.hosts % 4 == 0 else 1
    lab.up(LabSpec(chosen.lab, racks=racks, hosts=chosen.hosts // racks, gpus=4, fabric="roce"))
    print(f"lab of {len(lab.hosts)} hosts up in {time.monotonic() - started:.0f} s", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = measure(lab, Path(folder), chosen.rounds)
    finally:
        if not chosen.keep:
            lab.down()
    print(json.dumps(report, indent=2))


def measure(lab: Lab, folder: Path, rounds: int) -> dict[str, object]:
    install(lab, folder / "probe.pyz")
    gpurun_s, pdsh_s = [], []
    for _ in range(rounds):
        gpurun_s.append(timed(lambda: with_gpurun(lab)))
        pdsh_s.append(timed(lambda: with_pdsh(lab)))
        print(f"gpurun {gpurun_s[-1]:.2f} s, pdsh {pdsh_s[-1]:.2f} s", file=sys.stderr)
    lab.cut(lab.hosts[0].name)
    dead_s = timed(lambda: with_gpurun(lab, "--timeout", "5s", expected=4))
    lab.heal(lab.hosts[0].name)
    ours, theirs = statistics.median(gpurun_s), statistics.median(pdsh_s)
    return {
        "hosts": len(lab.hosts),
        "gpurun_s": [round(one, 3) for one in gpurun_s],
        "pdsh_s": [round(one, 3) for one in pdsh_s],
        "gpurun_median_s": round(ours, 3),
        "pdsh_median_s": round(theirs, 3),
        "ratio": round(ours / theirs, 3),
        "gpurun_with_one_dead_host_and_5_s_timeout_s": round(dead_s, 3),
        "cores": os.cpu_count(),
    }


def install(lab: Lab, pyz: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "gpurun", "inventory", "probe", "--zipapp", str(pyz)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    for host in lab.hosts:
        lab.run(host.name, ["sh", "-c", f"cat > {REMOTE}"], user="train", stdin=pyz.read_bytes())


def timed(run: object) -> float:
    started = time.monotonic()
    run()  # type: ignore[operator]
    return time.monotonic() - started


def with_gpurun(lab: Lab, *extra: str, expected: int = 0) -> None:
    argv = [sys.executable, "-m", "gpurun", "inventory", "probe", "--inventory", str(lab.inventory), "--json", *extra]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == expected, done.stderr.decode()
    found = json.loads(done.stdout)["hosts"]
    assert len(found) == len(lab.hosts) - bool(expected)
    assert all(len(host["gpus"]) == 4 for host in found)


def with_pdsh(lab: Lab) -> None:
    names = ",".join(host.name for host in lab.hosts)
    environ = {**os.environ, "PDSH_SSH_ARGS_APPEND": f"-F {lab.ssh_config}"}
    argv = ["pdsh", "-R", "ssh", "-f", "64", "-w", names, f"python3 {REMOTE}"]
    done = subprocess.run(argv, capture_output=True, env=environ, check=True)
    lines = [line.partition(b": ")[2] for line in done.stdout.splitlines() if b'"gpus"' in line]
    assert len(lines) == len(lab.hosts), done.stderr.decode()
    assert all(len(json.loads(line)["gpus"]) == 4 for line in lines)


if __name__ == "__main__":
    main()

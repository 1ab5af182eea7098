"""Measure a lab: seconds for up, up again, down, crash and boot; memory per host; accuracy of a shaped link's rate.

    python benchmarks/bench_lab.py [--hosts 4] [--rounds 3]

Up and down are the times that a person waits, including the command's own start. Memory is the sum of the hosts'
proportional set sizes. A link's rate is what iperf3 receives, so some 4 % below the line rate: headers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time

from gpurun.lab import Lab

NAME = "bench-lab"
GPURUN = [sys.executable, "-m", "gpurun", "lab"]
LINKS = (("1gbit", "200mbit"), ("10gbit", "2.5gbit"))


def seconds(*args: str) -> float:
    began = time.monotonic()
    subprocess.run([*GPURUN, *args, "--name", NAME], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return round(time.monotonic() - began, 2)


def lifetimes(hosts: int, rounds: int) -> dict[str, object]:
    size = ("--racks", "2", "--hosts", str(hosts // 2))
    found: dict[str, list[float]] = {"up_s": [], "up_again_s": [], "crash_s": [], "boot_s": [], "down_s": []}
    memory_mib = 0.0
    for _ in range(rounds):
        found["up_s"].append(seconds("up", *size))
        found["up_again_s"].append(seconds("up", *size))
        memory_mib = statistics.mean(host.memory_mib for host in Lab(NAME).status().hosts)
        found["crash_s"].append(seconds("crash", "gpu-r1-01"))
        found["boot_s"].append(seconds("boot", "gpu-r1-01"))
        found["down_s"].append(seconds("down"))
    medians = {what: statistics.median(values) for what, values in found.items()}
    return {"hosts": hosts, **medians, "memory_mib_per_host": round(memory_mib, 1)}


def received_mbit(lab: Lab, server: str) -> float:
    lab.run(server, ["iperf3", "--server", "--one-off", "--daemon"])
    done = lab.run("gpu-r1-01", ["iperf3", "--json", "--time", "3", "--client", server])
    return round(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e6, 1)


def links() -> list[dict[str, object]]:
    found = []
    for host_link, rack_uplink in LINKS:
        seconds("up", "--host-link", host_link, "--rack-uplink", rack_uplink)
        lab = Lab(NAME)
        found.append(
            {
                "host_link": host_link,
                "received_mbit": received_mbit(lab, "gpu-r1-02"),
                "rack_uplink": rack_uplink,
                "received_across_mbit": received_mbit(lab, "gpu-r2-01"),
            }
        )
        seconds("down")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="an even number")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        found: dict[str, object] = {"lifetimes": lifetimes(options.hosts, options.rounds)}
        if shutil.which("iperf3"):
            found["links"] = links()
        else:
            print("links are left out: they need iperf3: apt-get install iperf3", file=sys.stderr)
        print(json.dumps(found, indent=2))
    finally:
        seconds("down", "--purge")


if __name__ == "__main__":
    main()

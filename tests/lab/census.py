"""Find a lab's remains through the kernel, without the lab's own code."""

from __future__ import annotations

import subprocess
from pathlib import Path


def census(name: str, folder: Path) -> set[str]:
    """Return namespaces, interfaces, cgroups, loop devices and processes of the lab called `name`."""
    found = {f"netns {path.name}" for path in Path("/run/netns").glob(f"gpurun.{name}.*")}
    found |= {f"link {path.name}" for path in Path("/sys/class/net").iterdir() if path.name == f"gl-{name}"}
    found |= {f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob(f"**/gpurun-lab/{name}")}
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True).stdout
    found |= {f"loop {line}" for line in loops.splitlines() if f"{folder}/" in line}
    found |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mounts = (process / "mountinfo").read_text()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/" in mounts or f"/gpurun-lab/{name}/" in command:
            found.add(f"process {process.name} {command}")
    return found

"""Two heads, or one head with two names for a machine, race for the same GPUs of a lab's host.

The image's horovodrun prints the host's uptime continuously, so a job's log says when its container ran: all
containers of a host read one clock. If two spans overlap, two gangs were on one GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stand_in import TAKE_COMMAND

from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.lab import Lab, engine

IMAGE = "gpurun/claimtest:2"
LAUNCHER = f"""#!/bin/sh
trap 'exit 143' TERM
{TAKE_COMMAND}for last; do :; done
i=0
while [ $i -le $((last * 10)) ]; do
  read -r up rest </proc/uptime; echo "[0]<stdout>:up $up"
  sleep 0.1; i=$((i+1))
done
"""
UP = re.compile(r"up (\d+\.\d+)")


@dataclass(frozen=True)
class Side:
    """One side of a race: a state directory and its name for the machine."""

    home: Path
    inventory: Path

    def submit(self, gpus: int, seconds: int, image: str = IMAGE) -> str:
        spec = JobSpec(name="race", image=image, gpus=gpus, command=(str(seconds),))
        environ = {**os.environ, "GPURUN_HOME": str(self.home), "DOCKER_HOST": engine.ensure()}
        return submit_jobs([spec], load_inventory(self.inventory), self.home, environ).folders[0].id

    def record(self, job: str):
        return JobStore(self.home).get(job).record()

    def events(self, job: str) -> str:
        path = JobStore(self.home).get(job).events
        return path.read_text() if path.exists() else ""

    def span(self, job: str) -> tuple[float, float] | None:
        """When the job's container ran, by the host's clock; None if it never did."""
        path = JobStore(self.home).get(job).log
        found = [float(text) for text in UP.findall(path.read_text())] if path.exists() else []
        return (min(found), max(found)) if found else None


@dataclass(frozen=True)
class Race:
    """How a race ended.

    Attributes:
        jobs: side by side with `states` and `spans`.
        refused: how often a host refused one of them.
    """

    jobs: tuple[str, str]
    states: tuple[str, str]
    spans: tuple[tuple[float, float] | None, tuple[float, float] | None]
    refused: int
    took_s: float

    @property
    def both(self) -> bool:
        """Whether both jobs ran on the same GPUs at once."""
        one, other = self.spans
        return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]

    @property
    def neither(self) -> bool:
        return self.spans == (None, None)

    @property
    def loser_ran_afterwards(self) -> bool:
        return not self.both and self.states == ("SUCCEEDED", "SUCCEEDED") and None not in self.spans


def write_inventory(lab: Lab, path: Path, host: str, *, name: str | None = None) -> Path:
    """An inventory of one host of a lab, under its own name or another one."""
    config = path.with_suffix(".ssh_config")
    shutil.copy(lab.ssh_config, config)
    if name is not None:
        text = config.read_text()
        block = text[text.index(f"Host {host}\n") :].split("\n\n")[0].replace(f"Host {host}\n", f"Host {name}\n")
        config.write_text(f"{text}\n{block}\n")
    path.write_text(
        f"version: 1\nssh_config: {config}\nhead: {{docker_host: '{engine.ensure()}'}}\n"
        "defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}\n"
        f"fabrics: {{tcp: {{kind: tcp, interface: eth0}}}}\nracks: {{r1: {{hosts: {{{name or host}: {{}}}}}}}}\n"
    )
    return path


def two_heads(lab: Lab, folder: Path, host: str) -> tuple[Side, Side]:
    """Two state directories that know the host by one name."""
    inventory = write_inventory(lab, folder / f"{host}.yaml", host)
    return Side(folder / f"{host}-head1", inventory), Side(folder / f"{host}-head2", inventory)


def two_names(lab: Lab, folder: Path, host: str) -> tuple[Side, Side]:
    """One state directory, and two inventories that call the host by different names."""
    home = folder / f"{host}-home"
    first = write_inventory(lab, folder / f"{host}.yaml", host)
    return Side(home, first), Side(home, write_inventory(lab, folder / f"{host}-x1.yaml", host, name="x1"))


SCENARIOS: Mapping[str, Callable[[Lab, Path, str], tuple[Side, Side]]] = {"heads": two_heads, "names": two_names}


def race(sides: Sequence[Side], *, gpus: int = 4, seconds: int = 1, delay_s: float = 0.0, limit_s: float = 240) -> Race:
    """Submit from both sides, the second `delay_s` later, and wait until both jobs end."""
    began = time.monotonic()
    jobs: dict[int, str] = {}
    barrier = threading.Barrier(2)

    def submit(index: int) -> None:
        barrier.wait()
        time.sleep(index * delay_s)
        jobs[index] = sides[index].submit(gpus, seconds)

    threads = [threading.Thread(target=submit, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while time.monotonic() - began < limit_s:
        records = [sides[index].record(jobs[index]) for index in (0, 1)]
        if all(record.state.ended for record in records):
            break
        time.sleep(0.2)
    refused = sum(sides[index].events(jobs[index]).count('"state": "refused"') for index in (0, 1))
    spans = tuple(sides[index].span(jobs[index]) for index in (0, 1))
    states = tuple(record.state.value for record in records)
    return Race((jobs[0], jobs[1]), states, spans, refused, time.monotonic() - began)  # type: ignore[arg-type]

"""What goes on when the power is cut: people submit, cancel and cordon, gangs live and end, supervisors are killed.

``power_work.py HOME WORLD SEED JOBS`` runs it in real processes, to its end. The commands, the passes, the stores,
adoption and the supervisors are gpurun's; `power_hosts` is what they act on.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import power_hosts
import typer

import gpurun
from gpurun import faults
from gpurun.cli import main as command_line
from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import JobSpec, Retry
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore

HOSTS, GPUS = ("h1", "h2", "h3"), 2
INVENTORY = f"""\
version: 1
defaults: {{user: train, generation: pascal, gpus: {GPUS}, fabric: tcp}}
fabrics:
  tcp: {{kind: tcp, interface: eth0}}
racks:
  r1: {{hosts: {{"h[1-{len(HOSTS)}]": {{}}}}}}
"""
PEOPLE = 3
DIES = 0.3
"""The share of supervisors that are killed at one of their fault points; the next command adopts."""


def spec(gpus: int) -> JobSpec:
    work = str(Path(os.environ["GPURUN_INVENTORY"]).with_name("work"))
    return JobSpec(
        "n", "i", gpus, ("true",), workdir=work, outputs="/out", max_restarts=2, grace_s=0.0, retry=Retry(2, wait_s=0.1)
    )


def command(*argv: str) -> int:
    """A gpurun command in this process; its exit code."""
    try:
        command_line.main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("a command always exits")


class Start:
    """In the place of `Head.start_supervisor`: a fork, some of which are killed on their way."""

    def __init__(self, world: power_hosts.World, chance: random.Random) -> None:
        self.world, self.chance = world, chance

    def __call__(self, home: Path, lease: Lease, lock: LeaseLock) -> None:
        dies_at = self.chance.randint(1, 40) if self.chance.random() < DIES else 0
        if os.fork():
            lock.close()
            return
        self.chance = random.Random(dies_at)
        os.environ["GPURUN_FAULT"] = f"supervisor:{dies_at}"
        faults.arm_fault("supervisor")
        code = 1
        try:
            power_hosts.carry(self.world, home, lease, lock)
            code = 0
        finally:
            if code:
                sys.excepthook(*sys.exc_info())
            os._exit(code)


def person(home: Path, world: power_hosts.World, chance: random.Random, jobs: int) -> None:
    """Submit, cancel, cordon and recover; what a command promised when it returned is told."""
    inventory = load_inventory(Path(os.environ["GPURUN_INVENTORY"]))
    store = JobStore(home)
    for _ in range(jobs):
        (folder,) = submit_jobs([spec(chance.choice((1, 2, 3, 6)))], inventory, home, os.environ).folders
        world.tell(f"submitted-{folder.id}")
        what = chance.random()
        ids = store.live_ids()
        if what < 0.3 and ids:
            job = chance.choice(ids)
            if (store.folder / job).exists() and command("cancel", "--no-wait", job) == 0:
                world.tell(f"cancelled-{job}")
        elif what < 0.5:
            host = chance.choice(HOSTS)
            if command("inventory", "cordon", host, "--reason", "a person's") == 0:
                world.tell(f"cordoned-{host}")
            world.folder.joinpath("told", f"cordoned-{host}").rmdir()  # the next line may have begun
            command("inventory", "uncordon", host)
        elif what < 0.7:
            command("recover")
        time.sleep(chance.random() * 0.02)


def run(home: Path, world: power_hosts.World, seed: int, jobs: int) -> None:
    """People at work at once; then everything is let end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    chance = random.Random(seed)
    power_hosts.install(world, Start(world, chance))
    for number in range(PEOPLE):
        if not os.fork():
            code = 1
            try:
                power_hosts.start_by(Start(world, random.Random(f"{seed}.{number}")))
                person(home, world, random.Random(f"{seed} {number}"), jobs // PEOPLE)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
    deadline = time.monotonic() + 60
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # no child is left to wait for once all have ended
    while (JobStore(home).live_ids() or LeaseStore(home).read_all().leases) and time.monotonic() < deadline:
        command("recover")
        time.sleep(0.05)


def argv(home: Path, world: Path, seed: int, jobs: int) -> list[str]:
    return [sys.executable, "-B", __file__, str(home), str(world), str(seed), str(jobs)]


def environ(home: Path, inventory: Path) -> dict[str, str]:
    """The environment of that process; what gpurun is imported from is the same as here."""
    inventory.write_text(INVENTORY)
    inventory.with_name("work").mkdir(exist_ok=True)
    inventory.with_name("work").joinpath("train.py").write_text("code of all jobs")
    root = str(Path(gpurun.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "GPURUN_HOME": str(home), "GPURUN_INVENTORY": str(inventory)}


if __name__ == "__main__":
    command_line.app = typer.main.get_command(command_line.app)  # type: ignore[assignment] # once, not per command
    there = power_hosts.World(Path(sys.argv[2]))
    there.make(HOSTS)
    run(Path(sys.argv[1]), there, int(sys.argv[3]), int(sys.argv[4]))

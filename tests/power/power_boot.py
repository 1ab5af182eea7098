"""A head that boots after a power cut: what must be there before anything runs, and what one command makes of it.

Every check runs in a process of its own, forked from this one: the crash is unpacked, the files are read as gpurun
reads them, then commands run as after a boot, when no process of gpurun lives, until every job has ended.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import power_hosts
import power_work
from power_disk import Crash
from power_hosts import World, printed, printed_by_rank

from gpurun.content.workdir import Code
from gpurun.errors import StateError
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state.hosts import Cordons

DEADLINE_S = 120
ROUNDS = 12


@dataclass
class Verdict:
    """What was found after one cut."""

    broken: list[str] = field(default_factory=list)
    leases: int = 0
    boxes: int = 0


def boot(folder: Path) -> Verdict:
    """Check ``folder/state`` and ``folder/world`` in a child, which changes both; ``GPURUN_INVENTORY`` is set."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        verdict = Verdict()
        try:
            signal.alarm(DEADLINE_S)
            said = io.StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                _Boot(folder, verdict, said).check()
        except BaseException:  # noqa: BLE001 (whatever it is, it is a finding)
            verdict.broken.append(traceback.format_exc())
        with os.fdopen(writing, "wb") as stream:
            pickle.dump(verdict, stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else Verdict([f"nothing came of it in {DEADLINE_S} s"])


def warm() -> None:
    """Import here, once, what every child needs."""
    with tempfile.TemporaryDirectory() as home, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        os.environ["GPURUN_HOME"] = home
        for words in (("status",), ("recover",), ("queue",), ("inventory", "uncordon", power_work.HOSTS[0])):
            power_work.command(*words)


class _Boot:
    def __init__(self, folder: Path, verdict: Verdict, said: io.StringIO) -> None:
        self.home, self.world = folder / "state", World(folder / "world")
        self.verdict, self.said = verdict, said
        self.jobs, self.leases = JobStore(self.home), LeaseStore(self.home)

    def must(self, holds: object, what: str) -> None:
        if not holds:
            self.verdict.broken.append(what)

    def check(self) -> None:
        self.what_is_read()
        self.what_was_promised()
        self.gpus_in_use_are_leased()
        self.nothing_is_lost_with_a_host()
        power_hosts.install(self.world, self.start)
        os.environ.update(GPURUN_HOME=str(self.home))
        self.one_command_carries_on()
        self.all_ends_well()

    # --- before anything runs

    def what_is_read(self) -> None:
        """No file that is written whole is damaged, and no GPU is in two leases."""
        holdings = self.leases.read_all()
        self.must(not holdings.damaged, f"damaged: {[str(error) for error in holdings.damaged]}")
        held = [(grant.host, gpu) for lease in holdings.leases for grant in lease.grants for gpu in grant.gpus]
        self.must(len(held) == len(set(held)), f"a GPU is in two leases: {holdings.leases}")
        self.verdict.leases = len(holdings.leases)
        for job in self.jobs.ids():
            folder = self.jobs.get(job)
            try:
                folder.record(), folder.cancel_request()
                code = Code(folder.code)
                code.compare(code)
                self.must(code.digest == folder.spec().code, f"{job} has other code")
            except (StateError, FileNotFoundError) as error:
                self.must(False, f"damaged: {error}")
        Cordons(self.home).read()

    def what_was_promised(self) -> None:
        """A command that returned has done what it said."""
        there = self.jobs.ids()
        for job in self.world.told("submitted"):
            self.must(job in there, f"{job} was submitted and is gone")
        for job in self.world.told("cancelled"):
            if job in there:
                record, request = self.jobs.get(job).record(), self.jobs.get(job).cancel_request()
                asked = request is not None and request.kind == "cancel"
                self.must(asked or record.state.ended, f"the cancel of {job} is forgotten")
        for host in self.world.told("cordoned"):
            self.must(host in Cordons(self.home).read(), f"the cordon of {host} is forgotten")

    def gpus_in_use_are_leased(self) -> None:
        """What runs on a host is covered by a lease of its job."""
        leased = {
            (lease.job, grant.host, gpu)
            for lease in self.leases.read_all().leases
            for grant in lease.grants
            for gpu in grant.gpus
        }
        for host in self.world.hosts():
            for job, attempt, gpus, _, _ in self.world.boxes(host):
                self.verdict.boxes += 1
                taken = {(job, host, gpu) for gpu in gpus}
                self.must(taken <= leased, f"{job}.{attempt} runs on {host} {gpus}, which are not its any more")
            for name in self.world.things(host):
                job = name.removeprefix("files-")
                kept = not name.startswith("files-") or any(of == job and where == host for of, where, _ in leased)
                self.must(kept, f"{name} is on {host}, and no lease says so")

    def nothing_is_lost_with_a_host(self) -> None:
        """Checkpoints and lines that are on no host any more are on the head."""
        for told in self.world.told("saved"):
            job, _, step = told.rpartition("-")
            on_hosts = [self.world.saved_step(host, job) for host in self.world.hosts()]
            self.must(max(*on_hosts, self.kept_step(job)) >= int(step), f"checkpoint {step} of {job} is lost")
        for told in self.world.told("printed"):
            job, _, attempt = told.rpartition("-")
            boxes = [box for host in self.world.hosts() for box in self.world.boxes(host)]
            if not any((of, number) == (job, int(attempt)) for of, number, _, _, _ in boxes):
                self.must(self.has_lines(job, int(attempt)), f"lines of {job}.{attempt} are lost")

    def kept_step(self, job: str) -> int:
        try:
            return int((self.jobs.get(job).outputs / "checkpoint").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def has_lines(self, job: str, attempt: int) -> bool:
        try:
            lines = self.jobs.get(job).log.read_text().splitlines()
        except FileNotFoundError:
            return False
        wanted = [line.replace(" ", " o ", 1) for line in printed(attempt)]
        ranks = [line.partition("<stdout>:")[2] for line in lines]
        wanted_of_rank = printed_by_rank(attempt).decode().splitlines()
        return [line for line in lines if line in wanted] == wanted and wanted_of_rank == [
            line for line in ranks if line in wanted_of_rank
        ]

    # --- what the first commands do

    def start(self, home: Path, lease: object, lock: LeaseLock, **_: object) -> None:
        try:
            power_hosts.carry(self.world, home, lease, lock)  # type: ignore[arg-type]
        except OSError:  # who adopts takes it for a job whose folder is gone
            self.must(False, f"a supervisor died: {traceback.format_exc()}")
            raise

    def one_command_carries_on(self) -> None:
        codes = [power_work.command(*words) for words in (("status",), ("recover",), ("queue",))]
        self.must(codes == [0, 0, 0], f"status, recover and queue exit with {codes}: {self.said.getvalue()[-1000:]}")

    def all_ends_well(self) -> None:
        for host, cordon in Cordons(self.home).read().items():
            if cordon.state == "cordoned":
                power_work.command("inventory", "uncordon", host)
        for _ in range(ROUNDS):
            if not self.jobs.live_ids() and not self.leases.read_all().leases:
                break
            power_work.command("recover")
        for job in self.world.told("submitted"):
            record = self.jobs.get(job).record()
            asked = self.jobs.get(job).cancel_request()
            wanted = (State.SUCCEEDED, State.CANCELLED) if asked else (State.SUCCEEDED,)
            self.must(record.state in wanted, f"{job} is {record.state.value}: {record.reason}")
        self.must(not self.world.told("violation"), f"violations: {self.world.told('violation')}")
        for host in self.world.hosts():
            self.must(not self.world.things(host), f"left on {host}: {self.world.things(host)}")
        self.nothing_is_lost_with_a_host()
        self.must(not Cordons(self.home).read(), f"cordoned for ever: {Cordons(self.home).read()}")
        whole = self.jobs.create(
            power_work.spec(len(power_work.HOSTS) * power_work.GPUS),
            inventory=Path(os.environ["GPURUN_INVENTORY"]),
            now_s=time.time(),
        )
        granted = [lease.job for lease, _ in Allocator(self.home).run_pass(now_s=time.time()).granted]
        states = {job: self.jobs.get(job).record().state.value for job in self.jobs.ids()}
        self.must(granted == [whole.id], f"of {states}, {granted} were granted, not {whole.id} for all GPUs")
        self.must("Traceback" not in self.said.getvalue(), self.said.getvalue())


def boots(crashes: Iterable[Crash], place: Path) -> Iterator[tuple[Crash, Verdict]]:
    """Boot from each of the crashes."""
    warm()
    for crash in crashes:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            crash.write(Path(folder))
            yield crash, boot(Path(folder))

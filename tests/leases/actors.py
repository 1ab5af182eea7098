"""Real processes that hold leases, for tests that kill them: forked from one zygote, so that each costs milliseconds.

Run as a script, with the descriptor of a socket, this is the zygote: for every connection it is handed it forks an
actor, which answers requests on that connection until it is killed or the connection ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from waiting import LIMIT_S, until

from gpurun import faults
from gpurun.errors import GpurunError
from gpurun.head.spawn import Head
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore, finish
from gpurun.leases.allocate import Allocator, mark_granted
from gpurun.leases.lease import Lease
from gpurun.leases.store import AllocatorLock, LeaseLock, LeaseStore

WARM_UP = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
IMPORTED_FROM = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "lab")]


def finish_interrupted(home: Path) -> None:
    """What each command of this user does first for jobs that have ended without a record."""
    head = Head(home)
    head.finish_interrupted(head._own(*head.live_jobs()))


class Zygote:
    """Makes actors."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(IMPORTED_FROM)},
        )  # fmt: skip
        theirs.close()

    def actor(self, home: Path) -> Actor:
        mine, theirs = socket.socketpair()
        socket.send_fds(self._end, [str(home).encode()], [theirs.fileno()])
        theirs.close()
        return Actor(int(self._end.recv(64)), mine)

    def close(self) -> None:
        self._end.close()
        self._process.wait(LIMIT_S)


class Actor:
    """One process: a supervisor of whatever it holds."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._replies = connection.makefile("r")
        self.alive = True

    def ask(self, what: str, fault: int = 0, **arguments: object) -> None:
        """Send a request; `fault`: it dies at that fault point of it, if it has as many."""
        self._connection.sendall(json.dumps({"what": what, "fault": fault, **arguments}).encode() + b"\n")

    def reply(self) -> object:
        """What it answered; None if it died over it."""
        line = self._replies.readline()
        if not line:
            self.wait()
            return None
        return json.loads(line)

    def kill(self) -> None:
        """kill -9, and wait until its locks are gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        self.alive = False
        self._connection.close()
        until(lambda: not Path(f"/proc/{self.pid}").exists(), every_s=0.0005)


class _Carrier:
    """What an actor does, with the product's own code, and in the order in which a supervisor does it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.jobs, self.leases = JobStore(home), LeaseStore(home)
        self.held: dict[str, tuple[Lease, LeaseLock]] = {}

    def submit(self, spec_gpus: int, now_s: float) -> list[str]:
        from gpurun.jobs.spec import JobSpec

        spec = JobSpec(name="n", image="i", gpus=spec_gpus, command=("true",))
        return [self.jobs.create(spec, inventory=self.home / "inventory.yaml", now_s=now_s).id]

    def run_pass(self, now_s: float) -> list[str]:
        granted = Allocator(self.home).run_pass(now_s=now_s).granted
        self.held.update({lease.name: (lease, lock) for lease, lock in granted})
        return [lease.name for lease, _ in granted]

    def adopt(self) -> list[str]:
        adopted = [(lease, lock) for lease, lock in self.leases.take_orphans(os.getuid())]
        self.held.update({lease.name: (lease, lock) for lease, lock in adopted})
        return [lease.name for lease, _ in adopted]

    def release(self, name: str, again: bool) -> list[str]:
        lease, lock = self.held[name]
        if not lease.lost:
            self._stopping(lease, State.QUEUED if again else State.SUCCEEDED)
        del self.held[name]
        with AllocatorLock(self.home).held():
            self.leases.release(lock)
            if not lease.lost:
                finish(self.jobs, self.jobs.get(lease.job).record(), now_s=1.0)
        lock.close()
        return [name]

    def lose(self, name: str, host: str) -> list[str]:
        lease, lock = self.held[name]
        if lease.lost or host not in [grant.host for grant in lease.grants]:
            return []
        self._stopping(lease, State.QUEUED)
        del self.held[name]
        with AllocatorLock(self.home).held():
            lost, lock = self.leases.abandon(lock, lease, {host})
        self.held[lost.name] = (lost, lock)
        with AllocatorLock(self.home).held():
            finish(self.jobs, self.jobs.get(lease.job).record(), now_s=1.0)
        return [lost.name]

    def _stopping(self, lease: Lease, outcome: State) -> None:
        """The job's way to STOPPING, from wherever an earlier actor left it."""
        folder = self.jobs.get(lease.job)
        if folder.record().state is State.QUEUED:
            mark_granted(self.jobs, lease)
        if folder.record().state is not State.STOPPING:
            folder.move(State.STOPPING, outcome=outcome)


def _serve(home: Path, connection: socket.socket) -> None:
    carrier = _Carrier(home)
    for line in connection.makefile("r"):
        request = json.loads(line)
        os.environ["GPURUN_FAULT"] = f"actor:{request.pop('fault')}"
        faults.arm_fault("actor")
        try:
            answer = getattr(carrier, request.pop("what"))(**request)
        except GpurunError as error:
            answer = {"error": str(error)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _zygote(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=descriptor)
    with tempfile.TemporaryDirectory() as home:  # what is imported late is imported now, once
        (Path(home) / "inventory.yaml").write_text(WARM_UP)
        carrier = _Carrier(Path(home))
        carrier.submit(1, 1.0)
        carrier.run_pass(2.0)
    while True:
        home, descriptors, _, _ = socket.recv_fds(requests, 4096, 1)
        if not home:
            return
        pid = os.fork()
        if not pid:
            requests.close()
            with suppress(ConnectionError):
                _serve(Path(home.decode()), socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        requests.sendall(str(pid).encode())


if __name__ == "__main__":
    _zygote(int(sys.argv[1]))

"""Look at hosts with the check that depends on no job, and note which of them are out.

``python -m gpurun.head.looking INVENTORY...``: one round of looks at the hosts that are due (`gpurun.head.looks`), in a
process of its own. One such process runs for a user at a time, and each ends by itself.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from gpurun.doctor.survey import RETURN_CHECKS, Survey, joined, probe, soundness
from gpurun.errors import (
    AuthenticationFailed,
    GpurunError,
    HeadShort,
    HostFailure,
    StateError,
    StateUnavailable,
)
from gpurun.facts import DockerFacts
from gpurun.head.looks import AGAIN_S, HostLooks, loaded
from gpurun.inventory.model import Host, Inventory
from gpurun.remote.fleet import Fleet
from gpurun.remote.route import target_of
from gpurun.state import clock
from gpurun.state.hosts import BURN_IN, Machine, Machines, Out
from gpurun.state.sharing import StateDirectory

LATE = ("gpurun.remote.opening", "gpurun.inventory.validate")
"""What functions import when they need it: `gpurun.head.loading` imports it at the start."""
ID = re.compile("[0-9a-f]{32}")
OF_GPUS = ("gpu-driver", "gpu-count", "gpu-lost")
AT_ONCE = 16
LOOK_TIMEOUT_S = 15.0
ENOUGH_CLOCKS = 3
"""So many clocks tell which one is wrong. With fewer, the head's clock decides, if a time server sets it."""
AGENT_S = 2.0
FRESH_S = 3.0
"""Many supervisors may fail on one host at a moment: they all use one look that found it out."""
BEGIN_WITHIN_S = 150.0
"""A round begins no look after this long; the next round makes it. Within it, every host that hangs gets its answer."""
PATIENCE_S = 5.0
"""A round waits so long for the answers of hosts with agents, then continues with the next hosts. A driver or a program
of the site that hangs takes a minute or two."""
TICK_S = 2.0
"""While it only waits for late answers, a round asks so often which other hosts are due."""
MOST_LATE = 48
"""A round looks at no more hosts while so many have not answered."""
ROUND_S = 300
"""The kernel ends a round that takes longer."""


def look_at(
    home: Path, inventory: Inventory, hosts: Iterable[str], *, timeout_s: float = LOOK_TIMEOUT_S
) -> Mapping[str, Out | None]:
    """Check hosts, `AT_ONCE` at a time, and note the results as this user's knowledge.

    Args:
        hosts: their names in the inventory.
        timeout_s: for one host, from its first packet to its running agent.

    Returns:
        Host → why it is out; None = its check passed. Missing: a host that is not in the inventory, or of which this
        process can tell nothing: its ssh-agent is gone, or this machine has no descriptors left. The result is right
        even if it cannot be noted.
    """
    known, now_s = Machines(home).read(os.getuid()), time.time()
    found: dict[str, Out | None] = {}
    wanted: list[Host] = []
    for name in dict.fromkeys(hosts):
        host = inventory.by_name.get(name)
        look = known.get(host.machine) if host is not None else None
        if look is not None and look.out is not None and 0 <= now_s - look.seen_s < FRESH_S:
            found[name] = look.out
        elif host is not None:
            wanted.append(host)
    for some in _batches(wanted):
        with Looks(inventory, some, timeout_s) as looks:
            found |= note_survey(home, inventory, some, looks.answers(ROUND_S), looks.begun_s)
    return found


def _batches(hosts: Sequence[Host]) -> Iterator[Sequence[Host]]:
    return (hosts[begin : begin + AT_ONCE] for begin in range(0, len(hosts), AT_ONCE))


class Looks:
    """Looks at some hosts, each in a thread of its own. A context manager: its exit gives up those that still wait.

    Attributes:
        begun_s: when they began, seconds since the epoch.
        waiting: the hosts whose answer has not been taken.
    """

    def __init__(self, inventory: Inventory, hosts: Sequence[Host], timeout_s: float) -> None:
        self.inventory, self.begun_s = inventory, time.time()
        self.waiting = {host.name for host in hosts}
        self._answers: SimpleQueue[tuple[str, Survey]] = SimpleQueue()
        targets = [target_of(host, inventory) for host in hosts]
        self._fleet = Fleet.open(targets, limit=AT_ONCE, timeout_s=timeout_s)
        for host in hosts:
            Thread(target=self._ask, args=(host.name,), name=f"look at {host.name}", daemon=True).start()

    def _ask(self, host: str) -> None:
        try:
            found = probe(self._fleet, self.inventory, [host])
        except Exception as error:  # noqa: BLE001 - a fault of gpurun, met at one host: the others have their looks
            why = f"gpurun failed to read the host's answer: {type(error).__name__}: {error}"
            found = Survey({}, {host: HostFailure(why, kind="internal", host=host)})
        self._answers.put((host, found))

    def answers(self, within_s: float) -> Survey:
        """Take the answers that come within that time. Returns early when there are no others."""
        end_s, found = time.monotonic() + within_s, list[Survey]()
        with suppress(Empty):
            while self.waiting:
                host, answer = self._answers.get(timeout=max(0.0, end_s - time.monotonic()))
                self.waiting.discard(host)
                found.append(answer)
        return joined(found)

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the answers that have not come."""
        self._fleet.close()


def has_its_agent(environ: Mapping[str, str]) -> bool:
    """Return False if the environment names an ssh-agent that is gone, as after its user's logout."""
    path = environ.get("SSH_AUTH_SOCK")
    if not path:
        return True
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(AGENT_S)
        try:
            agent.connect(path)
        except OSError:
            return False
    return True


def note_survey(
    home: Path, inventory: Inventory, hosts: Iterable[Host], seen: Survey, begun_s: float, *,
    is_sure: bool | None = None,
) -> Mapping[str, Out | None]:  # fmt: skip
    """Note what a survey has seen of hosts, as this user's knowledge. Returns host → why it is out, as `look_at`.

    A host whose check passed stays out until its burn-in is over.

    Args:
        begun_s: before its first connection, seconds since the epoch. It holds for hosts whose own probe never began.
        is_sure: a login that failed says something about the host. None = unless this process has lost its ssh-agent.
    """
    now_s = time.time()
    nothing: tuple[type[GpurunError], ...] = (HeadShort,)
    if not (has_its_agent(os.environ) if is_sure is None else is_sure):
        nothing = (HeadShort, AuthenticationFailed)
    unknown = {host for host, error in seen.failures.items() if isinstance(error, nothing)}
    hosts = [host for host in hosts if host.name not in unknown]
    clocks = sum(found.clock_offset_s is not None for found in seen.hardware.values())
    returning = _returning(Machines(home).read(os.getuid()), hosts)
    by_clock = clocks >= ENOUGH_CLOCKS or clock.is_synchronised()
    outs = outs_in(inventory, seen, hosts, now_s, by_clock=by_clock, returning=returning)
    looks = {
        host.machine: Machine(
            host.name, now_s, _id(seen, host.name), outs[host.name], inventory.source, *_size(seen, host.name),
            begun_s=seen.begun_s.get(host.name, begun_s),
        )
        for host in hosts
    }  # fmt: skip
    with suppress(StateError):
        burning = Machines(home).note(looks, {host.machine: host.burn_in or BURN_IN for host in hosts})
        outs |= {host.name: burning[host.machine] for host in hosts if host.machine in burning}
    return outs


def _returning(known: Mapping[str, Machine], hosts: Iterable[Host]) -> set[str]:
    """Return the hosts that are out because of their GPUs, and return by a burn-in of several checks."""
    found = set()
    for host in hosts:
        out = known[host.machine].out if host.machine in known else None
        if out is not None and (out.check in OF_GPUS or out.check in RETURN_CHECKS) and (host.burn_in or BURN_IN) > 1:
            found.add(host.name)
    return found


def _id(seen: Survey, host: str) -> str:
    """Return what a machine calls itself; empty if it does not say it as gpurun's probe does."""
    said = seen.hardware[host].machine_id if host in seen.hardware else ""
    return said if ID.fullmatch(said) else ""


def _size(seen: Survey, host: str) -> tuple[int | None, int | None]:
    """Return the memory, in MiB, and the cores that a host's engine has for containers; None = it does not say."""
    engine = seen.hardware[host].docker if host in seen.hardware else DockerFacts()
    return None if engine.memory_bytes is None else engine.memory_bytes >> 20, engine.cores


def outs_in(
    inventory: Inventory, seen: Survey, hosts: Iterable[Host], now_s: float, *, by_clock: bool = True,
    returning: Collection[str] = (),
) -> dict[str, Out | None]:  # fmt: skip
    """Return host → why it is out, by what a survey has seen; None = its check passed. Pure.

    Args:
        by_clock: a host is out if its clock alone is wrong. False: it may be the clock of the head that is wrong.
        returning: as for `soundness`.
    """
    found = soundness(inventory, seen, returning)
    bad = {host: finding for host, finding in found.items() if by_clock or finding.check != "clock"}
    return {
        host.name: Out(bad[host.name].check, bad[host.name].evidence, now_s, bad[host.name].remedy)
        if host.name in bad
        else None
        for host in hosts
    }


class Round:
    """One round of looks at the hosts that are due.

    Args:
        by_timer: this process has the environment of a timer, perhaps without its user's ssh-agent. A login that fails
            says nothing.
    """

    def __init__(self, home: Path, *, by_timer: bool = False) -> None:
        self._home, self._by_timer = home, by_timer
        self._end_s = time.monotonic() + BEGIN_WITHIN_S
        self._not_before_s: dict[tuple[str, str], float] = {}
        self._under_way: list[Looks] = []

    def make(self, inventories: Sequence[Inventory]) -> None:
        """Look at the hosts that are due. What is due is decided again before each batch.

        So a long round looks several times at hosts that are out. Notes the answer of a host that hangs when it comes;
        no other host waits for it.
        """
        try:
            while time.monotonic() < self._end_s:
                looked = sum(self._look_in(inventory) for inventory in inventories) > 0
                if not looked and not self._under_way:
                    return
                for looks in list(self._under_way):
                    self._note(looks, 0.0 if looked else TICK_S / len(self._under_way))
        finally:
            for looks in self._under_way:
                looks.close()

    def _look_in(self, inventory: Inventory) -> bool:
        """Look at some hosts of an inventory. Returns False if none is due, or the round's time is over."""
        now_s, source = time.monotonic(), inventory.source
        but = {host for (path, host), at_s in self._not_before_s.items() if path == source and now_s < at_s}
        late = sum(len(looks.waiting) for looks in self._under_way)
        hosts = (
            HostLooks(self._home).due_in(inventory, most=AT_ONCE, but=but)
            if now_s < self._end_s and late < MOST_LATE
            else ()
        )
        if not hosts:
            return False
        self._not_before_s |= {(source, host): math.inf for host in hosts}
        looks = Looks(inventory, [inventory.by_name[host] for host in hosts], LOOK_TIMEOUT_S)
        self._under_way.append(looks)
        self._note(looks, PATIENCE_S, again_s=now_s + AGAIN_S)
        return True

    def _note(self, looks: Looks, within_s: float, *, again_s: float = 0.0) -> None:
        """Note the answers that come within that time.

        Args:
            again_s: when to look again at hosts that are out, at the earliest, by the clock that never goes back.
        """
        before, inventory = set(looks.waiting), looks.inventory
        seen = looks.answers(within_s)
        hosts = [inventory.by_name[host] for host in sorted(before - looks.waiting)]
        if hosts:
            is_sure = False if self._by_timer else None
            outs = note_survey(self._home, inventory, hosts, seen, looks.begun_s, is_sure=is_sure)
            for host in hosts:
                if outs.get(host.name) is not None:
                    self._not_before_s[inventory.source, host.name] = again_s or time.monotonic() + AGAIN_S
        if not looks.waiting:
            self._under_way.remove(looks)
            looks.close()


def look_round(home: Path, paths: Iterable[str], *, by_timer: bool = False) -> None:
    """Make a round of looks at hosts of these inventories. Does nothing if another process of this user makes one.

    Args:
        by_timer: as for `Round`.

    Raises:
        StateError: the lock of the looks cannot be opened.
    """
    try:
        with Machines(home).own_lock("looking", patience_s=0.0):
            Round(home, by_timer=by_timer).make(loaded(paths))
    except StateUnavailable:
        return


def main(argv: list[str]) -> int:
    """Make one round of looks at hosts of the inventories that are named; the first word may be ``--by-timer``."""
    signal.alarm(ROUND_S)
    home = Path(os.environ["GPURUN_HOME"])
    try:
        StateDirectory(home).enter()
        by_timer = argv[:1] == ["--by-timer"]
        look_round(home, argv[1:] if by_timer else argv, by_timer=by_timer)
    except GpurunError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 (the waiter's log)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

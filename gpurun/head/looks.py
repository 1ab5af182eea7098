"""Decide when to look at hosts again, and start the process that looks.

While a user has a job in the queue, the user's waiter looks again at hosts that are out, and at hosts of which nothing
was heard for a while. `gpurun recover`, started by a timer, does the same. The process `gpurun.head.looking` makes the
looks; a waiter must stay small, and must not wait for a host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.errors import BadInput, StateUnavailable
from gpurun.head import children
from gpurun.inventory.read import find_inventory
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore
from gpurun.state.hosts import Machine, Machines

if TYPE_CHECKING:
    import subprocess

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.record import JobRecord

LOOKING = "gpurun.head.looking"
AGAIN_S = 10.0
"""A host that is out is looked at again after this long. With a look that takes its whole time-out, that is 25 s."""
UNHEARD_S = 300.0
"""A host of which nothing was heard for this long is looked at."""
EARLY_S = 3.0
"""Looks that are due within this time are made together with those that are due now."""
GROWTH_AGAIN_S = 60.0
"""The same for a gang that wants to grow: it may want that for weeks."""
FIRST_LOOK_S = 3.0
"""A waiter that lives for less than this starts no look."""


def due_in_s(known: Machine | None, now_s: float, *, is_heard: bool = False) -> float:
    """Return the seconds until a look at a host is due; 0 or less: now. Pure.

    A look in the future tells nothing, because the clock was set back: a look is due now.

    Args:
        known: what is known of its machine.
        is_heard: a running gang of this user uses the host.
    """
    age_s = now_s - known.seen_s if known is not None else UNHEARD_S
    if known is not None and known.out is not None:
        return AGAIN_S - age_s if age_s >= 0 else 0.0
    if is_heard:
        return UNHEARD_S
    return UNHEARD_S - age_s if age_s >= 0 else 0.0


def due_hosts(
    inventory: Inventory, machines: Mapping[str, Machine], heard: Collection[str], now_s: float, *,
    most: int | None = None, but: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """Return the hosts that are to be looked at, those that are out first. Pure.

    Args:
        heard: hosts on which running gangs of this user are.
        most: so many at most; None = all. Hosts that are out are then at most half, unless there are few others: a
            look at each takes its whole time-out, and the others must get their turn.
        but: hosts that were looked at just now.
    """
    outs, others = list[str](), list[str]()
    for host in inventory.hosts:
        known = machines.get(host.machine)
        if host.name not in but and due_in_s(known, now_s, is_heard=host.name in heard) <= EARLY_S:
            (outs if known is not None and known.out is not None else others).append(host.name)
    if most is None:
        return (*outs, *others)
    first = outs[: max(most // 2, most - len(others))]
    return (*first, *others[: most - len(first)])


def next_due_in_s(
    inventories: Iterable[Inventory], machines: Mapping[str, Machine], heard: Collection[str], now_s: float
) -> float:
    """Return the seconds until the first look at a host of these inventories is due, at most `UNHEARD_S`. Pure."""
    return min(
        (
            due_in_s(machines.get(host.machine), now_s, is_heard=host.name in heard)
            for inventory in inventories
            for host in inventory.hosts
        ),
        default=UNHEARD_S,
    )


def queued_in(records: Iterable[JobRecord], uid: int) -> tuple[str, ...]:
    """Return the canonical paths of the inventories that a user's queued jobs name."""
    paths = {record.inventory for record in records if record.owner_uid == uid and record.state is State.QUEUED}
    return tuple(sorted({os.path.realpath(path) for path in paths}))


def heard_in(records: Iterable[JobRecord], uid: int, path: str) -> frozenset[str]:
    """Return the hosts of an inventory on which running gangs of a user are."""
    canonical = cache(os.path.realpath)
    return frozenset(
        grant.host
        for record in records
        if record.owner_uid == uid and record.state is State.RUNNING and canonical(record.inventory) == path
        for grant in record.granted
    )


@dataclass(frozen=True)
class HostLooks:
    """When this user's processes look at hosts again.

    Attributes:
        environ: the environment of processes that it starts.
    """

    home: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def known_inventories(self) -> tuple[str, ...]:
        """Return the inventories whose hosts a timer looks at: those of this user's jobs, of the last looks, and the
        default.
        """
        uid = os.getuid()
        paths = {record.inventory for record in JobStore(self.home).live_records() if record.owner_uid == uid}
        paths |= {known.inventory for known in Machines(self.home).read(uid).values() if known.inventory}
        with suppress(BadInput):
            paths.add(str(find_inventory(None, self.environ)))
        return tuple(sorted({os.path.realpath(path) for path in paths}))

    def due_in(self, inventory: Inventory, *, most: int | None = None, but: Collection[str] = ()) -> tuple[str, ...]:
        """Return the hosts of an inventory that this user's processes are to look at now, as `due_hosts` does."""
        uid = os.getuid()
        heard = heard_in(JobStore(self.home).live_records(), uid, inventory.source)
        return due_hosts(inventory, Machines(self.home).read(uid), heard, time.time(), most=most, but=but)

    def look_by_timer(self) -> None:
        """Start looks at the hosts that this user's timer looks at, if some are due. The next minute tries again."""
        paths = self.known_inventories()
        with suppress(StateUnavailable):
            if any(self.due_in(inventory) for inventory in loaded(paths)):
                children.start_detached(LOOKING, "--by-timer", *paths, home=self.home, environ=self.environ)

    def look_while_growing(self, inventory: Inventory) -> None:
        """Start looks at an inventory's hosts if one was out a minute ago: a gang that wants to grow may have no
        waiter.

        Raises:
            StateUnavailable: no process can be started.
        """
        known, now_s = Machines(self.home).read(os.getuid()), time.time()
        outs = (machine for host in inventory.hosts if (machine := known.get(host.machine)) is not None and machine.out)
        if any(not 0 <= now_s - machine.seen_s < GROWTH_AGAIN_S for machine in outs):
            children.start_detached(LOOKING, inventory.source, home=self.home, environ=self.environ)


def loaded(paths: Iterable[str]) -> list[Inventory]:
    """Return the inventories of these paths, without those that have errors."""
    from gpurun.inventory.read import load_inventory  # noqa: PLC0415 (a waiter never needs it)

    found = []
    for path in paths:
        with suppress(BadInput):
            found.append(load_inventory(Path(path)))
    return found


class WaiterLooks:
    """The looks of one waiter: when the next one is due, and the process that makes it.

    Args:
        home: the state directory.
        environ: for the process.
        clock: gives seconds that never go back.
    """

    def __init__(self, home: Path, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._environ, self._clock = home, environ, clock
        self._paths: tuple[str, ...] = ()
        self._earliest_s = clock() + FIRST_LOOK_S
        self._due_s = self._earliest_s
        self._process: subprocess.Popen[bytes] | None = None

    def plan(self, inventories: Mapping[str, Inventory]) -> None:
        """Decide when the next look is due.

        Args:
            inventories: the loaded inventories of a pass, by canonical path.
        """
        uid, records = os.getuid(), list(JobStore(self._home).live_records())
        self._paths = queued_in(records, uid)
        wanted = [inventories[path] for path in self._paths if path in inventories]
        machines, now_s = Machines(self._home).read(uid), time.time()
        heard = {each.source: heard_in(records, uid, each.source) for each in wanted}
        in_s = min((next_due_in_s([each], machines, heard[each.source], now_s) for each in wanted), default=UNHEARD_S)
        self._due_s = max(self._earliest_s, self._clock() + in_s)

    def start_if_due(self) -> None:
        """Start the process if a look is due and none runs; collect one that has ended.

        Raises:
            StateUnavailable: no process can be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._process = None
        if self._paths and self._clock() >= self._due_s:
            self._earliest_s = self._clock() + AGAIN_S
            self._due_s = self._earliest_s
            self._process = children.start_detached(
                LOOKING, *self._paths, home=self._home, environ=self._environ, log=None
            )

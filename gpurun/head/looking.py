"""Look at hosts with the check that depends on no job, and note which of them are out.

``python -m gpurun.head.looking INVENTORY...``: one round of looks at the hosts that are due (`gpurun.head.looks`), in a
process of its own. One such process runs for a user at a time, and each ends by itself.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpurun.doctor.soundness import soundness
from gpurun.doctor.survey import Survey, probe
from gpurun.errors import GpurunError, StateError, StateUnavailable
from gpurun.facts.hardware import DockerFacts
from gpurun.head.looks import due_by_inventory
from gpurun.inventory.model import Host, Inventory
from gpurun.remote.fleet import Fleet
from gpurun.remote.target import target_of
from gpurun.state.machines import Machine, Out, note_looks, own_lock, read_machines
from gpurun.state.shared import enter

ID = re.compile("[0-9a-f]{32}")
AT_ONCE = 16
LOOK_TIMEOUT_S = 15.0
FRESH_S = 3.0
"""Many supervisors may fail on one host at a moment: they all use one look that found it out."""
BEGIN_WITHIN_S = 120.0
"""A round begins no look after this long; the next round makes it."""
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
        Host → why it is out; None = its check passed. A host that is not in the inventory is not among them. The result
        is right even if it cannot be noted.
    """
    known, now_s = read_machines(home, os.getuid()), time.time()
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
        found |= _look(home, inventory, some, timeout_s)
    return found


def _batches(hosts: Sequence[Host]) -> Iterator[Sequence[Host]]:
    return (hosts[begin : begin + AT_ONCE] for begin in range(0, len(hosts), AT_ONCE))


def _look(home: Path, inventory: Inventory, hosts: Sequence[Host], timeout_s: float) -> Mapping[str, Out | None]:
    targets = [target_of(host, inventory) for host in hosts]
    with Fleet.open(targets, limit=AT_ONCE, timeout_s=timeout_s) as fleet:
        seen = probe(fleet, inventory, [host.name for host in hosts])
    return note_survey(home, inventory, hosts, seen)


def note_survey(home: Path, inventory: Inventory, hosts: Sequence[Host], seen: Survey) -> Mapping[str, Out | None]:
    """Note what a survey has seen of hosts, as this user's knowledge. Returns host → why it is out, as `look_at`."""
    now_s = time.time()
    outs = outs_in(inventory, seen, hosts, now_s)
    looks = {
        host.machine: Machine(
            host.name, now_s, _id(seen, host.name), outs[host.name], inventory.source, *_size(seen, host.name)
        )
        for host in hosts
    }
    with suppress(StateError):
        note_looks(home, looks)
    return outs


def _id(seen: Survey, host: str) -> str:
    """Return what a machine calls itself; empty if it does not say it as gpurun's probe does."""
    said = seen.hardware[host].machine_id if host in seen.hardware else ""
    return said if ID.fullmatch(said) else ""


def _size(seen: Survey, host: str) -> tuple[int | None, int | None]:
    """Return the memory, in MiB, and the cores that a host's engine has for containers; None = it does not say."""
    engine = seen.hardware[host].docker if host in seen.hardware else DockerFacts()
    return None if engine.memory_bytes is None else engine.memory_bytes >> 20, engine.cores


def outs_in(inventory: Inventory, seen: Survey, hosts: Iterable[Host], now_s: float) -> dict[str, Out | None]:
    """Return host → why it is out, by what a survey has seen; None = its check passed. Pure."""
    bad = soundness(inventory, seen)
    return {
        host.name: Out(bad[host.name].check, bad[host.name].evidence, now_s, bad[host.name].remedy)
        if host.name in bad
        else None
        for host in hosts
    }


def look_round(home: Path, paths: Iterable[str]) -> None:
    """Look at the hosts of these inventories that are due. Does nothing if another process of this user does it.

    Raises:
        StateError: the lock of the looks cannot be opened.
    """
    begun_s = time.monotonic()
    try:
        with own_lock(home, "looking", patience_s=0.0):
            for inventory, hosts in due_by_inventory(home, paths, time.time()):
                for some in _batches([inventory.by_name[name] for name in hosts]):
                    if time.monotonic() - begun_s > BEGIN_WITHIN_S:
                        return
                    _look(home, inventory, some, LOOK_TIMEOUT_S)
    except StateUnavailable:
        return


def main(argv: list[str]) -> int:
    """Make one round of looks."""
    signal.alarm(ROUND_S)
    home = Path(os.environ["GPURUN_HOME"])
    try:
        enter(home)
        look_round(home, argv)
    except GpurunError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 (the waiter's log)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Probe every host at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpurun.doctor import mesh, names, paths
from gpurun.doctor.hooks import ask_health
from gpurun.errors import GpurunError
from gpurun.facts.hardware import Hardware, hardware_from_document
from gpurun.inventory.model import Inventory
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet

PROBE_TIMEOUT_S = 40.0
"""Above the node's own limit for a driver that hangs, so that such a host is described and not lost."""

CLOCK_TRIES = 3


@dataclass(frozen=True)
class Survey:
    """The answers of all hosts.

    Attributes:
        hardware: host → what its probe found.
        failures: host → why there is no probe.
        health: host → why the site's own check failed there, for hosts where it did.
        begun_s: host → when its probe began, seconds since the epoch; missing for a host without a session.
        attempts: fabric → attempts to connect on it.
        addresses: host → its address on its fabric.
        lookups: host → name → addresses.
        signs: host of the same gang that was probed earlier → the signs in its folder after this probe.
    """

    hardware: Mapping[str, Hardware]
    failures: Mapping[str, GpurunError]
    attempts: Mapping[str, tuple[paths.ReachAttempt, ...]] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    lookups: names.Lookups = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    begun_s: Mapping[str, float] = field(default_factory=dict)
    signs: Mapping[str, Sequence[str]] = field(default_factory=dict)


def probe(fleet: Fleet, inventory: Inventory, hosts: Iterable[str] | None = None) -> Survey:
    """Return every host's hardware, with its clock's offset, and what the site's ``health`` program says there.

    A failing host is data, never an exception.
    """
    interfaces = sorted({fabric.interface for fabric in inventory.fabrics.values()})
    begun_s: dict[str, float] = {}

    def one(agent: Agent) -> tuple[Hardware, str]:
        begun_s[agent.host] = time.time()
        reply = agent.call("probe.facts", timeout_s=PROBE_TIMEOUT_S, interfaces=interfaces)
        found = hardware_from_document(agent.host, reply.value)
        offset_s, error_s = clock_offset(agent)
        said = ask_health(agent, inventory.by_name[agent.host])
        return replace(found, clock_offset_s=offset_s, clock_error_s=error_s), said

    results = fleet.map(one, hosts)
    hardware = {host: found for host, (found, _) in results.ok.items()}
    health = {host: said for host, (_, said) in results.ok.items() if said}
    return Survey(hardware, results.failed, health=health, begun_s=begun_s)


def joined(surveys: Iterable[Survey]) -> Survey:
    """Return what probes of different hosts have found as one survey. Pure."""
    hardware: dict[str, Hardware] = {}
    failures: dict[str, GpurunError] = {}
    health: dict[str, str] = {}
    begun_s: dict[str, float] = {}
    for each in surveys:
        hardware |= each.hardware
        failures |= each.failures
        health |= each.health
        begun_s |= each.begun_s
    return Survey(hardware, failures, health=health, begun_s=begun_s)


def survey(
    fleet: Fleet,
    inventory: Inventory,
    hosts: Iterable[str] | None = None,
    *,
    ports: mesh.Ports = mesh.SYSTEM_PORTS,
    look_up: bool = True,
) -> Survey:
    """Collect everything that doctor needs: hardware, then connections between hosts, and name lookups.

    Args:
        ports: ranges of ports that jobs use between hosts; tries one port of each.
        look_up: also look up the other hosts' names.
    """
    found = probe(fleet, inventory, hosts)
    attempts, addresses = mesh.try_all(fleet, inventory, found.hardware, ports)
    lookups = _look_up(fleet, inventory, list(found.hardware)) if look_up else {}
    return replace(found, attempts=attempts, addresses=addresses, lookups=lookups)


def signs_at(fleet: Fleet, hosts: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Return the signs in the folders of hosts that were probed earlier; nothing of a host that does not answer."""
    return fleet.map(lambda agent: agent.call("probe.signs", timeout_s=PROBE_TIMEOUT_S).value, hosts).ok


def clock_offset(agent: Agent, tries: int = CLOCK_TRIES) -> tuple[float, float]:
    """Return (host's clock minus this machine's clock, possible error) in seconds, from the quickest of some round
    trips.
    """
    best: tuple[float, float] | None = None
    for _ in range(tries):
        started = time.monotonic()
        before_s = time.time()
        host_s = float(agent.call("probe.clock").value["clock_s"])
        round_trip_s = time.monotonic() - started
        if best is None or round_trip_s / 2 < best[1]:
            best = host_s - (before_s + round_trip_s / 2), round_trip_s / 2
    assert best is not None
    return best


def _look_up(fleet: Fleet, inventory: Inventory, hosts: list[str]) -> names.Lookups:
    found: dict[str, Mapping[str, list[str] | None]] = {}
    for group in mesh.by_fabric(inventory, hosts).values():
        wanted = names.wanted(group)
        results = fleet.map(
            lambda agent, wanted=wanted: agent.call("probe.resolve", names=list(wanted[agent.host])).value,  # type: ignore[misc]
            [host for host in group if wanted[host]],
        )
        found.update(results.ok)
    return found

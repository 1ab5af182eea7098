"""Test connections between hosts over their fabric, on ports that jobs use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from gpurun.doctor import paths
from gpurun.doctor.host_checks import plain_addresses
from gpurun.facts.hardware import Hardware
from gpurun.inventory.model import Inventory
from gpurun.remote.agent import Agent, Reply, bad_answer
from gpurun.remote.fleet import Fleet

Ports = tuple[tuple[int, int], ...]

SYSTEM_PORTS: Ports = ((0, 0), (0, 0))
"""Ports as the system gives them to Gloo, NCCL, Open MPI and horovodrun's own services."""

CONNECT_TIMEOUT_S = 3.0
"""A lost SYN is sent again after 1 s (RFC 6298); a second loss in a row on a fabric is a fault."""

LISTEN_LIMIT_S = 60.0

SSH_PORT = 22
"""Tried as well: whether it answers or refuses, packets do get through."""


@dataclass(frozen=True)
class _Listening:
    stream: Iterator[Reply]
    ports: tuple[int, ...]


def spread(first: int, last: int, count: int = 3) -> Ports:
    """Split a range of ports into `count` parts, so that a firewall that blocks only some of the ports is found."""
    width = (last - first + 1) // count
    return tuple((first + at * width, first + (at + 1) * width - 1) for at in range(count))


def by_fabric(inventory: Inventory, hosts: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return fabric → those of the hosts that are on it."""
    groups: dict[str, tuple[str, ...]] = {}
    for host in hosts:
        fabric = inventory.by_name[host].fabric
        groups[fabric] = (*groups.get(fabric, ()), host)
    return groups


def fabric_addresses(inventory: Inventory, found: Mapping[str, Hardware]) -> Mapping[str, str]:
    """Return host → the address that ranks of other hosts use. Leaves out hosts without an address."""
    addresses = {}
    for name, hardware in found.items():
        host = inventory.by_name[name]
        nic = hardware.nic(inventory.fabric_of(host).interface)
        own = plain_addresses(nic) if nic else ()
        if own:
            addresses[name] = host.fabric_address if host.fabric_address in own else own[0]
    return addresses


def try_all(
    fleet: Fleet, inventory: Inventory, found: Mapping[str, Hardware], ports: Ports = SYSTEM_PORTS
) -> tuple[Mapping[str, tuple[paths.ReachAttempt, ...]], Mapping[str, str]]:
    """Return (fabric → attempts, host → address). Leaves out hosts that cannot listen on their address."""
    addresses = fabric_addresses(inventory, found)
    attempts = {}
    for fabric, hosts in by_fabric(inventory, addresses).items():
        if len(hosts) > 1:
            attempts[fabric] = _try_group(fleet, hosts, addresses, ports)
    return attempts, addresses


def _try_group(
    fleet: Fleet, hosts: Sequence[str], addresses: Mapping[str, str], ports: Ports
) -> tuple[paths.ReachAttempt, ...]:
    def start(agent: Agent) -> _Listening:
        stream = agent.stream(
            "probe.listen", address=addresses[agent.host], ports=[list(one) for one in ports], limit_s=LISTEN_LIMIT_S
        )
        found = tuple((next(stream).value or {}).get("ports", ()))
        if len(found) != len(ports):
            stream.close()
            raise bad_answer(
                agent.host, f"the host opened only {len(found)} of {len(ports)} ports for the connection test"
            )
        return _Listening(stream, found)

    with ExitStack() as stack:
        listening = fleet.map(start, hosts).ok
        for one in listening.values():
            stack.enter_context(closing(one.stream))  # type: ignore[type-var]
        targets = _targets([host for host in hosts if host in listening])

        def connect(agent: Agent) -> list[Any]:
            return _connect(agent, _wanted(agent.host, targets, listening, addresses), addresses[agent.host])

        outcomes = fleet.map(connect, [host for host in targets if targets[host]]).ok
    return tuple(_attempts(targets, listening, outcomes))


def _wanted(
    source: str,
    targets: Mapping[str, tuple[str, ...]],
    listening: Mapping[str, _Listening],
    addresses: Mapping[str, str],
) -> list[dict[str, Any]]:
    return [
        {"address": addresses[target], "port": port}
        for target in targets[source]
        for port in (*listening[target].ports, SSH_PORT)
    ]


def _connect(agent: Agent, wanted: list[dict[str, Any]], address: str) -> list[Any]:
    """Return outcomes in the order of `wanted`. Retries failures once, so one lost packet is no problem."""

    def call(some: list[dict[str, Any]]) -> list[Any]:
        limit_s = CONNECT_TIMEOUT_S + 20
        outcomes = list(agent.call("probe.connect", targets=some, source=address, timeout_s=limit_s).value)
        if len(outcomes) != len(some):
            raise bad_answer(
                agent.host, f"the host reports {len(outcomes)} of {len(some)} connections of the connection test"
            )
        return outcomes

    outcomes = call(wanted)
    failed = [at for at, one in enumerate(outcomes) if not one["ok"] and one["error"] != "refused"]
    for at, again in zip(failed, call([wanted[at] for at in failed]) if failed else [], strict=True):
        outcomes[at] = again
    return outcomes


def _targets(hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    targets: dict[str, tuple[str, ...]] = {}
    for source, target in paths.pairs(hosts):
        targets[source] = (*targets.get(source, ()), target)
    return targets


def _attempts(
    targets: Mapping[str, tuple[str, ...]], listening: Mapping[str, _Listening], outcomes: Mapping[str, list[Any]]
) -> Iterator[paths.ReachAttempt]:
    for source, results_of in outcomes.items():
        answer = iter(results_of)
        for target in targets[source]:
            ports = listening[target].ports
            results = [(port, next(answer)) for port in ports]
            failed = {port: str(one["error"]) for port, one in results if not one["ok"]}
            control = next(answer)
            answers = bool(control["ok"]) or control["error"] == "refused"
            yield paths.ReachAttempt(source, target, failed, len(ports), answers)

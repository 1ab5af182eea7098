"""Machines in memory: GPUs, containers and claims, with the real decision about claims in front of them.

A machine answers the operations that a supervisor asks of an agent. `gpurun.node.job.claims` decides. What Docker, NVML
and `/proc` do on a real host is modelled here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpurun.errors import GpurunError, HostUnreachable
from gpurun.node.claim_rules import (
    Card,
    Claimant,
    Container,
    Refused,
    Seen,
    Volume,
    container_labels,
    read_cards,
    read_claimant,
    read_volume,
    volume_labels,
    volume_name,
)
from gpurun.node.job import claims
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.supervisor.links import FirstAnswers

GPUS = 2
CONSTANT = {
    "gang.engine": {"state": "same", "up_s": None, "why": ""},
    "gang.progress": {"age_s": None, "checkpoint_age_s": None, "ranks": {}},
}
"""What is always answered: engines run on, and ranks say nothing of their progress."""


@dataclass
class Box:
    """A container: its labels, and Docker's word for how it is."""

    name: str
    labels: dict[str, str]
    status: str = "created"
    code: int | None = None


@dataclass
class Machine:
    """A host with its Docker. It is the store of its claims (`gpurun.node.job.claims.Store`).

    Attributes:
        signs: (agent, claim key) of every connected agent that stands for an attempt.
        cut_from: heads that cannot reach it now.
        world: where others may act between two steps of an operation.
    """

    name: str
    world: Any
    up: bool = True
    volumes: dict[str, dict[str, str]] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    signs: set[tuple[int, tuple[str, str, int]]] = field(default_factory=set)
    cut_from: set[str] = field(default_factory=set)
    _ids: Any = field(default_factory=itertools.count)

    def uuid(self, index: int) -> str:
        return f"GPU-{self.name}-{index}"

    def reaches(self, head: str) -> bool:
        return self.up and head not in self.cut_from

    # -- the store of claims

    def look(self) -> Seen:
        alive = {key for _, key in self.signs}
        volumes = [read_volume(name, labels) for name, labels in self.volumes.items()]
        return Seen(
            tuple(one._replace(alive=one.claimant.key in alive) for one in volumes if one is not None),
            tuple(
                Container(ident, read_claimant(box.labels), read_cards(box.labels) or (), box.status)
                for ident, box in self.boxes.items()
            ),
        )

    def make(self, me: Claimant, card: Card) -> Claimant:
        self.world.between()
        return read_claimant(self.volumes.setdefault(volume_name(card), volume_labels(me, card, 0, 1)))

    def remove(self, volume: Volume) -> bool:
        self.world.between()
        if volume.name not in self.volumes:
            return True
        if read_volume(volume.name, self.volumes[volume.name]) != volume._replace(alive=False):
            return False
        del self.volumes[volume.name]
        return True

    def still_runs(self, volume: Volume) -> str:
        """A process of the holder's job, or one that holds the GPU: in this world both run in containers."""
        for ident, box in self.boxes.items():
            if box.status == "running" and box.labels["gpurun.job"] == volume.claimant.job:
                return f"a process of {ident} is there"
        return ""

    # -- what an agent does

    def take(self, agent: int, claimant: dict[str, Any], cards: Iterable[Any]) -> None:
        me = Claimant(**claimant)
        self.signs.add((agent, me.key))
        refused: list[Refused] = claims.take(self, me, [(int(index), str(uuid)) for index, uuid in cards])
        if refused:
            self.signs.discard((agent, me.key))
            raise RemoteOpFailed(
                "others hold GPUs", kind="claimed", detail={"refused": [list(one) for one in refused]}, host=self.name
            )

    def create(self, agent: int, name: str, claim: dict[str, Any]) -> None:
        self.take(agent, **claim)
        self.world.between()
        if any(box.name == name for box in self.boxes.values()):
            raise RemoteOpFailed(f"Conflict. The name {name} is in use", kind="docker", host=self.name)
        labels = container_labels(Claimant(**claim["claimant"]), [tuple(card) for card in claim["cards"]])
        self.boxes[f"{self.name}-{next(self._ids)}"] = Box(name, labels)

    def start(self, agent: int, container: str, claim: dict[str, Any]) -> None:
        self.take(agent, **claim)
        self.world.between()
        for box in self.boxes.values():
            if box.name == container:
                box.status = "running"
                return
        raise RemoteOpFailed("no such container", kind="docker", host=self.name)

    def fence(self, agent: int, job: str, attempt: int, claimant: dict[str, Any] | None) -> dict[str, Any]:
        me = None if claimant is None else Claimant(**claimant)
        if me is not None:
            self.signs.add((agent, me.key))
        self.boxes = {
            ident: box
            for ident, box in self.boxes.items()
            if box.labels["gpurun.job"] != job or int(box.labels["gpurun.attempt"]) > attempt
        }
        self.world.between()
        left = []
        if me is not None:
            self.signs.discard((agent, me.key))
            left = claims.release_claims(self, me)
        return {"containers": [], "processes": [], "folder": False, "users": [], "gpu_problem": "", "claims": left}

    def inspect(self, job: str) -> list[dict[str, str]]:
        return [
            {"attempt": box.labels["gpurun.attempt"], "status": box.status, "name": box.name, "code": box.code}
            for box in self.boxes.values()
            if box.labels["gpurun.job"] == job
        ]

    def running(self, job: str) -> list[Box]:
        return [box for box in self.boxes.values() if box.labels["gpurun.job"] == job and box.status == "running"]

    def end(self, job: str, attempt: int, code: int) -> None:
        """The attempt's container ends."""
        for box in self.running(job):
            if box.labels["gpurun.attempt"] == str(attempt):
                box.status, box.code = "exited", code

    def reboot(self) -> None:
        self.signs.clear()
        for box in self.boxes.values():
            if box.status == "running":
                box.status, box.code = "exited", 137

    def used(self) -> dict[int, list[str]]:
        """GPU → the containers that run with it."""
        found: dict[int, list[str]] = {}
        for ident, box in self.boxes.items():
            for index, _ in read_cards(box.labels) or () if box.status == "running" else ():
                found.setdefault(index, []).append(f"{ident} of {box.labels['gpurun.job']}")
        return found


class Agents:
    """In the place of `gpurun.supervisor.links.Links`: the machines that one supervisor is connected to."""

    def __init__(self, world: Any, head: str, inventory: Any, hosts: Iterable[str]) -> None:
        self._world, self._head = world, head
        self.targets: dict[str, str] = {}
        self.epilogs: dict[str, tuple[str, ...]] = {}
        self._opened: set[str] = set()
        self._heard_s: dict[str, float] = {}
        self._begun_s = world.now_s
        self.ident = next(world.numbers)
        self._answers = FirstAnswers(lambda: world.now_s)
        self.add(hosts, inventory)

    def add(self, hosts: Iterable[str], inventory: Any) -> None:
        named = {host: inventory.by_name[host] for host in hosts}
        self.targets.update({name: host.address or name for name, host in named.items()})

    def drop(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self.targets.pop(host, None)
            self._opened.discard(host)

    def machine(self, host: str) -> Machine | None:
        return self._world.at(self.targets.get(host, ""))

    def open(self, hosts: Iterable[str] | None = None, **_: float) -> dict[str, HostUnreachable]:
        failures = {}
        self._world.sleep(0.1)
        for host in list(self.targets if hosts is None else hosts):
            machine = self.machine(host)
            self._answers.asks(host)
            if machine is not None and machine.reaches(self._head):
                self._answers.answered(host)
                self._opened.add(host)
            else:
                failures[host] = HostUnreachable("no route", host=host)
        return failures

    @property
    def mute_since(self) -> Mapping[str, float]:
        return self._answers.mute_since

    def is_open(self, host: str) -> bool:
        machine = self.machine(host)
        is_open = host in self._opened and machine is not None and machine.reaches(self._head)
        if is_open:
            self._heard_s[host] = self._world.now_s
        return is_open

    def silent_s(self, host: str) -> float:
        return 0.0 if self.is_open(host) else self._world.now_s - self._heard_s.get(host, self._begun_s)

    def agent(self, host: str) -> Agent:
        if not self.is_open(host):
            raise HostUnreachable("there is no connection to the host", host=host)
        return Agent(self._world, host, self.machine(host), self.ident)

    def each(self, call: Callable[[Any], Any], hosts: Iterable[str] | None = None) -> Results[Any]:
        ok, failed = {}, {}
        for host in list(self.targets if hosts is None else hosts):
            self._world.sleep(0.1)
            try:
                ok[host] = call(self.agent(host))
            except GpurunError as error:
                failed[host] = error
        return Results(ok, failed)

    def close(self) -> None:
        """The agents end. An agent on a machine that cannot be reached lives on for a while."""
        for machine in self._world.machines.values():
            if machine.reaches(self._head):
                machine.signs = {(agent, key) for agent, key in machine.signs if agent != self.ident}


@dataclass(frozen=True)
class Agent:
    """One connection. Now and then the answer is lost after the machine has done what was asked."""

    world: Any
    host: str
    machine: Any
    ident: int

    def call(self, op: str, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        self.world.point()
        value = self._do(op, **arguments)
        if self.world.chance(0.01):
            raise HostUnreachable("the connection was lost", host=self.host)
        return SimpleNamespace(value=value)

    def _do(self, op: str, **arguments: Any) -> Any:
        if op in CONSTANT:
            return CONSTANT[op]
        match op:
            case "claims.take":
                return self.machine.take(self.ident, **arguments)
            case "gang.create":
                return self.machine.create(self.ident, arguments["name"], arguments["claim"])
            case "gang.start":
                return self.machine.start(self.ident, arguments["container"], arguments["claim"])
            case "gang.fence":
                return self.machine.fence(self.ident, arguments["job"], arguments["attempt"], arguments.get("claimant"))
            case "gang.inspect":
                return self.machine.inspect(arguments["job"])
            case "gang.signal":
                return self._told(arguments["job"])
            case "ranks.count":
                return len(self.machine.running(arguments["job"]))
            case "docker.request":
                return self._killed(arguments["path"])
        raise AssertionError(op)

    def _told(self, job: str) -> int:
        """SIGTERM to the ranks; some do not heed it."""
        told = self.machine.running(job)
        for box in told:
            if not self.world.chance(0.3):
                box.status, box.code = "exited", 143
        return len(told)

    def _killed(self, path: str) -> None:
        for box in self.machine.boxes.values():
            if box.status == "running" and box.name == path.split("/")[2]:
                box.status, box.code = "exited", 137


def hardware(machine: Machine) -> Any:
    """What a probe of the machine finds, as far as claims need it."""
    gpus = [SimpleNamespace(index=index, uuid=machine.uuid(index)) for index in range(GPUS)]
    return SimpleNamespace(gpus=gpus, machine_id="")

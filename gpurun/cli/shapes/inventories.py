"""What ``--json`` prints about inventories."""

from __future__ import annotations

from typing import TypedDict

from gpurun.documents.problems import Problem
from gpurun.inventory.history import RecordedChange
from gpurun.inventory.model import Fabric, Host, Pool
from gpurun.remote.trust import KeyState
from gpurun.scheduler.drain import Fate
from gpurun.state.cordons import Cordon
from gpurun.state.machines import Out


class KnownHostShape(Host):
    """A host with its defaults and its state.

    Attributes:
        drain: the progress of the drain in words, during a drain.
        cordon: the host's cordon; null: the host is not cordoned.
        out: why the last check found the host broken; only if the host is out.
    """

    __optional_keys__ = frozenset({"drain", "out"})
    state: str
    drain: str
    out: Out
    cordon: Cordon | None


class InventoryListShape(TypedDict):
    """Hosts."""

    inventory: str
    hosts: list[KnownHostShape]


class GenerationShape(TypedDict):
    """The hosts of one GPU generation, as a host set."""

    hosts: str
    gpus: int


class InventoryShape(TypedDict):
    """A summary of the cluster. With HOSTS, the command prints the document of `gpurun inventory list`.

    Attributes:
        racks: the hosts of each rack, as a host set.
    """

    inventory: str
    hosts: int
    gpus: int
    generations: dict[str, GenerationShape]
    racks: dict[str, str]
    fabrics: dict[str, Fabric]
    pools: dict[str, Pool]
    ssh_config: str | None
    docker_host: str | None


class ValidateShape(TypedDict):
    """Problems in an inventory."""

    inventory: str
    valid: bool
    problems: list[Problem]


class ChangesShape(TypedDict):
    """Changes of an inventory, the newest last."""

    inventory: str
    changes: list[RecordedChange]


class CordonShape(TypedDict):
    """Hosts whose state changed.

    Attributes:
        hosts: the named hosts.
        changed: the named hosts that had another state before.
    """

    hosts: list[str]
    changed: list[str]
    state: str


class LeavingShape(TypedDict):
    """A job on a host that is drained.

    Attributes:
        fate: what the drain does to the job.
        why: for `waits` and `ends`: why the job does not move.
        until_s: for `waits`: when gpurun stops the job; null: never.
    """

    job: str
    hosts: list[str]
    fate: Fate
    why: str
    until_s: float | None


class DrainShape(TypedDict):
    """A drain.

    Attributes:
        state: `draining` or `drained`.
    """

    hosts: list[str]
    changed: list[str]
    state: str
    jobs: list[LeavingShape]


class KeyShape(TypedDict):
    """A host key.

    Attributes:
        known: fingerprints in known_hosts, if they differ.
    """

    type: str
    fingerprint: str
    state: KeyState
    known: list[str]


class TrustedHostShape(TypedDict):
    """The keys of one host.

    Attributes:
        name: the host's name in known_hosts.
        state: `known`, `new`, `changed`, `revoked` or `unreachable`.
    """

    host: str
    name: str
    known_hosts: str
    state: str
    keys: list[KeyShape]


class TrustShape(TypedDict):
    """Host keys."""

    hosts: list[TrustedHostShape]
    keys_written: int

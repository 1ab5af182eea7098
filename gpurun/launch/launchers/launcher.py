"""The description of a launcher: how it starts the ranks of a gang, and the consequences for other code. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from gpurun.jobs.spec import Disagreement, Grant, JobSpec, Roles
from gpurun.launch.launchers.words import CHOSEN

# The ranks of a gang: their numbers, their hosts, and their roles if they differ. Pure.


WORKER, CHIEF, SERVER, EVALUATOR = "worker", "chief", "ps", "evaluator"


@dataclass(frozen=True)
class RankSeat:
    """One rank of a placed gang.

    Attributes:
        rank: its number in the gang, from 0.
        local_rank: its number on its host, from 0; ranks with a GPU come first.
        node: the number of its host, from 0.
        host: its host's name in the inventory.
        local_size: the number of ranks on its host.
        role: its role, if ranks are not all alike; else "".
        index: its number within its role, from 0.
        has_gpu: whether it has one of the gang's GPUs.
        is_awaited: the gang has succeeded once all such ranks have returned 0. gpurun then ends the others.
    """

    rank: int
    local_rank: int
    node: int
    host: str
    local_size: int
    role: str = ""
    index: int = 0
    has_gpu: bool = True
    is_awaited: bool = True

    @property
    def title(self) -> str:
        """Return the rank's name in messages for people."""
        return f"{self.role} {self.index} (rank {self.rank})" if self.role else f"rank {self.rank}"


def seats_of(
    grants: Sequence[Grant], roles: Roles | None = None, *, one_per_host: bool = False
) -> tuple[RankSeat, ...]:
    """Return the ranks of a gang, in order: one for each GPU (or host), host by host; then those without a GPU, if it
    has roles.

    The chief and the evaluator are on the first host, whose outputs they share. Parameter servers are on the hosts
    without GPUs, if the gang has some. Otherwise they are spread evenly, beginning with the last host: no host, and so
    no NIC, has two servers while another has none.
    """
    with_gpu = [node for node, grant in enumerate(grants) for _ in grant.gpus[: 1 if one_per_host else None]]
    servers_on = [node for node, grant in enumerate(grants) if not grant.gpus] or range(len(grants))
    parts = [(node, "", 0) for node in with_gpu] if roles is None else _parts(with_gpu, servers_on, roles)
    sizes, before = Counter(node for node, _, _ in parts), Counter[int]()
    awaited = CHIEF if roles is not None and roles.chief else WORKER
    found = []
    for rank, (node, role, index) in enumerate(parts):
        found.append(
            RankSeat(
                rank, local_rank=before[node], node=node, host=grants[node].host, local_size=sizes[node],
                role=role, index=index, has_gpu=rank < len(with_gpu), is_awaited=role in ("", awaited),
            )
        )  # fmt: skip
        before[node] += 1
    return tuple(found)


def _parts(with_gpu: Sequence[int], servers_on: Sequence[int], roles: Roles) -> list[tuple[int, str, int]]:
    """Return for each rank the number of its host, its role, and its number in that role."""
    hosts = len(servers_on)
    return [
        *((node, WORKER, index) for index, node in enumerate(with_gpu)),
        *[(0, CHIEF, 0)] * bool(roles.chief),
        *((servers_on[hosts - 1 - index * hosts // roles.ps], SERVER, index) for index in range(roles.ps)),
        *[(0, EVALUATOR, 0)] * roles.evaluator,
    ]


Tells = Literal["script", "group", "nobody"]
RANK_VARIABLE = "GPURUN_RANK"
"""What tells a rank its number where gpurun itself starts it."""


@dataclass(frozen=True)
class PlacedGang:
    """A placed gang, with the fields that a launcher needs.

    Attributes:
        ident: a unique name of the attempt.
        grants: one for each host, in rank order.
        interfaces: host → the network interface of its fabric.
        addresses: host → the IPv4 address of that interface.
        port: a TCP port that no other job of this head uses. If ranks have roles, the job also owns as many ports after
            it as a host has ranks.
        is_tcp: the fabric has no RDMA.
        given: the variables that the recipe sets itself; the recipe's values stay.
        roles: the roles of the ranks; None if all ranks are alike.
        one_per_host: each host has one rank, which sees all of the job's GPUs there.
    """

    ident: str
    grants: Sequence[Grant]
    interfaces: Mapping[str, str]
    addresses: Mapping[str, str]
    port: int
    is_tcp: bool
    given: frozenset[str] = frozenset()
    roles: Roles | None = None
    one_per_host: bool = False

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.places)

    @property
    def first(self) -> str:
        """Return the host of rank 0."""
        return self.grants[0].host

    @cached_property
    def places(self) -> Sequence[RankSeat]:
        """Return its ranks, in order."""
        return seats_of(self.grants, self.roles, one_per_host=self.one_per_host)

    @property
    def ranks_of_hosts(self) -> Sequence[int]:
        """Return the number of ranks with a GPU on each host, in rank order."""
        return [min(len(grant.gpus), 1) if self.one_per_host else len(grant.gpus) for grant in self.grants]

    def port_of(self, place: RankSeat) -> int:
        """Return the port on which a rank with a role listens."""
        return self.port + 1 + place.local_rank

    def ports_of(self, host: str) -> tuple[int, ...]:
        """Return the ports on which ranks may listen on a host."""
        own = [self.port_of(place) for place in self.places if place.host == host and place.role]
        return (*([self.port] if host == self.first else []), *own)

    def peers(self) -> Mapping[str, Sequence[str]]:
        """Return role → address of each of its ranks, as ``address:port``; empty if all ranks are alike."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if place.role:
                found.setdefault(place.role, []).append(f"{self.addresses[place.host]}:{self.port_of(place)}")
        return found


@dataclass(frozen=True)
class Launcher:
    """How the ranks of a gang are started.

    Attributes:
        name: its name in a recipe.
        argv: the argv of the first host's container; it starts all ranks, over the job's own sshd, and ends after them.
            None: gpurun starts the ranks of each host there, without sshd.
        environment: additional variables of a rank that gpurun starts.
        rank_variable: the variable with a rank's number.
        tells: the receiver of its signal when it ends a rank: the script that started the rank, or the rank's process
            group. "nobody": it ends no rank, the agent does.
        needs: what the image must contain, in words.
        with_roles: completes the spec of a job whose ranks have roles; raises BadInput for impossible roles. None: its
            ranks are all alike.
        elastic: what happens when hosts join or leave. "live": its ranks continue; "anew": gpurun stops them and starts
            a gang of another size; "no": its gang has one size.
        all_read_outputs: each rank may read what earlier attempts left. Otherwise rank 0 reads it and passes it on, as
            Horovod's guide recommends.
        interpreter: what runs a command whose first word is a Python file; empty = the file itself.
        by_itself: what runs such a file that is executable and names its interpreter; empty = the file itself.
        program: the name of what starts the ranks, for people.
        one_per_gpu: why each of its ranks has one GPU; "": one rank for each host is possible, too.
        joins: what a program calls to form a group, over TCP; "" = a good program may do without a group.
    """

    name: str
    needs: str
    rank_variable: str = RANK_VARIABLE
    tells: Tells = "nobody"
    argv: Callable[[JobSpec, PlacedGang], tuple[str, ...]] | None = None
    environment: Callable[[PlacedGang, RankSeat], Mapping[str, str]] = lambda _gang, _place: {}
    with_roles: Callable[[JobSpec], JobSpec] | None = None
    elastic: Literal["live", "anew", "no"] = "no"
    all_read_outputs: bool = True
    interpreter: tuple[str, ...] = ()
    by_itself: tuple[str, ...] = ()
    program: str = "the ranks"
    one_per_gpu: str = ""
    joins: str = ""


# Variables that tell a process which rank it is, and where the others are. Pure.


class RankIdentity(NamedTuple):
    """Variables that belong together.

    Attributes:
        names: the variables.
        launchers: gpurun's launchers that set them, the one to recommend first.
        prefix: more variables of this kind begin so; "" = none.
        settings: begins the names of settings that begin with `prefix`, too; "" = none.
        is_always_refused: no program on one GPU needs them from a person, and `gpurun_runtime` reads them.
    """

    names: tuple[str, ...]
    launchers: tuple[str, ...]
    prefix: str = ""
    settings: str = ""
    is_always_refused: bool = False

    def has(self, name: str) -> bool:
        """Return whether a variable is one of these."""
        is_setting = bool(self.settings) and name.startswith(self.settings)
        return name in self.names or (bool(self.prefix) and name.startswith(self.prefix) and not is_setting)


def _named(prefix: str, text: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in text.split())


_OF_TORCH = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE"
)
IDENTITIES = (
    RankIdentity(_named("", _OF_TORCH), ("torchrun", "deepspeed", "srun")),
    RankIdentity(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"), ("srun",)),
    RankIdentity(("TF_CONFIG",), ("tensorflow",)),
    RankIdentity(_named("JAX_", "COORDINATOR_ADDRESS NUM_PROCESSES PROCESS_ID"), ("jax",)),
    RankIdentity(
        _named("HOROVOD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME GLOO_RENDEZVOUS_ADDR "
               "GLOO_RENDEZVOUS_PORT ELASTIC"),
        ("horovod",), is_always_refused=True,
    ),
    RankIdentity(
        _named("OMPI_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE NODE_RANK"), ("mpirun", "horovod"),
        prefix="OMPI_COMM_WORLD_", is_always_refused=True,
    ),
    RankIdentity(
        _named("PMIX_", "RANK NAMESPACE ID SERVER_URI SERVER_URI2 SERVER_URI21 SERVER_URI3 SERVER_URI4 SERVER_TMPDIR"),
        ("mpirun", "horovod"), prefix="PMIX_", settings="PMIX_MCA_", is_always_refused=True,
    ),
    RankIdentity(_named("PMI_", "RANK SIZE FD PORT ID"), ("mpirun", "horovod"), prefix="PMI_", is_always_refused=True),
)  # fmt: skip
"""Settings such as ``OMPI_MCA_*``, ``HOROVOD_FUSION_THRESHOLD``, ``NCCL_*`` and ``OMP_NUM_THREADS`` are a person's."""

PLACES = RankIdentity(
    ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE"), ("torchrun", "deepspeed"), prefix="PET_"
)
"""Where the first rank listens, and on how many hosts ranks are: a typed launcher's settings, as its flags are."""


def is_told(name: str) -> bool:
    """Return whether a variable says which rank a process is, or where the others are."""
    return PLACES.has(name) or any(each.has(name) for each in IDENTITIES)


def with_own_variables(spec: JobSpec, launcher: Launcher) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the spec without the variables in whose place gpurun sets others, and lines that tell the person so.

    Raises:
        BadInput: a variable would give each rank the same identity.
    """
    sets = _sets(spec, launcher)
    for each in IDENTITIES:
        if names := [name for name in sorted(spec.env) if each.has(name)]:
            _refuse(spec, each, names, launcher, sets)
    places, is_replaced = [name for name in spec.env if PLACES.has(name)], any(map(PLACES.has, sets))
    if places and not is_replaced and spec.gpus > 1:
        raise Disagreement(
            f"env sets {', '.join(sorted(places))}, but the right {'values depend' if places[1:] else 'value depends'} "
            "on the hosts that gpurun chooses for the job",
            "env", min(places),
            hint="for PyTorch, choose --launcher torchrun, which sets these variables for each rank. "
            f"Otherwise remove {', '.join(sorted(places))} from env",
        )  # fmt: skip
    left = [f"{name}={spec.env[name]}" for name in places if is_replaced]
    kept = [name for name in spec.env if is_told(name) and not (is_replaced and name in places)]
    env = {name: value for name, value in spec.env.items() if name not in places or not is_replaced}
    return replace(spec, env=env), (
        *(f"  set for each rank: {' '.join(kept)}" for _ in kept[:1]),
        *(f"  left out: {shlex.join(left)} ({CHOSEN})" for _ in left[:1]),
    )


def unset_names(ranks: int, given: Collection[str]) -> tuple[str, ...]:
    """Return the variables that an image must not set for a gang of so many ranks.

    Args:
        given: the variables that the job itself sets.
    """
    found = (each for each in (*IDENTITIES, PLACES) if each.is_always_refused or ranks > 1)
    return tuple(name for each in found for name in each.names if name not in given)


def _refuse(spec: JobSpec, each: RankIdentity, names: list[str], launcher: Launcher, sets: Collection[str]) -> None:
    shown, them = ", ".join(names), "it" if len(names) == 1 else "them"
    if launcher.name in each.launchers or {*names} & {*sets}:
        raise Disagreement(
            f"{launcher.name} itself sets {shown} for each rank", "env", names[0],
            hint=f"remove {shown} from env, -e and the command",
        )  # fmt: skip
    if each.is_always_refused:
        raise Disagreement(
            f"each rank needs its own value of {shown}, so only a launcher may set {shown}", "env", names[0],
            hint=f"remove {shown}, or choose --launcher {each.launchers[0]}, which sets {them}",
        )  # fmt: skip
    if spec.one_per_host:
        raise Disagreement(
            f"the ranks of all hosts would have the same value of {shown}", "env", names[0],
            hint=f"remove {shown}; gpurun sets NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT for each host",
        )  # fmt: skip
    if spec.gpus > 1:
        raise Disagreement(
            f"all {spec.gpus} ranks would have the same value of {shown}", "env", names[0],
            hint=f"remove {shown}, or choose --launcher {each.launchers[0]}, which sets {them} for each rank",
        )  # fmt: skip


def _sets(spec: JobSpec, launcher: Launcher) -> frozenset[str]:
    """Return the variables that a launcher sets for a rank that gpurun starts."""
    gang = PlacedGang(
        "j", (Grant("h", (0,)),), {"h": "lo"}, {"h": "127.0.0.1"}, 1, is_tcp=True, roles=spec.roles,
        one_per_host=spec.one_per_host,
    )  # fmt: skip
    return frozenset(launcher.environment(gang, gang.places[0]))

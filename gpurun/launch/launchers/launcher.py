"""The description of a launcher: how it starts the ranks of a gang, and the consequences for other code. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.launch.seats import RankSeat, seats_of

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

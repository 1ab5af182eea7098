"""What a launcher is: how the ranks of a gang are started, and what follows from that for everybody else. Pure."""

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
    """A placed gang, as far as a launcher must know it.

    Attributes:
        ident: names the attempt: no other one has ever been called so.
        grants: one for each host, in rank order.
        interfaces: host → the network interface of its fabric.
        addresses: host → the IPv4 address of that interface.
        port: a TCP port that no other job of this head uses. Where ranks have roles, so are as many ports after it as
            a host has ranks.
        is_tcp: the fabric has no RDMA.
        given: the variables that the recipe sets itself: its value stays.
        roles: what the ranks do; None where they are all alike.
    """

    ident: str
    grants: Sequence[Grant]
    interfaces: Mapping[str, str]
    addresses: Mapping[str, str]
    port: int
    is_tcp: bool
    given: frozenset[str] = frozenset()
    roles: Roles | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.places)

    @property
    def first(self) -> str:
        """The host of rank 0."""
        return self.grants[0].host

    @cached_property
    def places(self) -> Sequence[RankSeat]:
        """Its ranks, in order."""
        return seats_of(self.grants, self.roles)

    def port_of(self, place: RankSeat) -> int:
        """The port on which a rank that has a role listens."""
        return self.port + 1 + place.local_rank

    def ports_of(self, host: str) -> tuple[int, ...]:
        """The ports on which ranks may listen on a host."""
        own = [self.port_of(place) for place in self.places if place.host == host and place.role]
        return (*([self.port] if host == self.first else []), *own)

    def peers(self) -> Mapping[str, Sequence[str]]:
        """Role → where each of its ranks listens, as ``address:port``; empty where ranks are all alike."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if place.role:
                found.setdefault(place.role, []).append(f"{self.addresses[place.host]}:{self.port_of(place)}")
        return found


@dataclass(frozen=True)
class Typed:
    """A launcher's own command line, as far as people type it out of habit.

    Attributes:
        program: its name.
        module: the module that ``python -m`` runs instead of it; "" if there is none.
        with_value: flags that are followed by a value.
        alone: flags that are not.
        rest: what the command of a rank is, from the flags that were found and the words behind them; None =
            the words.
    """

    program: str
    with_value: frozenset[str]
    alone: frozenset[str] = frozenset()
    module: str = ""
    rest: Callable[[Mapping[str, str], tuple[str, ...]], tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Launcher:
    """How the ranks of a gang are started.

    Attributes:
        name: what a recipe calls it.
        argv: what the first host's container runs; it starts all ranks, over the job's own sshd, and ends after them.
            None: gpurun starts the ranks of each host there, and there is no sshd.
        environment: what a rank that gpurun starts is told, besides its number.
        rank_variable: the variable that tells a rank its number.
        tells: whom it signals when it ends a rank: the script that started the rank, or the rank's process group.
            "nobody": it ends no rank, the agent does.
        needs: what the image needs for it, in words.
        with_roles: the spec of a job whose ranks have roles, complete; raises BadInput for roles that cannot be. None:
            its ranks are all alike.
        elastic: what it does when hosts come or go. "live": its ranks go on; "anew": they are ended, and a gang of
            another size is started; "no": its gang has one size.
        all_read_outputs: each rank may read what earlier attempts left. Else rank 0 does and passes it on, as
            Horovod's guide has it.
        interpreter: what runs a command whose first word is a Python file; empty = the file itself.
        typed: its own command line.
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
    typed: Typed | None = None

    @property
    def program(self) -> str:
        """What to call that which starts the ranks, in words for people."""
        return self.typed.program if self.argv is not None and self.typed is not None else "the ranks"

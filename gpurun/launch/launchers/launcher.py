"""What a launcher is: how the ranks of a gang are started, and what follows from that for everybody else. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpurun.jobs.spec import Grant, JobSpec

Tells = Literal["script", "group", "nobody"]
RANK_VARIABLE = "GPURUN_RANK"
"""What tells a rank its number where gpurun itself starts it."""


@dataclass(frozen=True)
class RankSeat:
    """One rank of a placed gang.

    Attributes:
        rank: its number, counted over the gang from 0, host by host.
        local_rank: its number on its host, from 0.
        node: the number of its host, from 0.
        host: its name in the inventory.
        local_size: how many ranks its host has.
    """

    rank: int
    local_rank: int
    node: int
    host: str
    local_size: int


@dataclass(frozen=True)
class PlacedGang:
    """A placed gang, as far as a launcher must know it.

    Attributes:
        ident: names the attempt: no other one has ever been called so.
        grants: one for each host, in rank order.
        interfaces: host → the network interface of its fabric.
        addresses: host → the IPv4 address of that interface.
        port: a TCP port that no other job of this head uses.
        is_tcp: the fabric has no RDMA.
        given: the variables that the recipe sets itself: its value stays.
    """

    ident: str
    grants: Sequence[Grant]
    interfaces: Mapping[str, str]
    addresses: Mapping[str, str]
    port: int
    is_tcp: bool
    given: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(len(grant.gpus) for grant in self.grants)

    @property
    def first(self) -> str:
        """The host of rank 0."""
        return self.grants[0].host

    def places(self) -> Iterator[RankSeat]:
        """Its ranks, in order."""
        rank = 0
        for node, grant in enumerate(self.grants):
            for local_rank in range(len(grant.gpus)):
                yield RankSeat(rank, local_rank, node, grant.host, len(grant.gpus))
                rank += 1


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
        is_elastic: whether it can go on without some ranks.
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
    is_elastic: bool = False
    all_read_outputs: bool = True
    interpreter: tuple[str, ...] = ()
    typed: Typed | None = None

    @property
    def program(self) -> str:
        """What to call that which starts the ranks, in words for people."""
        return self.typed.program if self.argv is not None and self.typed is not None else "the ranks"

"""The ranks of a gang: their numbers, their hosts, and their roles if they differ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.jobs.spec import Grant, Roles

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

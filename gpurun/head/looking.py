"""Look at hosts with the check that depends on no job, and note which of them are out.

``python -m gpurun.head.looking``: one round of looks, in a process of its own, so that a waiter stays small and never
waits for a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpurun.inventory.model import Inventory
from gpurun.state.machines import Out

AT_ONCE = 16
LOOK_TIMEOUT_S = 15.0


def look_at(
    home: Path, inventory: Inventory, hosts: Iterable[str], *, timeout_s: float = LOOK_TIMEOUT_S
) -> Mapping[str, Out | None]:
    """Check hosts, `AT_ONCE` at a time, and note the results as this user's knowledge.

    Args:
        hosts: their names in the inventory.
        timeout_s: for one host, from its first packet to its running agent.

    Returns:
        Host → why it is out; None = its check passed. A host that is not in the inventory is not among them.
    """
    raise NotImplementedError

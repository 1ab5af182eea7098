"""What kind of queue it is: the few numbers and switches of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HOUR_S = 3600.0


@dataclass(frozen=True)
class Policy:
    """How a pass orders the queue and what it may do for a gang that does not fit.

    Attributes:
        order: ``rank``: pool entitlement, priority, submission; ``submission``; ``duration``: shortest first.
        strict: the first gang that does not fit stops every gang behind it.
        consolidate: gangs of up to a host's size only on one host, larger ones only on whole hosts. This is how
            the published simulators place; without it the fewest hosts that there are will do.
        pools: heed reservations, limits and shares, and take back what was lent.
        patience_s: the dial between a short average wait (large) and a short wait of large gangs (small). A gang
            that needs half of the cluster or more, or fits on one host, is overtaken for this long before hosts
            are kept for it; one that needs the share s of the cluster for ``patience_s · (2s)⁴``, since keeping
            hosts for it costs the others so much less. See docs/scheduler.md for what was measured.
        min_run_s: how long a gang runs before it may be preempted.
    """

    name: str = "default"
    order: Literal["rank", "submission", "duration"] = "rank"
    strict: bool = False
    consolidate: bool = False
    pools: bool = True
    patience_s: float = 240 * HOUR_S
    min_run_s: float = 0.25 * HOUR_S


DEFAULT = Policy()
"""What `gpurun submit` uses. Knows no durations."""

FIFO = Policy("fifo", order="submission", strict=True, consolidate=True, pools=False)
"""Strict head of line: the yardstick."""

SJF = Policy("sjf", order="duration", strict=True, consolidate=True, pools=False)
"""Shortest job first with durations known, strict head of line: the other yardstick."""

POLICIES = {policy.name: policy for policy in (DEFAULT, FIFO, SJF)}

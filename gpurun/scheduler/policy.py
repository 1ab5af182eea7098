"""The few numbers of a pass."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Policy:
    """What a pass may do for a gang that does not fit.

    Attributes:
        patience_s: the dial between a short average wait (large) and a short wait of large gangs (small). A gang
            that needs half of the cluster or more, or fits on one host, is overtaken for this long before hosts
            are kept for it; one that needs the share s of the cluster for ``patience_s · (2s)⁴``, since keeping
            hosts for it costs the others so much less. docs/scheduler-evidence.md says what was measured.
        min_run_s: how long a gang runs before it may be preempted.
    """

    name: str = "default"
    patience_s: float = 240 * HOUR_S
    min_run_s: float = 0.25 * HOUR_S


DEFAULT = Policy()
"""What `gpurun submit` uses."""

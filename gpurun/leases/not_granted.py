"""Starts that the scheduler decided, and that could not be granted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpurun.scheduler.model import Decisions, Reason, Wait


def with_refused(decisions: Decisions, refused: Mapping[str, str]) -> Decisions:
    """Return the decisions, in which gangs with a refused grant wait.

    Args:
        refused: gang → why its grant was refused.
    """
    starts = tuple(start for start in decisions.starts if start[0].id not in refused)
    if len(starts) == len(decisions.starts):
        return decisions
    before, waits = [0], dict(decisions.waits)
    for gang, _ in decisions.starts:
        before.append(before[-1] + (gang.id not in refused))
        if gang.id in refused:
            waits[gang.id] = Wait(Reason.NO_ROOM, refused[gang.id], starts_before=before[-1])
    for name, wait in decisions.waits.items():
        waits[name] = replace(wait, starts_before=before[wait.starts_before])
    return replace(decisions, starts=starts, waits=waits)

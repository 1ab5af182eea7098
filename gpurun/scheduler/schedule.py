"""One pass: order the queue, place what fits, say why the rest waits."""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.scheduler.index import Index
from gpurun.scheduler.model import Decisions, Gang, Placement, Reason, Refusal, Snapshot, Wait
from gpurun.scheduler.placement import place_on


@dataclass(frozen=True)
class Policy:
    """What kind of queue it is."""

    name: str = "default"


DEFAULT = Policy()


def schedule(snapshot: Snapshot, policy: Policy = DEFAULT) -> Decisions:
    """Decide one pass. Commit all of the answer or none of it."""
    index = Index(snapshot)
    starts: list[tuple[Gang, Placement]] = []
    waits: dict[str, Wait] = {}
    never: dict[str, Refusal] = {}
    blocked: str | None = None
    queue = sorted(snapshot.queue, key=lambda gang: (-gang.priority, not gang.requeued, gang.submitted_s, gang.id))
    for gang in queue:
        answer = place_on(index, gang)
        if isinstance(answer, Refusal) and answer.never:
            never[gang.id] = answer
        elif blocked is not None:
            waits[gang.id] = Wait(Reason.BEHIND, f"waits behind {blocked}", behind=blocked, starts_before=len(starts))
        elif isinstance(answer, Refusal):
            blocked = gang.id
            waits[gang.id] = Wait(answer.reason, answer.message, refusal=answer, starts_before=len(starts))
        else:
            index.take(answer)
            starts.append((gang, answer))
    return Decisions(tuple(starts), waits=waits, never=never, order=tuple(gang.id for gang in queue))

"""One pass: order the queue, place what fits, explain why the rest waits.

docs/scheduler.md draws it. For each gang in order: Does its pool allow it? Does it fit? If not, may gangs on borrowed
GPUs be preempted for it? If not, the first gang that waits for room gets a reservation at its expected start, if time
limits give one. At the end of the pass, hosts are kept for the oldest gang that others have overtaken for long enough.
"""

from __future__ import annotations

from itertools import islice

from gpurun.scheduler.capacity import Capacity
from gpurun.scheduler.index import Index
from gpurun.scheduler.model import Decisions, Snapshot, by_rank
from gpurun.scheduler.patience import keep_again, keep_for_the_oldest, keep_if_oldest, set_aside
from gpurun.scheduler.placement import try_place
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.starting import consider
from gpurun.scheduler.state import Arranged, PassState
from gpurun.scheduler.waiting import lenders


def arrange(snapshot: Snapshot) -> Arranged:
    """The snapshot's index, and its inventory's capacity."""
    return Arranged(Index(snapshot), Capacity(snapshot.inventory, try_place))


def schedule(
    snapshot: Snapshot, policy: Policy = DEFAULT, arranged: Arranged | None = None, *, until: str | None = None
) -> Decisions:
    """Decide one pass. Commit all of the answer or none of it.

    Args:
        until: stop once this gang has been considered. The answer says only whether it starts, and who starts before.

    Raises:
        BadInput: the pools contradict each other; the message names one. `gpurun.inventory.load` refuses such pools.
    """
    state = PassState(snapshot, policy, arranged or arrange(snapshot))
    order = by_rank(snapshot.queue) if state.book is None else state.book.order
    state.lenders = lenders(state)
    set_aside(state, order)
    keep_again(state, [gang for gang in order if gang.kept is not None])
    for position, gang in enumerate(order):
        consider(state, gang)
        if gang.id == until:
            break
        if state.overdue and state.overdue[-1] is gang:
            keep_if_oldest(state, gang, islice(order, position + 1, None))
    keep_for_the_oldest(state)
    if state.has_freed:
        for gang in order:
            hold = state.keeping.holds.get(gang.id)
            if gang.id in state.waits and (hold is None or hold.has_patience):
                consider(state, gang)
    state.keeping.undo()
    return state.decisions(order)

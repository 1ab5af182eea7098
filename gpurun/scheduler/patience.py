"""Keep hosts for the oldest gang whose patience is over. This limits how long others can overtake a gang."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from gpurun.quantities.counts import count
from gpurun.scheduler.model import Gang, Kept, Reason
from gpurun.scheduler.starting import try_start
from gpurun.scheduler.state import PassState
from gpurun.scheduler.waiting import keep_soonest, overdue_s, reserve


def set_aside(state: PassState, queue: list[Gang]) -> None:
    """At the beginning of a pass: leave what pools may still use to the oldest gangs whose patience is over."""
    if state.book is None:
        return
    overdue: list[Gang] = []
    could_run: set[int] = set()  # what one could have, a younger one that wants the same could have, too
    for gang in sorted(queue, key=attrgetter("submitted_s", "id")):
        wish = state.wishes[gang.id]
        if overdue_s(state, gang) <= state.now_s and (wish in could_run or _is_overdue(state, gang)):
            could_run.add(wish)
            overdue.append(gang)
    state.book.set_aside(overdue)


def keep_again(state: PassState, waiting: list[Gang]) -> None:
    """Before any gang is considered: keep what earlier passes kept, or other hosts if some were lost.

    Args:
        waiting: the gangs for which hosts were kept.
    """
    state.keep_again(waiting, lambda gang, kept: _still_helps(state, gang, kept))
    lapsed = (g for g in waiting if g.kept and g.kept.why == "patience" and g.id not in state.keeping.holds)
    for gang in sorted(lapsed, key=lambda gang: gang.age):
        passes = state.book is None or state.book.gate(gang) is None
        if passes and state.may_keep and _is_overdue(state, gang):
            placement = state.room.place(gang.smallest)
            if placement is not None:
                state.keep(gang, Kept(placement, "patience"))
            else:
                keep_soonest(state, gang)


def keep_if_oldest(state: PassState, gang: Gang, behind: Iterable[Gang]) -> None:
    """Keep hosts for a gang that was left waiting and whose patience is over, unless an older gang's is over, too.

    Args:
        behind: the gangs that this pass has not looked at yet.
    """
    if not state.may_keep:
        return
    if state.oldest is None:
        older = (other for other in behind if other.submitted_s <= gang.submitted_s and _is_overdue(state, other))
        state.oldest = min((*state.overdue, *older), key=lambda other: other.age)
    if state.oldest.id == gang.id:
        _keep_for(state, gang)


def keep_for_the_oldest(state: PassState) -> None:
    """At the end of a pass: keep hosts for the oldest gang whose patience is over, unless some are kept already.

    The oldest gang comes first, not the most important: otherwise a stream of important gangs could overtake it for
    ever. It comes before any reservation: others may still overtake the gang for which GPUs are reserved.
    """
    for gang in sorted(state.overdue, key=lambda gang: gang.age):
        if not state.may_keep:
            return
        if gang.id in state.waits and state.may_have_its_hosts(gang, overdue_s(state, gang)):
            _keep_for(state, gang)


def _is_overdue(state: PassState, gang: Gang) -> bool:
    """Returns True if others have overtaken the gang for long enough, and it could run."""
    since_s = overdue_s(state, gang)
    could_run = since_s <= state.now_s and state.capacity.could_hold(gang) and state.hosts_suffice(gang)
    return could_run and state.may_have_its_hosts(gang, since_s)


def _still_helps(state: PassState, gang: Gang, kept: Kept) -> bool:
    """Returns True if GPUs that were kept for a gang will be free for it, and its pool lets it have them then."""
    if not state.hosts_suffice(gang):
        return False
    if kept.why == "preemption":
        return state.book is None or state.book.passes_without(gang, (), is_owed=True)
    if state.book is not None and state.book.gate(gang) is not None:
        return False
    mine = dict(state.index.masks(kept.placement))
    return not any(
        mine.get(n, 0) & mask
        for run in state.staying(gang, overdue_s(state, gang)).values()
        for n, mask in state.index.masks(run.placement)
    )


def _keep_for(state: PassState, gang: Gang) -> None:
    """Start the gang on GPUs that are reserved for another one, or keep hosts for it, if any would do."""
    reserved = state.keeping.reservation
    if state.book is not None and state.book.gate(gang) is not None:
        return  # others of its pool have started since it was looked at
    if reserved is None:
        if not try_start(state, gang):
            keep_soonest(state, gang)
    elif reserved.gang.id == gang.id:
        state.keeping.drop(gang.id)
        state.keep(gang, Kept(reserved.placement, "patience"))
    else:
        state.drop_reservation(reserved)
        if not try_start(state, gang):
            keep_soonest(state, gang)
        _reserve_elsewhere(state, reserved.gang, gang)


def _reserve_elsewhere(state: PassState, gang: Gang, first: Gang) -> None:
    """Reserve what the gang whose patience is over leaves."""
    if not reserve(state, gang):
        message = (
            f"the job needs {count(gang.least, 'GPU')}; other jobs have overtaken {first.id} for too long, "
            f"so {first.id} starts first"
        )
        state.wait(gang, Reason.NO_ROOM, message, behind=first.id)

"""What a pass does with one gang: start it, refuse it, or leave it to `gpurun.scheduler.waiting`."""

from __future__ import annotations

from gpurun.quantities.counts import count
from gpurun.scheduler import servers, waiting
from gpurun.scheduler.keeping import Hold
from gpurun.scheduler.model import Gang, Reason, Refusal, Wait
from gpurun.scheduler.state import PassState


def consider(state: PassState, gang: Gang) -> None:
    """Start a gang, refuse it, or say why it waits."""
    if state.is_choosy(gang):
        state.wakes.append(gang.near_until_s)
    if state.waits_like_another(gang):
        return
    if gang.wants.roles is not None and not _has_servers(state, gang):
        return
    hold = state.release(gang)
    barred = state.book.gate(gang) if state.book is not None else None
    if isinstance(barred, Refusal):
        state.never[gang.id] = barred
    elif isinstance(barred, Wait):
        waiting.barred(state, gang, barred, hold)
    elif (
        not try_start(state, gang, hold)
        and state.could_ever(gang)
        and (hold is not None or not _prefers_to_wait(state, gang))
    ):
        waiting.blocked(state, gang, hold)
    if hold is not None:
        state.keeping.hold_again()


def _has_servers(state: PassState, gang: Gang) -> bool:
    """False, and a refusal or a wait, if no host for its servers can be used."""
    wrong = servers.refuse(gang, state.snapshot)
    if wrong is not None and wrong.never:
        state.never[gang.id] = wrong
    elif wrong is not None:
        state.wait(gang, wrong.reason, wrong.message, refusal=wrong)
    return wrong is None


def try_start(state: PassState, gang: Gang, hold: Hold | None = None) -> bool:
    """Start a gang if it fits where it would start now."""
    placement = state.room.largest(gang, _most(state, gang, hold))
    if placement is None:
        return False
    state.start(gang, placement, hold)
    return True


def _most(state: PassState, gang: Gang, hold: Hold | None) -> int:
    """Return the most GPUs the gang may start with.

    If gpurun stopped other gangs for an elastic gang, it starts with the GPUs that they released. With more GPUs it
    could keep those gangs from starting again. It grows when no gang waits.
    """
    if gang.wants.min_gpus is None:
        return gang.gpus
    most = gang.gpus if state.book is None else min(gang.gpus, state.book.allows(gang))
    if hold is not None and hold.kept is not None and hold.kept.why == "preemption":
        most = min(most, hold.placement.gpus)
    return most // gang.step * gang.step


def _prefers_to_wait(state: PassState, gang: Gang) -> bool:
    """True, and a wait, if the gang would fit, but still waits for one rack or host."""
    placement = state.room.anywhere(gang) if state.is_choosy(gang) else None
    if placement is None:
        return False
    place = f"{count(len(placement.grants), 'host')} in {count(len(placement.racks), 'rack')}"
    message = f"the job fits on {place}, but prefers one {gang.wants.constraints.prefer}"
    state.wait(gang, Reason.LOCALITY, message, until_s=gang.near_until_s)
    return True

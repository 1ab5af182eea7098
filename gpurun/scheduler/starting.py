"""What a pass does with one gang: start it, refuse it, or leave it to `gpurun.scheduler.waiting`."""

from __future__ import annotations

from gpurun.scheduler import servers, waiting
from gpurun.scheduler.keeping import Hold
from gpurun.scheduler.model import Gang, Placement, Reason, Refusal, Wait
from gpurun.scheduler.state import PassState


def consider(state: PassState, gang: Gang) -> None:
    """Start a gang, refuse it, or say why it waits."""
    if state.waits_like_another(gang):
        return
    if gang.servers and not _has_servers(state, gang):
        return
    hold = state.release(gang)
    barred = state.book.gate(gang) if state.book is not None else None
    if isinstance(barred, Refusal):
        state.never[gang.id] = barred
    elif isinstance(barred, Wait):
        waiting.barred(state, gang, barred, hold)
    elif not try_start(state, gang, hold) and gang.id not in state.waits and state.could_ever(gang):
        waiting.blocked(state, gang, hold)


def _has_servers(state: PassState, gang: Gang) -> bool:
    """False, and a refusal or a wait, if no host for its servers can be used."""
    wrong = servers.refuse(gang, state.snapshot)
    if wrong is not None and wrong.never:
        state.never[gang.id] = wrong
    elif wrong is not None:
        state.wait(gang, wrong.reason, wrong.message, refusal=wrong)
    return wrong is None


def leave_waiting(state: PassState, gangs: list[Gang]) -> None:
    """Say of the rest of a strict queue, once for all of it, that it waits."""
    message = f"waits behind {state.first_blocked}"
    wait = Wait(Reason.BEHIND, message, behind=state.first_blocked, starts_before=len(state.starts))
    for gang in gangs:
        if state.could_ever(gang):
            state.waits[gang.id] = wait


def try_start(state: PassState, gang: Gang, hold: Hold | None = None) -> bool:
    """Start a gang if it fits. False, and a wait, if it prefers to wait for something nearer."""
    placement = state.room.largest(gang, _most(state, gang, hold))
    if placement is None or not _near_enough(state, gang, placement):
        return False
    state.start(gang, placement)
    return True


def _most(state: PassState, gang: Gang, hold: Hold | None) -> int:
    """Return the most GPUs the gang may start with.

    If gpurun stopped other gangs for an elastic gang, it starts with the GPUs that they released. With more GPUs it
    could keep those gangs from starting again. It grows when no gang waits.
    """
    if gang.min_gpus is None:
        return gang.gpus
    most = gang.gpus if state.book is None else min(gang.gpus, state.book.allows(gang))
    if hold is not None and hold.kept is not None and hold.kept.why == "preemption":
        most = min(most, hold.placement.gpus)
    return most // gang.step * gang.step


def _near_enough(state: PassState, gang: Gang, placement: Placement) -> bool:
    """False, and a wait, if the gang still prefers to wait for something nearer than this."""
    prefer, until_s = gang.constraints.prefer, gang.submitted_s + gang.constraints.locality_wait_s
    spread = len(placement.racks) if prefer == "rack" else len(placement.grants)
    if not gang.waits_to_be_near or spread == 1 or state.now_s >= until_s:
        return True
    state.wakes.append(until_s)
    place = f"{len(placement.grants)} hosts in {len(placement.racks)} racks"
    state.wait(gang, Reason.LOCALITY, f"fits on {place}, but prefers one {prefer}", until_s=until_s)
    return False

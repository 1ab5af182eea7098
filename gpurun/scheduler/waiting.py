"""Decide about a gang that does not fit: preempt borrowers, reserve, keep hosts, or wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpurun.quantities.counts import count
from gpurun.scheduler.book import BORROWING
from gpurun.scheduler.capacity import share_of
from gpurun.scheduler.future import Release, first_fit
from gpurun.scheduler.keeping import Hold
from gpurun.scheduler.model import ENDLESS, Gang, Kept, Placement, Reason, Running, Wait
from gpurun.scheduler.preempt import Hunt
from gpurun.scheduler.state import PassState, some_hosts


def barred(state: PassState, gang: Gang, wait: Wait, hold: Hold | None) -> None:
    """Handle a gang whose pool has no more for it: it waits, for gangs that stop or until others can be stopped."""
    if not state.could_ever(gang):
        return
    if hold is not None and hold.kept is not None and hold.kept.why == "preemption":
        state.keep(gang, hold.kept)
    elif _preempt_for(state, gang):
        return
    wait = state.waits[gang.id] = replace(wait, starts_before=len(state.starts))
    if hold is None:
        state.share_wait(gang, wait)


def blocked(state: PassState, gang: Gang, hold: Hold | None) -> None:
    """Handle a gang for which there is no room now."""
    kept = None if hold is None else hold.kept
    if kept is not None and kept.why == "preemption":
        state.keep(gang, kept)
    elif _preempt_for(state, gang):
        pass
    elif hold is not None and kept is not None:
        state.keep(gang, _sooner(state, gang, hold) or kept)
    elif state.hosts_suffice(gang):
        _wait_for_room(state, gang)
    else:
        _wait_for_hosts(state, gang)


def lenders(state: PassState) -> list[Running]:
    """Running gangs that may be stopped for gangs that are entitled to their GPUs."""
    if state.book is None:
        return []
    least_s, book = state.policy.min_run_s, state.book
    borrowing = [run for run in state.running if not run.stopping and book.lends(run.gang)]
    state.wakes += [run.granted_s + least_s for run in borrowing]
    return [run for run in borrowing if state.now_s - run.granted_s >= least_s]


def patience_of(state: PassState, gang: Gang) -> float:
    """For how many seconds the gang may be overtaken; see `Policy.patience_s`."""
    least = gang.least
    if least <= state.index.height:
        return state.policy.patience_s
    wish = state.wishes[gang.id]
    known = state.patience.get(wish)
    if known is None:
        share = share_of(state.index.lanes(gang.wants.constraints), least)
        known = state.patience[wish] = state.policy.patience_s * min(1.0, (2 * share) ** 4)
    return known


def overdue_s(state: PassState, gang: Gang) -> float:
    """When the gang's patience ends. Nothing is kept for it while it waits for one rack of its own choice."""
    return max(gang.submitted_s + patience_of(state, gang), gang.near_until_s)


def keep_soonest(state: PassState, gang: Gang) -> bool:
    """Keep the hosts that will probably be free soonest.

    Guesses that a gang continues for as long as it has run, because durations are heavy-tailed. GPUs in use outside of
    this inventory's jobs count as free last. GPUs whose holders are `staying` are not kept. A gang for which gangs were
    stopped goes first, and its GPUs are kept for the time after it.
    """
    now_s, since_s = state.now_s, overdue_s(state, gang)
    staying = state.staying(gang, since_s)
    ends = [run for run in state.running if run.gang.id not in staying]
    releases = _releases(state, gang, ends, lambda run: min(2 * now_s - run.granted_s, run.free_s(now_s)))
    releases += [
        Release(now_s + min(owed.gang.longest_s, state.policy.patience_s), owed.gang.id, owed.masks)
        for owed in state.keeping.owed_to_others(gang)
    ]
    if not state.gives_up_taken(since_s):
        taken = state.keeping.not_for_others(gang)(state.index.masks_of(state.snapshot.taken))
        releases.append(Release(ENDLESS, "", taken))
    found = first_fit(state.index, gang.smallest, releases, state.place)
    if found is None:
        return False
    state.keep(gang, Kept(found[1], "patience"))
    return True


def _wait_for_room(state: PassState, gang: Gang) -> None:
    patience_s = patience_of(state, gang)
    state.note_patience(gang, patience_s)
    if _fits_but_for_a_reservation(state, gang, patience_s):
        return
    if state.first_blocked is None:
        state.first_blocked = gang.id
        if reserve(state, gang):
            return
    message = state.capacity.refuse(state.index, gang).message
    state.share_wait(gang, state.wait(gang, Reason.NO_ROOM, message), patience_s)


def _wait_for_hosts(state: PassState, gang: Gang) -> None:
    message = state.capacity.refuse(state.index, gang).message
    message += "; the job needs hosts that are out of use"
    state.share_wait(gang, state.wait(gang, Reason.HOSTS, message))


def _fits_but_for_a_reservation(state: PassState, gang: Gang, patience_s: float) -> bool:
    """True, and a wait, if only GPUs that are held until a known time keep the gang from starting."""
    if not state.room.fits_without_timed_holds(gang):
        return False
    behind = state.keeping.against(gang)[0]
    message = f"enough GPUs are free for the job, but the job could delay the start of {behind}"
    state.share_wait(gang, state.wait(gang, Reason.RESERVED, message, behind=behind), patience_s)
    return True


def reserve(state: PassState, gang: Gang) -> bool:
    """EASY: reserve at the earliest time at which the gang fits if the others use their whole time limits."""
    found = _known_fit(state, gang)
    if found is None:
        return False
    at_s, placement = found
    state.keeping.hold(Hold(gang, placement, state.index.masks(placement), at_s))
    until = f"gpurun keeps {some_hosts(placement)} for the job until {_ends(state, placement, at_s)} there"
    message = f"the job needs {count(gang.least, 'GPU')}; {until}"
    state.wait(gang, Reason.NO_ROOM, message, expected_start_s=at_s)
    return True


def _ends(state: PassState, placement: Placement, at_s: float) -> str:
    """What must end on some hosts by a time, for people."""
    hosts = set(placement.hosts)
    runs = [r for r in state.running if r.free_s(state.now_s) <= at_s and hosts.intersection(r.placement.hosts)]
    return "the stopping jobs have ended" if all(run.stopping for run in runs) else "time limits end"


def _sooner(state: PassState, gang: Gang, hold: Hold) -> Kept | None:
    """A placement that is expected to be free before the one that is kept, if there is one."""
    found = _known_fit(state, gang)
    return Kept(found[1], "patience") if found is not None and found[0] < hold.free_s else None


def _known_fit(state: PassState, gang: Gang) -> tuple[float, Placement] | None:
    """Return the earliest time at which the gang is expected to fit, and its placement. None if unknown."""
    ends = [run for run in state.running if run.free_s(state.now_s) != ENDLESS]
    releases = _releases(state, gang, ends, lambda run: run.free_s(state.now_s))
    return first_fit(state.index, gang.smallest, releases, state.place)


def _releases(
    state: PassState, gang: Gang, running: Iterable[Running], at_s: Callable[[Running], float]
) -> list[Release]:
    """Return when running gangs release GPUs that are not kept for another gang."""
    only = state.keeping.not_for_others(gang)
    return [Release(at_s(run), run.gang.id, only(state.index.masks(run.placement))) for run in running]


def _preempt_for(state: PassState, gang: Gang) -> bool:
    """Stop gangs that run on borrowed GPUs, if this one is entitled to them. It gets the fewest that it needs.

    One that is not preemptible is entitled to what its pool lets it have. Its standing also counts gangs that rank
    before it and wait, so that one whose patience is over would wait for borrowers that no gang stops.
    """
    book = state.book
    if book is None or not state.lenders or (gang.wants.preemptible and book.standing[gang.id] == BORROWING):
        return False
    only = state.keeping.not_for_others(gang)
    hunt = Hunt(
        state.index,
        gang.smallest,
        [(run, only(state.index.masks(run.placement))) for run in state.lenders],
        state.now_s,
        state.place,
        fair=lambda runs: book.may_take([run.gang for run in runs]),
        enough=lambda runs: book.passes_without(gang, [run.gang for run in runs]),
    )
    found = hunt.victims()
    if found is None:
        return False
    victims, placement = found
    state.stop(victims, gang)
    state.lenders = [run for run in state.lenders if run not in victims and book.lends(run.gang)]
    state.keep(gang, Kept(placement, "preemption"))
    return True

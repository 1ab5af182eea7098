"""One pass: in which order gangs are looked at, which start, wait, grow, or stop for others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from gpurun.jobs.record import Kept
from gpurun.jobs.spec import Placement
from gpurun.quantities import count
from gpurun.scheduler import model
from gpurun.scheduler.model import (
    DEFAULT,
    ENDLESS,
    Decisions,
    Gang,
    Policy,
    Reason,
    Refusal,
    Running,
    Snapshot,
    Wait,
    by_rank,
)
from gpurun.scheduler.placement import Capacity, Index, share_of, try_place
from gpurun.scheduler.pools import BORROWING, Tree, tree_of
from gpurun.scheduler.state import Arranged, Hold, Hunt, PassState, Release, carried_out, first_fit, some_hosts

# Decide about a gang that does not fit: preempt borrowers, reserve, keep hosts, or wait.


def bar_gang(state: PassState, gang: Gang, wait: Wait, hold: Hold | None) -> None:
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


# What a pass does with one gang: start it, refuse it, or leave it to `gpurun.scheduler.passes`.


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
        bar_gang(state, gang, barred, hold)
    elif (
        not try_start(state, gang, hold)
        and state.could_ever(gang)
        and (hold is not None or not _prefers_to_wait(state, gang))
    ):
        blocked(state, gang, hold)
    if hold is not None:
        state.keeping.hold_again()


def _has_servers(state: PassState, gang: Gang) -> bool:
    """False, and a refusal or a wait, if no host for its servers can be used."""
    wrong = model.refuse(gang, state.snapshot)
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


# Keep hosts for the oldest gang whose patience is over. This limits how long others can overtake a gang.


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


# One pass: order the queue, place what fits, explain why the rest waits.


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
        BadInput: the pools contradict each other; the message names one. `gpurun.inventory.read` refuses such pools.
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


def growth(snapshot: Snapshot, gang: Gang, now: Placement, policy: Policy = DEFAULT) -> Placement | None:
    """Return what an elastic gang may take in addition, on hosts that it does not use yet; None if nothing.

    Waiting gangs come first: it gets no host on which a waiting gang may run, and nothing of a pool for which a gang
    waits. Its own racks come before others; its pool's limits apply.

    Args:
        snapshot: the gang is among its running ones.
        gang: with the `gpus` that it wants.
        now: all it holds, including what it is about to release.
    """
    asked, step = gang.wants.constraints, gang.step
    missing = (gang.gpus - now.gpus) // step * step
    if missing <= 0 or asked.locality == "host":
        return None
    decisions = schedule(snapshot, policy)
    if _pool_is_waited_for(snapshot, gang, decisions):
        return None
    after = carried_out(snapshot, decisions)
    others = _nobody_waits_for(after, _alike(snapshot, gang, now), decisions)
    near = tuple(name for name in others if snapshot.inventory.by_name[name].rack in now.racks)
    for hosts in dict.fromkeys((near, others if asked.locality == "any" else near)):
        more = replace(asked, hosts=hosts, generations=(now.generation,), prefer="any", locality_wait_s=0.0)
        rest = gang.but(id=f"{gang.id}+", gpus=missing, kept=None).wanting(min_gpus=step, constraints=more)
        starts = schedule(replace(after, queue=(rest,)), policy).starts if hosts else ()
        if starts:
            return starts[0][1]
    return None


def regrown(snapshot: Snapshot, gang: Gang, now: Placement, policy: Policy = DEFAULT) -> Placement | None:
    """Return the placement that an elastic gang would get if it stopped and was queued now; None unless it is larger.

    Waiting gangs come first here, too.

    Args:
        snapshot: the gang is among its running ones.
        gang: with the `gpus` that it wants.
        now: what it holds.
    """
    decisions = schedule(snapshot, policy)
    if now.gpus >= gang.gpus or _pool_is_waited_for(snapshot, gang, decisions):
        return None
    after = carried_out(snapshot, decisions)
    others = tuple(run for run in after.running if run.gang.id != gang.id)
    queue = (*after.queue, gang.but(requeued=True, kept=None))
    starts = schedule(replace(after, running=others, queue=queue), policy).starts
    found = next((placement for started, placement in starts if started.id == gang.id), None)
    if found is None or found.gpus <= now.gpus:
        return None
    mine = set(now.grants)
    more = tuple(grant.host for grant in found.grants if grant not in mine)
    return found if _nobody_waits_for(after, more, decisions) == more else None


def _waiting(snapshot: Snapshot, decisions: Decisions) -> Iterator[tuple[Gang, Reason]]:
    """The gangs that could run on the hosts that are in use now, and what they wait for."""
    for gang in snapshot.queue:
        wait = decisions.waits.get(gang.id)
        if wait is not None and wait.reason is not Reason.HOSTS:
            yield gang, wait.reason


def _pool_is_waited_for(snapshot: Snapshot, gang: Gang, decisions: Decisions) -> bool:
    """Returns True if a gang waits for the use of a pool in which the elastic gang counts, too."""
    tree = tree_of(snapshot.inventory.pools, snapshot.inventory.total_gpus)
    mine = _limited(tree, gang)
    return any(
        reason is Reason.POOL and not mine.isdisjoint(_limited(tree, other))
        for other, reason in _waiting(snapshot, decisions)
    )


def _limited(tree: Tree, gang: Gang) -> set[str]:
    leaf = tree.leaf_of(gang.wants.pool)
    return set() if leaf is None else {leaf, *(tree.nodes[leaf].above[:-1])}


def _nobody_waits_for(snapshot: Snapshot, hosts: tuple[str, ...], decisions: Decisions) -> tuple[str, ...]:
    """Of some hosts, those on which no gang that waits for GPUs may run."""
    arranged = arrange(snapshot)
    index, capacity = arranged.index, arranged.capacity
    may_use: dict[int, Callable[[int], bool]] = {}
    for gang, reason in _waiting(snapshot, decisions):
        shape = capacity.shape(gang)
        if reason is not Reason.POOL and shape not in may_use:
            may_use[shape] = capacity.may_use(index, gang)
    return tuple(host for host in hosts if not any(may(index.number[host]) for may in may_use.values()))


def _alike(snapshot: Snapshot, gang: Gang, now: Placement) -> tuple[str, ...]:
    """Hosts that ranks of the gang could be on as well: horovodrun takes one network interface for all."""
    inventory, wanted = snapshot.inventory, gang.wants.constraints.hosts
    interface = inventory.fabric_of(inventory.by_name[now.hosts[0]]).interface
    return tuple(
        host.name
        for host in inventory.hosts
        if host.generation == now.generation and host.name not in now.hosts and (not wanted or host.name in wanted)
        and inventory.fabric_of(host).interface == interface
    )  # fmt: skip

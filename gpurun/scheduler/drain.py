"""Decide about gangs on hosts that are being drained. Pure.

A pass stops the gangs that move, a running elastic gang releases the host, and commands print the decision. All use the
same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Grant
from gpurun.quantities.counts import count
from gpurun.scheduler.model import Gang, Reason, Snapshot
from gpurun.scheduler.schedule import schedule
from gpurun.scheduler.wording import in_time

Fate = Literal["stops", "shrinks", "moves", "waits", "ends"]


@dataclass(frozen=True)
class Tenant:
    """A gang that holds GPUs of a draining host.

    Attributes:
        gang: with the GPUs that it wants.
        members: where its ranks run, in rank order.
        hosts: the draining hosts on which it holds GPUs.
        begun: its containers may exist; before that it has no work to lose.
        stopping: it is already stopping.
    """

    gang: Gang
    members: tuple[Grant, ...]
    hosts: tuple[str, ...]
    begun: bool = True
    stopping: bool = False

    @property
    def may_shrink(self) -> bool:
        """Return True if it can release the draining hosts. One that reforms stops, and starts at another size."""
        wants = self.gang.wants
        return not wants.reforms and may_lose(self.members, self.hosts, wants.min_gpus)

    @property
    def may_stop(self) -> bool:
        """Return True if it may be stopped, because it starts again."""
        wants = self.gang.wants
        return wants.preemptible or wants.reforms or wants.max_restarts > 0


@dataclass(frozen=True)
class Departure:
    """The decision about one gang.

    Attributes:
        fate: ``stops``: it is already stopping; ``shrinks``: it releases the hosts and continues on its others;
            ``moves``: it stops and is queued again; ``waits``: the drain waits for its end; ``ends``: the deadline
            is over, so gpurun stops it for good.
        why: one phrase. For ``waits`` and ``ends``: why it does not move.
        until_s: for ``waits``: when gpurun stops it; None = never.
    """

    gang: str
    hosts: tuple[str, ...]
    fate: Fate
    why: str = ""
    until_s: float | None = None


def departures(
    inventory: Inventory,
    unusable: Collection[str],
    draining: Mapping[str, float | None],
    tenants: Iterable[Tenant],
    now_s: float,
) -> tuple[Departure, ...]:
    """Decide about each gang.

    Args:
        unusable: all hosts that get no new gangs, including draining ones. A gang moves only if the other hosts could
            hold it, so that gpurun stops no gang that could not start again.
        draining: host → when gangs that cannot move are stopped; None = the drain waits for them.
    """
    empty = Snapshot(inventory, unusable=dict.fromkeys(unusable, "out of use"), now_s=now_s)
    found = []
    for tenant in tenants:
        fate, why = _fate(tenant, empty)
        ends = [end for host in tenant.hosts if (end := draining[host]) is not None]
        until_s = min(ends) if ends and fate == "waits" else None
        if until_s is not None and now_s >= until_s:
            fate = "ends"
        found.append(Departure(tenant.gang.id, tenant.hosts, fate, why, until_s))
    return tuple(found)


def may_lose(members: Iterable[Grant], hosts: Collection[str], least: int | None) -> bool:
    """Return True if an elastic gang can continue without these hosts.

    Args:
        members: where its ranks run, in rank order. Its launcher is on the first host.
        least: the fewest GPUs that it may have; None = it is not elastic.
    """
    grants = tuple(members)
    if least is None or not grants or grants[0].host in hosts:
        return False
    return sum(len(grant.gpus) for grant in grants if grant.host not in hosts) >= least


def host_state(host: str, found: Iterable[Departure], *, is_empty: bool) -> str:
    """The state of a host that is being drained, for people: ``draining: 2 gangs leave, 1 must end first``."""
    if is_empty:
        return "drained"
    here = [departure.fate for departure in found if host in departure.hosts]
    waited, leave = here.count("waits"), len(here) - here.count("waits")
    leaving = count(leave, "gang leaves", "gangs leave") if leave else ""
    parts = [part for part in (leaving, f"{waited} must end first" if waited else "") if part]
    return f"draining: {', '.join(parts)}" if parts else "draining"


def in_words(departure: Departure, now_s: float) -> str:
    """Describe the decision for people; the sentence's subject is the gang."""
    match departure.fate:
        case "stops":
            return "is ending"
        case "shrinks":
            return f"releases {', '.join(departure.hosts)} and continues on its other hosts"
        case "moves":
            return "stops, is queued again and continues on other hosts"
        case "ends":
            return f"is stopped, because the drain's deadline is over; {departure.why}"
    end = ""
    if departure.until_s is not None:
        end = f", and is stopped {in_time(departure.until_s, now_s)} if it still runs"
    return f"must end before the drain is complete{end}: {departure.why}"


def _fate(tenant: Tenant, empty: Snapshot) -> tuple[Fate, str]:
    if tenant.stopping:
        return "stops", "the job is ending"
    if tenant.begun and tenant.may_shrink:
        return "shrinks", "the job is elastic and has enough GPUs on other hosts"
    if tenant.begun and not tenant.may_stop:
        return "waits", "the job is not preemptible, and max_restarts is 0"
    if (refused := _refused(tenant.gang, empty)) is not None:
        return "waits", f"no other hosts could run the job: {refused}"
    return "moves", "gpurun may restart the job" if tenant.begun else "the job's ranks have not started"


def _refused(gang: Gang, empty: Snapshot) -> str | None:
    """Return why the scheduler would not start the gang even if nothing else ran or waited; None if it would."""
    try:
        decisions = schedule(replace(empty, queue=(gang.but(kept=None),)))
    except BadInput as error:
        return error.message
    wait, never = decisions.waits.get(gang.id), decisions.never.get(gang.id)
    if never is not None:
        return never.message
    return None if wait is None or wait.reason is Reason.LOCALITY else wait.message

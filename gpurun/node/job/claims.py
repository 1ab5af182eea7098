"""Take, check and release claims on this host's GPUs (docs/decisions/0012-claims-on-the-host.md).

The head calls `take` before it ships an image, before it creates a container, and again when the container exists and
before it starts. The last check decides: if the containers of two claimants exist, the one that looks last sees the
other's container, and does not start. So no GPU has two gangs, whatever happens to volumes in between.
"""

from typing import Any, Dict, List, Protocol, Sequence

from gpurun.node.agent.call import Call, OpError
from gpurun.node.gpu.claim_rules import Card, Claimant, Container, Refused, Seen, Step, Volume, decide, refusal
from gpurun.node.job import hooks
from gpurun.node.job.claim_store import DockerStore, hide_life, show_life


class Store(Protocol):
    """The storage of claims: `DockerStore`, or a test's."""

    def look(self) -> Seen:
        """Return all present claims."""

    def make(self, me: Claimant, card: Card) -> Claimant:
        """Claim a GPU unless it is claimed; return the present claimant. Atomic."""

    def remove(self, volume: Volume) -> bool:
        """Remove exactly this claim; return False if it is still there, or another one now has its name."""

    def still_runs(self, volume: Volume) -> str:
        """Return what is still left of a stale claim's holder on this host; "" if nothing is."""


def take(store: Store, me: Claimant, wanted: Sequence[Card]) -> List[Refused]:
    """Claim all these GPUs, or none of those that were not claimed before. Idempotent.

    Returns:
        The GPUs that others hold; empty if all are ours now.
    """
    seen = store.look()
    steps = decide(me, wanted, seen)
    refused = [step.refused for step in steps if step.refused is not None]
    made: List[Card] = []
    for step in [] if refused else steps:
        refused = _take_over(store, step, seen)
        if refused:
            break
        if step.make:
            holder = store.make(me, step.card)
            if holder.key != me.key:
                refused = [refusal(step.card, holder, seen, "this job has just claimed the GPU")]
                break
            made.append(step.card)
    if refused:
        _give_back(store, me, made)
    return refused


def _take_over(store: Store, step: Step, seen: Seen) -> List[Refused]:
    """Remove the stale claims on a GPU; return the holders that turn out to be alive."""
    for volume in step.over:
        why = store.still_runs(volume)
        if not why and not store.remove(volume):
            why = "another job has just taken over the claim"
        if why:
            return [refusal(step.card, volume.claimant, seen, why)]
    return []


def _give_back(store: Store, me: Claimant, made: Sequence[Card]) -> None:
    if made:
        for volume in store.look().volumes:
            if volume.claimant.key == me.key and volume.card in made:
                store.remove(volume)


def release(store: Store, me: Claimant) -> List[str]:
    """Remove every claim of an attempt; return the names of those that are still there. Idempotent.

    Only a fence calls this, after it has checked that nothing of the job is left on this host.
    """
    for volume in store.look().volumes:
        if volume.claimant.key == me.key:
            store.remove(volume)
    return [volume.name for volume in store.look().volumes if volume.claimant.key == me.key]


# -- operations ----------------------------------------------------------------------------------------


def take_here(call: Call, claimant: Dict[str, Any], cards: List[List[Any]]) -> None:
    """Claim GPUs of this host for an attempt, and show that its agent is connected. Idempotent.

    Args:
        claimant: the fields of a `Claimant`.
        cards: ``[index, uuid]`` of each GPU; ``""`` for an unknown UUID.

    Raises:
        OpError: ``claimed``: another attempt holds one of them. ``refused`` in the detail lists the holders, as
            `Refused`.
    """
    me = Claimant(**claimant)
    show_life(me)
    refused = take(DockerStore(call), me, [(int(index), str(uuid)) for index, uuid in cards])
    if refused:
        hide_life(me)
        raise OpError("claimed", "other jobs hold %d of the GPUs" % len(refused), refused=refused)


def take_first(call: Call, claimant: Dict[str, Any], cards: List[List[Any]]) -> None:
    """Claim GPUs as `take_here`, for the first time in an attempt, and note that it holds them."""
    take_here(call, claimant, cards)
    hooks.begin(str(claimant["job"]), int(claimant["attempt"]))


def release_here(call: Call, me: Claimant) -> List[str]:
    """Remove an attempt's claims on this host, as `release`, and the sign that its agent is connected."""
    hide_life(me)
    return release(DockerStore(call), me)


def list_here(call: Call) -> Seen:
    """Return every claim on this host, and every container of a gpurun job."""
    return DockerStore(call).look()


def of_others(call: Call, job: str, attempt: int) -> List[Container]:
    """Return the containers on this host of other gpurun jobs, and of this job's later attempts."""
    found = DockerStore(call).look().containers
    return [each for each in found if each.claimant.job != job or each.claimant.attempt > attempt]


OPS = {"take": take_first, "list": list_here}

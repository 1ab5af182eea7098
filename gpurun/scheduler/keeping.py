"""GPUs that a pass holds for one gang against others: those kept over passes, and one reservation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpurun.scheduler.index import Index, Masks
from gpurun.scheduler.model import ENDLESS, Gang, Kept, Placement, Running


@dataclass(frozen=True)
class Hold:
    """GPUs that are held for one gang.

    Attributes:
        free_s: when all of them are expected to be free. Gangs that end before may use them until then. ENDLESS:
            unknown, so no other gang may use them.
        kept: what the caller stores; None for a reservation, which is for this pass only.
    """

    gang: Gang
    placement: Placement
    masks: Masks
    free_s: float
    kept: Kept | None = None

    @property
    def is_owed(self) -> bool:
        """Returns True if gangs were stopped for it."""
        return self.kept is not None and self.kept.why == "preemption"

    @property
    def has_patience(self) -> bool:
        """Returns True if it is kept because others overtook the gang for long enough."""
        return self.kept is not None and self.kept.why == "patience"

    def outlasted_by(self, gang: Gang, now_s: float) -> bool:
        """Returns True if a gang that starts now may still run when these GPUs are wanted."""
        return self.free_s == ENDLESS or now_s + gang.longest_s > self.free_s


class Keeping:
    """Removes held GPUs from the index. `undo` restores them.

    Attributes:
        holds: gang → what is held for it.
    """

    def __init__(self, index: Index, now_s: float) -> None:
        self.index, self.now_s = index, now_s
        self.holds: dict[str, Hold] = {}
        self._taken: dict[str, Masks] = {}
        self._timed: list[Hold] = []
        self._against: dict[float, tuple[str, ...]] = {}  # gangs' longest_s → for whom GPUs are held against them

    @property
    def reservation(self) -> Hold | None:
        """The one hold that is not kept over passes."""
        return next((hold for hold in self.holds.values() if hold.kept is None), None)

    @property
    def has_patience(self) -> bool:
        """Returns True if GPUs are kept for a gang because others overtook it for long enough."""
        return any(hold.has_patience for hold in self.holds.values())

    def possible_again(
        self, waiting: Iterable[Gang], running: Sequence[Running], taken: Masks
    ) -> Iterator[tuple[Gang, Kept]]:
        """Yield what earlier passes kept and this one may keep, too, the oldest gang first. The caller may `keep` it.
        GPUs for which gangs were stopped come first: another gang may wait for what they are used for.

        Left out are: a placement on a lost or missing host; one with GPUs that another holds now or that are kept for
        another gang; one for which gangs should stop that were not told yet. This pass decides those again.
        """
        going_on = _union(self.index.masks(run.placement) for run in running if not run.stopping)
        promised = {"preemption": _union([taken]), "patience": _union([taken])}
        kepts = [(gang, gang.kept) for gang in waiting if gang.kept is not None]
        for gang, kept in sorted(kepts, key=lambda kept: (kept[1].why != "preemption", kept[0].age)):
            if not self.index.usable(kept.placement):
                continue
            masks = self.index.masks(kept.placement)
            if _overlap(promised[kept.why], masks) or (kept.why == "preemption" and _overlap(going_on, masks)):
                continue
            yield gang, kept
            if gang.id in self.holds:
                promised[kept.why] = _union((list(promised[kept.why].items()), masks))

    def keep(self, gang: Gang, kept: Kept, running: Iterable[Running]) -> None:
        """Hold GPUs, free now or later, for a gang, in this pass and in those that follow."""
        masks = self.index.masks(kept.placement)
        self.hold(Hold(gang, kept.placement, masks, self._free_s(gang, kept, masks, running), kept))

    def hold(self, hold: Hold) -> None:
        """Hold GPUs for a gang from here on."""
        self.holds[hold.gang.id] = hold
        self._taken[hold.gang.id] = self.index.hold(hold.masks)
        if hold.free_s != ENDLESS:
            self._timed.append(hold)
            self._against.clear()

    def drop(self, gang: str) -> Hold | None:
        """Release what is held for a gang. Returns it, None if there was nothing."""
        self.index.give(self._taken.pop(gang, ()))
        self._timed = [hold for hold in self._timed if hold.gang.id != gang]
        self._against.clear()
        return self.holds.pop(gang, None)

    def hold_again(self) -> None:
        """Hold what is free now of GPUs that were held for two gangs: the one for which gangs were stopped had them."""
        for name, hold in self.holds.items():
            self._taken[name] = [*self._taken.get(name, ()), *self.index.hold(hold.masks)]

    def owed_to_others(self, gang: Gang) -> list[Hold]:
        """What other gangs have had gangs stopped for."""
        return [hold for hold in self.holds.values() if hold.is_owed and hold.gang.id != gang.id]

    def against(self, gang: Gang) -> tuple[str, ...]:
        """Return the gangs for which GPUs are held that this gang may not use, among holds with a known time."""
        if not self._timed:
            return ()
        known = self._against.get(gang.longest_s)
        if known is None:
            known = tuple([hold.gang.id for hold in self._timed if hold.outlasted_by(gang, self.now_s)])
            self._against[gang.longest_s] = known
        return known

    def open(self, against: tuple[str, ...]) -> None:
        """Let a gang use the GPUs of all holds whose time is known, except these."""
        for hold in self._timed:
            if hold.gang.id not in against:
                self.index.give(self._taken.pop(hold.gang.id, ()))

    def close(self) -> None:
        """End `open`: hold what is still free."""
        for hold in self._timed:
            if hold.gang.id not in self._taken:
                self._taken[hold.gang.id] = self.index.hold(hold.masks)

    def not_for_others(self, gang: Gang) -> Callable[[Masks], Masks]:
        """Return a function that removes GPUs that are held for another gang."""
        others = _union(hold.masks for hold in self.holds.values() if hold.gang.id != gang.id)
        if not others:
            return lambda masks: masks
        return lambda masks: [(n, mask & ~others.get(n, 0)) for n, mask in masks]

    def undo(self) -> None:
        """Leave in the index only what is really in use."""
        for masks in self._taken.values():
            self.index.give(masks)
        self._taken.clear()

    def _free_s(self, gang: Gang, kept: Kept, masks: Masks, running: Iterable[Running]) -> float:
        if kept.why == "preemption":
            return ENDLESS
        wanted = {n: mask & ~self.index.free[n] for n, mask in masks}
        first = [hold.gang.longest_s for hold in self.owed_to_others(gang) if _overlap(wanted, hold.masks)]
        free_s = self.now_s + max(first, default=0.0)
        for run in running:
            used = self.index.masks(run.placement)
            if _overlap(wanted, used):
                free_s = max(free_s, run.free_s(self.now_s))
                wanted = {n: mask & ~dict(used).get(n, 0) for n, mask in wanted.items()}
        return ENDLESS if any(wanted.values()) else free_s  # other users of GPUs have no known end


def _union(many: Iterable[Masks]) -> dict[int, int]:
    union: dict[int, int] = {}
    for masks in many:
        for n, mask in masks:
            union[n] = union.get(n, 0) | mask
    return union


def _overlap(one: Mapping[int, int], masks: Masks) -> bool:
    return any(one.get(n, 0) & mask for n, mask in masks)

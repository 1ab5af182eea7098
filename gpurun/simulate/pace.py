"""How much longer a job takes on a replay's placement, by the cost model. Pure."""

from __future__ import annotations

from gpurun.errors import BadInput
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Placement
from gpurun.scaling.model import LinkRates, ScalingModel, Shape


class PlacementPace:
    """Treats every job of a trace like the measured jobs. Takes its duration as that on its fewest hosts of one rack.

    Args:
        between_racks: the rate of racks' links in the replay, in bit/s; None = as in the samples.

    Raises:
        BadInput: there can be no such rate.
    """

    def __init__(self, model: ScalingModel, inventory: Inventory, between_racks: float | None = None) -> None:
        self._model, self._inventory = model, inventory
        try:
            self._rates = LinkRates(racks=between_racks)
        except ValueError as error:
            raise BadInput(f"racks' links: {error}") from None
        self._most = {
            generation: max(host.gpus for host in inventory.hosts if host.generation == generation)
            for generation in inventory.generations
        }
        self._steps: dict[Shape, float] = {}

    def factor(self, placement: Placement) -> float:
        """The duration there over the duration in the trace.

        Raises:
            CannotPredict: no sample has the links that the gang would use.
        """
        order = {rack: number for number, rack in enumerate(placement.racks)}
        by_name = self._inventory.by_name
        hosts = sorted((order[by_name[grant.host].rack], -len(grant.gpus)) for grant in placement.grants)
        there = Shape(tuple(-ranks for _, ranks in hosts), tuple(str(rack) for rack, _ in hosts), rates=self._rates)
        best = self._best(placement)
        return 1.0 if there.on(LinkRates()) == best else self._step_s(there) / self._step_s(best)

    def _best(self, placement: Placement) -> Shape:
        """As many ranks on the fewest hosts of one rack."""
        whole, rest = divmod(placement.gpus, self._most[placement.generation])
        ranks = (self._most[placement.generation],) * whole + ((rest,) if rest else ())
        return Shape(ranks, ("0",) * len(ranks))

    def _step_s(self, shape: Shape) -> float:
        if shape not in self._steps:
            self._steps[shape] = self._model.predict(shape).step_s.median
        return self._steps[shape]

"""The shape and the exchange of a placed job, as the model needs them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch.seats import SERVER, seats_of
from gpurun.scaling.samples import Exchange
from gpurun.scaling.shape import LinkRates, Shape


def shape_of(spec: JobSpec, grants: Sequence[Grant], racks: Mapping[str, str], rates: LinkRates | None = None) -> Shape:
    """Return the shape of a job on these hosts. Parameter servers are on the hosts where gpurun starts them.

    Args:
        racks: host → rack.

    Raises:
        ValueError: no gang can have this shape.
    """
    servers = Counter(seat.node for seat in seats_of(grants, spec.roles) if seat.role == SERVER)
    return Shape(
        tuple(len(grant.gpus) for grant in grants),
        tuple(racks.get(grant.host, "") for grant in grants),
        tuple(servers[node] for node in range(len(grants))) if servers else (),
        rates or LinkRates(),
    )


def exchange_of(spec: JobSpec) -> Exchange:
    """Return how the job's ranks exchange gradients."""
    if spec.roles is not None and spec.roles.ps:
        return "servers"
    return "hierarchical" if spec.horovod.hierarchical_allreduce else "ring"

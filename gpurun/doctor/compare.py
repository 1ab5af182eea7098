"""Compare a probe's result with the inventory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpurun.doctor.gpu_checks import MEMORY_TOLERANCE
from gpurun.facts.hardware import Gpu, Hardware
from gpurun.inventory.model import Fabric, Host
from gpurun.launch.fabric_hcas import distance, split_name

SAME_NODE = 2
"""`distance` classes up to this one do not cross sockets."""


@dataclass(frozen=True)
class Difference:
    """One key of a host for which inventory and machine differ. `found` can be written into the inventory."""

    host: str
    key: str
    stated: object
    found: object


def differences(host: Host, fabric: Fabric, found: Hardware) -> Iterator[Difference]:
    """Yield every difference. Skips GPUs if they could not be read or one is lost."""
    for key, value in detected(fabric, found).items():
        stated = getattr(host, key)
        if value is not None and value != stated and not _close(key, stated, value):
            yield Difference(host.name, key, stated, value)


def detected(fabric: Fabric, found: Hardware) -> Mapping[str, object]:
    """Return key → value for the keys of a host that the probe knows; None = an inventory cannot express the value.

    Empty if the GPUs could not be read or one is lost.
    """
    if found.gpu_problem or not found.gpus or any(gpu.problem for gpu in found.gpus):
        return {}
    return {
        "gpus": len(found.gpus),
        "generation": _only({gpu.generation for gpu in found.gpus}),
        "gpu_model": _only({gpu.model for gpu in found.gpus}),
        "gpu_memory_mib": min((gpu.memory_mib for gpu in found.gpus if gpu.memory_mib), default=None),
        "nvlink": nvlink_groups(found.gpus) or None,
        "near_hca": _near_hca(fabric, found) or None,
    }


def _only(values: set[str]) -> str | None:
    """Return the one value that all GPUs share; else None, because the inventory cannot express several values."""
    return next(iter(values)) or None if len(values) == 1 else None


def _close(key: str, stated: object, found: object) -> bool:
    if key != "gpu_memory_mib" or not isinstance(stated, int) or not isinstance(found, int):
        return False
    return abs(found - stated) <= stated * MEMORY_TOLERANCE


def nvlink_groups(gpus: tuple[Gpu, ...]) -> tuple[tuple[int, ...], ...]:
    """Return groups of GPUs that NVLink connects, directly or through other GPUs. Single GPUs form no group."""
    group: dict[int, set[int]] = {gpu.index: {gpu.index} for gpu in gpus}
    for gpu in gpus:
        for peer in gpu.nvlink_peers:
            if peer in group and group[peer] is not group[gpu.index]:
                joined = group[peer] | group[gpu.index]
                group.update(dict.fromkeys(joined, joined))
    islands = {id(members): tuple(sorted(members)) for members in group.values() if len(members) > 1}
    return tuple(sorted(islands.values()))


def _near_hca(fabric: Fabric, found: Hardware) -> tuple[int, ...]:
    """Return GPUs that reach a HCA of the fabric without crossing sockets; empty if that is all or none of them."""
    wanted = {split_name(name)[0] for name in fabric.hcas}
    hcas = [hca for hca in found.hcas if hca.name in wanted]
    near = tuple(gpu.index for gpu in found.gpus if any(distance(gpu, hca)[0] <= SAME_NODE for hca in hcas))
    return near if len(near) < len(found.gpus) else ()

"""Which GPUs of one host: one NVLink island if it can be, near the HCA, as on the gang's other hosts, then the lowest
numbers.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, combinations, islice

from gpurun.inventory.model import Host
from gpurun.scheduler.index import indices, mask_of

Islands = tuple[tuple[int, ...], ...]


def usable_in_island(host: Host, free: int) -> int:
    """Most free GPUs that NVLink connects. A GPU that the inventory puts in no island is alone."""
    return max((island.bit_count() for island in _masks(host.nvlink, free)), default=0)


def choose(host: Host, free: int, gpus: int, common: int = 0) -> tuple[int, ...]:
    """`gpus` of the free ones (bits), at least that many.

    In this order: fewest NVLink islands, most GPUs near the HCA, fewest GPUs left over in the islands it
    touches, most of the `common` ones, lowest numbers. A host that does not say has one island.

    Args:
        common: GPUs (bits) that are free on every host of the gang. Where each GPU has a NIC of its own, NCCL then
            connects NICs of the same number ("if the communicator does not contain the same GPUs on each node, NCCL may
            still need to communicate across NICs": NCCL guide, NCCL_CROSS_NIC). Some fabrics connect no others.
    """
    return _choose(host.nvlink, host.near_hca, free, gpus, common & free)


@lru_cache(maxsize=65536)
def _choose(nvlink: Islands, near_hca: tuple[int, ...], free: int, gpus: int, common: int) -> tuple[int, ...]:
    near = mask_of(near_hca) & free
    islands = _masks(nvlink, free) if nvlink else [free]
    for number in range(1, len(islands) + 1):
        options = [
            _from_islands(chosen, near, gpus, common)
            for chosen in combinations(islands, number)
            if sum(island.bit_count() for island in chosen) >= gpus
        ]
        if options:
            return min(options)[3]
    raise ValueError(f"{gpus} GPUs are wanted, but only {free.bit_count()} are free")


def _from_islands(chosen: tuple[int, ...], near: int, gpus: int, common: int) -> tuple[int, int, int, tuple[int, ...]]:
    mask = sum(chosen)
    ranked = [indices(part & also) for part in (mask & near, mask & ~near) for also in (common, ~common)]
    picked = tuple(sorted(islice(chain.from_iterable(ranked), gpus)))
    few = -min((mask & near).bit_count(), gpus)
    return few, mask.bit_count() - gpus, -(mask_of(picked) & common).bit_count(), picked


def _masks(nvlink: Islands, free: int) -> list[int]:
    masks = [mask_of(island) & free for island in nvlink]
    alone = free & ~mask_of(gpu for island in nvlink for gpu in island)
    masks += [1 << gpu for gpu in indices(alone)]
    return [mask for mask in masks if mask]

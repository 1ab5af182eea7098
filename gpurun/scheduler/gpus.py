"""Which GPUs of one host: one NVLink island if it can be, near the HCA, then the lowest numbers."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, islice

from gpurun.inventory.model import Host
from gpurun.scheduler.index import indices, mask_of

Islands = tuple[tuple[int, ...], ...]


def usable_in_island(host: Host, free: int) -> int:
    """Most free GPUs that NVLink connects. A GPU that the inventory puts in no island is alone."""
    return max((island.bit_count() for island in _masks(host.nvlink, free)), default=0)


def choose(host: Host, free: int, gpus: int) -> tuple[int, ...]:
    """`gpus` of the free ones (bits), at least that many.

    In this order: fewest NVLink islands, most GPUs near the HCA, fewest GPUs left over in the islands it
    touches, lowest numbers. A host that does not say has one island.
    """
    return _choose(host.nvlink, host.near_hca, free, gpus)


@lru_cache(maxsize=65536)
def _choose(nvlink: Islands, near_hca: tuple[int, ...], free: int, gpus: int) -> tuple[int, ...]:
    near = mask_of(near_hca) & free
    if not nvlink and not near:
        return tuple(islice(indices(free), gpus))
    islands = _masks(nvlink, free) if nvlink else [free]
    for number in range(1, len(islands) + 1):
        options = [
            _from_islands(chosen, near, gpus)
            for chosen in combinations(islands, number)
            if sum(island.bit_count() for island in chosen) >= gpus
        ]
        if options:
            return min(options)[2]
    raise ValueError(f"{gpus} GPUs asked of {free.bit_count()} free ones")


def _from_islands(chosen: tuple[int, ...], near: int, gpus: int) -> tuple[int, int, tuple[int, ...]]:
    mask = sum(chosen)
    close, far = tuple(indices(mask & near)), tuple(indices(mask & ~near))
    picked = tuple(sorted((close + far)[:gpus]))
    return -min(len(close), gpus), mask.bit_count() - gpus, picked


def _masks(nvlink: Islands, free: int) -> list[int]:
    masks = [mask_of(island) & free for island in nvlink]
    alone = free & ~mask_of(gpu for island in nvlink for gpu in island)
    masks += [1 << gpu for gpu in indices(alone)]
    return [mask for mask in masks if mask]

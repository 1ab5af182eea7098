"""Decide during the transfer whether compressing chunks makes it faster. Pure, except for the sample.

A transfer begins uncompressed. After a while, gpurun compresses some of its chunks, and measures how much they shrink
and how long that takes. If compression could be faster on this link, gpurun tries it. If the hosts then do not receive
at least `GAIN` faster, it switches compression off for good. A trial can cost seconds on busy hosts, so gpurun tries
only long transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpurun.node.transfer.packing import pack
from gpurun.node.transfer.spool import CHUNK, Blob

WARM_UP_S = 1.0
MEASURE_S = 1.0
GAIN = 1.15
# What is packed must leave faster than the link takes it, or packing is the new bottleneck.
MARGIN = 1.2
SAMPLES = 4
# How long the rest must take for a trial to be worth its cost.
MIN_LEFT_S = 20.0


@dataclass(frozen=True)
class PackingSample:
    """The effect of compression on some chunks: compressed bytes for each byte, and bytes compressed in a second."""

    ratio: float
    bytes_per_s: float


def sample(blobs: Sequence[Blob]) -> PackingSample | None:
    """Compress a few chunks from all over the blobs; return None if there are none."""
    buffer = memoryview(bytearray(CHUNK))
    raw = packed = 0
    began = time.perf_counter()
    for blob in blobs:
        for part in range(SAMPLES if blob.count >= SAMPLES else 0):
            piece = blob.read_into(part * blob.count // SAMPLES, buffer)
            raw += len(piece)
            packed += len(pack(piece) or piece)
    took = time.perf_counter() - began
    return PackingSample(packed / raw, raw / took) if raw else None


def promises(found: PackingSample | None, link_bytes_per_s: float) -> bool:
    """Return whether compression could make this link carry more than now."""
    if found is None or found.ratio * GAIN > 1:
        return False
    return min(link_bytes_per_s / found.ratio, found.bytes_per_s / MARGIN) > GAIN * link_bytes_per_s


class PackingTrial:
    """Switches compression on or off while a transfer runs.

    Args:
        switch: switches compression on or off.
        take: makes the sample.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        switch: Callable[[bool], object],
        take: Callable[[], PackingSample | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._switch = switch
        self._take = take
        self._now = now
        self._began_s: float | None = None
        self._mark = (0.0, 0, 0)
        self._before: float | None = None
        self._over = False

    def step(self, first: int, everywhere: int, left: int) -> None:
        """Take the next decision. Call it often.

        Args:
            first: bytes that the first host has received so far.
            everywhere: bytes that all hosts together have.
            left: bytes that the first host does not have yet.
        """
        now = self._now()
        if self._over or everywhere == 0:
            return
        if self._began_s is None:
            self._began_s = now
        if now - self._began_s < WARM_UP_S:
            self._mark = (now, first, everywhere)
        if now - self._began_s < WARM_UP_S + MEASURE_S:
            return
        since, first_then, everywhere_then = self._mark
        rate = (everywhere - everywhere_then) / (now - since)
        if self._before is None:
            self._try_it(rate, (first - first_then) / (now - since), left)
        else:
            self._over = True
            self._switch(rate >= GAIN * self._before)

    def _try_it(self, rate: float, link: float, left: int) -> None:
        if rate <= 0 or link <= 0 or left / link < MIN_LEFT_S or not promises(self._take(), link):
            self._over = True
            return
        self._before, self._began_s = rate, None
        self._switch(True)

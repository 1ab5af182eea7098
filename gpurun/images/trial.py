"""Decide whether the first host of a chain or its link is slow. No host is before it to compare with, so gpurun tries
the next.

The next host pulls a few chunks, which it needs anyway, from the head. If they arrive much faster than at the first
host, the first host is slow. The trial sends less than a hundredth of the bytes twice, once in a transfer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from threading import Thread

from gpurun.errors import GpurunError
from gpurun.images.lane import HEAD, ChainLane
from gpurun.images.seats import Seats
from gpurun.images.slow import HostPace
from gpurun.node.transfer.spool import CHUNK
from gpurun.remote import Fleet

AFTER_S = 3.0
FACTOR = 3.0
# Of what is being transferred, this part is tried with, and at most so much.
PART = 1 / 128
MOST_CHUNKS = 32


class FirstHostTrial:
    """The trial of one chain's first host; made at most once."""

    def __init__(self, number: int, count: int, seats: Seats, fleet: Fleet) -> None:
        self._number = number
        self._count = count
        self._seats = seats
        self._fleet = fleet
        self._thread: Thread | None = None
        self._rate: float | None = None
        self._over = False

    def slow(self, lanes: Sequence[ChainLane], paces: Sequence[HostPace]) -> HostPace | None:
        """Return the first host if the trial has shown that it is slow. Begins the trial when it is time."""
        first = next((pace for pace in paces if pace.upstream is None and pace.followed), None)
        if self._over or first is None or not first.rate:
            return None
        if self._thread is None:
            self._begin(first, lanes)
            return None
        if self._thread.is_alive():
            return None
        self._over = True
        return first if self._rate is not None and self._rate > FACTOR * first.rate else None

    def stop(self) -> None:
        """Make no more trials."""
        self._over = True

    def _begin(self, first: HostPace, lanes: Sequence[ChainLane]) -> None:
        next_one = next((lane for lane in lanes if lane.source == first.host), None)
        if first.age_s < AFTER_S or next_one is None or self._seats.server is None:
            return
        wants = self._wants(next_one)
        if wants:
            self._thread = Thread(target=self._run, args=(next_one.host, wants), daemon=True)
            self._thread.start()

    def _wants(self, lane: ChainLane) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the last chunks of the last blob that the lane pulls, if the transfer is long enough."""
        blobs = [self._seats.blobs[digest] for digest in lane.asked if digest in self._seats.blobs]
        chunks = sum(blob.count for blob in blobs)
        amount = min(MOST_CHUNKS, int(chunks * PART))
        if not amount or self._count > 1:
            return []
        last = blobs[-1].count - 1
        return [(blobs[-1].digest, [(max(0, last - amount + 1), last)])]

    def _run(self, host: str, wants: list[tuple[str, list[tuple[int, int]]]]) -> None:
        token = secrets.token_hex(16)
        source = self._seats.source(HEAD, host)
        assert source.address is not None
        try:
            source.grant(token)
            began = time.monotonic()
            self._fleet.agents[host].call(
                "blobs.fetch", transfer=self._seats.transfer, address=source.address[0], port=source.address[1],
                token=token, digests=[], wants=wants,
            )  # fmt: skip
            amount = sum((last - first + 1) * CHUNK for _, ranges in wants for first, last in ranges)
            self._rate = amount / (time.monotonic() - began)
        except GpurunError:
            self._rate = None

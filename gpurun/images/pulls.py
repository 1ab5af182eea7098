"""The threads of a transfer: each runs one host's current pull and sends its events to the driver.

A pull has a generation number. The driver ignores events with the number of an abandoned pull.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from gpurun.errors import GpurunError
from gpurun.node.transfer import links
from gpurun.remote import Agent, RemoteOpFailed

if TYPE_CHECKING:
    from gpurun.remote.agent import Stream

# How long an upstream host may take to show that it is alive before another one is asked instead.
ALIVE_S = 2.0


@dataclass(frozen=True)
class PullProgress:
    """A pull has received this many bytes so far."""

    key: str
    generation: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Ended:
    """A pull has ended. `error` None: all its blobs have arrived."""

    key: str
    generation: int
    bytes: int
    error: GpurunError | None


Event = PullProgress | Ended


@dataclass(frozen=True)
class Source:
    """The source of a pull.

    Attributes:
        name: the upstream host; ``head`` for the head.
        address: where it listens; None = over the SSH channel from the head.
        grant: registers a token at the source.
        alive: False if the source is known not to answer.
        feed: for the SSH channel: the frames of the chunks that a host lacks.
    """

    name: str
    address: tuple[str, int] | None
    grant: Callable[[str], object] = lambda _token: None
    alive: Callable[[], bool] = lambda: True
    feed: Callable[[links.Wants], Iterator[bytes]] = lambda _wants: iter(())


class Pull:
    """One pull of one host, in its own thread, which starts immediately.

    Args:
        digests: announced to the host already.
        lane: (number, count): only that lane's stripes of them.
    """

    def __init__(
        self, key: str, generation: int, agent: Agent, transfer: str, source: Source, digests: Sequence[str],
        events: SimpleQueue[Event], lane: tuple[int, int],
    ) -> None:  # fmt: skip
        self.source = source
        self._key, self._generation = key, generation
        self._agent = agent
        self._transfer = transfer
        self._digests = list(digests)
        self._events = events
        self._lane = lane
        self._stream: Stream | None = None
        self._stopped = False
        self._received = 0
        Thread(target=self._run, name=f"pull {key}", daemon=True).start()

    def stop(self) -> None:
        """Stop the pull. The driver ignores its later events."""
        self._stopped = True
        if self._stream is not None:
            with suppress(GpurunError):
                self._stream.close()

    def _run(self) -> None:
        error: GpurunError | None = None
        try:
            self._stream = self._open()
            if self._stopped:
                self._stream.close()
            for item in self._stream:
                self._received = int(item.value["bytes"])
                digest = str(item.value.get("digest", ""))
                self._events.put(PullProgress(self._key, self._generation, self._received, digest))
        except GpurunError as failed:
            error = failed
            if isinstance(failed, RemoteOpFailed) and failed.kind == "link-lost" and not self._source_answers():
                error = RemoteOpFailed(failed.message, kind="no-route", host=failed.host)
        self._events.put(Ended(self._key, self._generation, self._received, error))

    def _source_answers(self) -> bool:
        try:
            return self.source.alive()
        except GpurunError:
            return False

    def _open(self) -> Stream:
        if self.source.address is None:
            missing = self._agent.call(
                "blobs.missing", transfer=self._transfer, digests=self._digests, lane=list(self._lane)
            ).value
            return self._agent.stream("blobs.feed", transfer=self._transfer, payload_in=self.source.feed(missing))
        token = secrets.token_hex(16)
        self.source.grant(token)
        address, port = self.source.address
        return self._agent.stream(
            "blobs.fetch", transfer=self._transfer, address=address, port=port, token=token, digests=self._digests,
            lane=list(self._lane),
        )  # fmt: skip


def agent_answers(agent: Agent, transfer: str) -> bool:
    """Return whether a host of a transfer answers quickly."""
    return agent.alive and bool(agent.call("blobs.status", transfer=transfer, timeout_s=ALIVE_S).value)

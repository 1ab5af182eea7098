"""Bring an image from the head to hosts: ask what is missing, send it to all at once, verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

from gpurun.errors import GpurunError, HostFailure, HostNotReady, HostUnreachable
from gpurun.images.engine import Engine, HeadImage
from gpurun.images.events import HostShip, ShipEvent, ShipReport
from gpurun.node.images import LOAD_FACTOR
from gpurun.remote import Agent, Fleet, RemoteOpFailed

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory

# Pieces of one mebibyte that wait for one host. What all wait for is the slowest of those that still take part.
QUEUE_PIECES = 8
RATE_WINDOW_S = 5.0


class ShipCancelled(GpurunError):
    """The ship was cancelled or its deadline has passed."""


def ship(
    image: str,
    fleet: Fleet,
    *,
    inventory: Inventory,  # noqa: ARG001 - the order of a chain will need it
    hosts: Iterable[str],
    docker_host: str | None,
    progress: Callable[[ShipEvent], None] = lambda _event: None,
    cancelled: Callable[[], bool] = lambda: False,
    deadline_s: float = 6 * 3600.0,
) -> ShipReport:
    """Make sure that hosts have an image, the same as the head's, layer by layer.

    A host that has the image already gets nothing. Idempotent. A host's failure is in the report, as a typed error,
    and stops no other host.

    Args:
        hosts: names; each must be in the fleet.
        progress: told where each host stands; called from several threads.
        cancelled: asked now and then; True ends the ship.
        deadline_s: seconds from now after which it ends.

    Raises:
        BadInput: the image is not on the head.
        HostNotReady: the head's Docker does not answer.
        ShipCancelled: it was cancelled, or its deadline has passed.
    """
    began = time.monotonic()
    found = Engine(docker_host).image(image)
    names = list(dict.fromkeys(hosts))
    answers = fleet.map(lambda agent: agent.call("images.ask", image_id=found.id).value, names)
    done: dict[str, HostShip] = {}
    receivers: list[_Receiver] = []
    for name in names:
        error: GpurunError | None = answers.failed.get(name)
        if error is None:
            error = _room(found, name, answers.ok[name])
        if error is not None:
            done[name] = HostShip(name, "failed", 0, time.monotonic() - began, _typed(error))
        elif answers.ok[name]["present"]:
            done[name] = HostShip(name, "present", 0, time.monotonic() - began)
        else:
            receivers.append(_Receiver(fleet.agents[name], found, progress))
    for name, host in done.items():
        progress(ShipEvent(name, host.state, message=host.error.message if host.error else None))
    if receivers:
        _fan_out(docker_host, found, receivers, lambda: _stop_if(cancelled, began + deadline_s))
    for receiver in receivers:
        done[receiver.agent.host] = receiver.outcome()
    missing = found.size_bytes if receivers else 0
    in_order = tuple(done[name] for name in names)
    return ShipReport(image, found.id, len(found.layers), missing, in_order, time.monotonic() - began)


def _stop_if(cancelled: Callable[[], bool], deadline: float) -> None:
    if cancelled():
        raise ShipCancelled("shipping the image was cancelled")
    if time.monotonic() > deadline:
        raise ShipCancelled("shipping the image took longer than its deadline")


def _room(image: HeadImage, host: str, answer: dict[str, Any]) -> HostNotReady | None:
    """Why the image does not fit on a host, if it does not."""
    free, needed = answer["free_bytes"], image.size_bytes * LOAD_FACTOR
    if answer["present"] or free is None or free >= needed:
        return None
    return HostNotReady(
        f"its disk is too full for {image.reference}: {free >> 20} MiB free in {answer['root']}, "
        f"{int(needed) >> 20} MiB needed",
        host=host,
        hint="free some space there, for instance with: docker system prune",
    )


def _typed(error: GpurunError) -> GpurunError:
    """What the host's agent reported, as the error a person meets."""
    if not isinstance(error, RemoteOpFailed):
        return error
    hints = {
        "no-docker": "check that Docker runs there and that the user may use it (group docker)",
        "denied": "check that the user may use Docker there (group docker)",
        "no-space": "free some space there, for instance with: docker system prune",
    }
    if error.kind in hints:
        return HostNotReady(error.message, host=error.host, hint=hints[error.kind])
    return HostFailure(error.message, host=error.host)


class _Receiver:
    """One host that is being sent the image."""

    def __init__(self, agent: Agent, image: HeadImage, progress: Callable[[ShipEvent], None]) -> None:
        self.agent = agent
        self.pieces: Queue[bytes | None] = Queue(QUEUE_PIECES)
        self.thread = Thread(target=self._run, name=f"ship {agent.host}", daemon=True)
        self.ended = False
        self._image = image
        self._progress = progress
        self._began = time.monotonic()
        self._received = 0
        self._error: GpurunError | None = None
        self._elapsed_s = 0.0
        self._stream: Any = None

    def put(self, piece: bytes | None, check: Callable[[], None]) -> None:
        """Hand over a piece, None for the end; waits while the host is behind."""
        while not self.ended:
            try:
                self.pieces.put(piece, timeout=0.2)
                break
            except Full:
                check()

    def stop(self) -> None:
        """Cancel the load on the host."""
        self.ended = True
        if self._stream is not None:
            self._stream.close()

    def outcome(self) -> HostShip:
        """What became of it."""
        state = "failed" if self._error else "done"
        return HostShip(self.agent.host, state, self._received, self._elapsed_s, self._error)

    def _run(self) -> None:
        marks: list[tuple[float, int]] = [(self._began, 0)]
        try:
            self._stream = self.agent.stream(
                "images.load", payload_in=self._payload(), image_id=self._image.id, layers=list(self._image.layers)
            )
            for item in self._stream:
                self._received = item.value["bytes"]
                marks = [mark for mark in marks if mark[0] > time.monotonic() - RATE_WINDOW_S] or marks[-1:]
                marks.append((time.monotonic(), self._received))
                self._tell("loading" if item.value.get("loading") else "receiving", marks)
            self._tell("done", marks)
        except GpurunError as error:
            self._error = _typed(error)
            self._progress(ShipEvent(self.agent.host, "failed", self._received, message=self._error.message))
        finally:
            self.ended = True
            self._elapsed_s = time.monotonic() - self._began

    def _payload(self) -> Iterator[bytes]:
        while True:
            try:
                piece = self.pieces.get(timeout=1.0)
            except Empty:
                if self.ended:
                    raise HostUnreachable("the ship was stopped", host=self.agent.host) from None
                continue
            if piece is None:
                return
            yield piece

    def _tell(self, state: str, marks: list[tuple[float, int]]) -> None:
        total = max(self._image.size_bytes, self._received)
        (then, before), (now, received) = marks[0], marks[-1]
        rate = (received - before) / (now - then) if now > then else None
        eta = (total - received) / rate if rate and state == "receiving" else None
        layers = len(self._image.layers)
        self._progress(ShipEvent(self.agent.host, state, received, total, rate, eta, layers=layers))


def _fan_out(docker_host: str | None, image: HeadImage, receivers: list[_Receiver], check: Callable[[], None]) -> None:
    """One ``docker save``, its pieces to every receiver."""
    for receiver in receivers:
        receiver.thread.start()
    try:
        for piece in Engine(docker_host).save(image.reference):
            check()
            for receiver in receivers:
                receiver.put(piece, check)
            if all(receiver.ended for receiver in receivers):
                break
        for receiver in receivers:
            receiver.put(None, check)
        while any(receiver.thread.is_alive() for receiver in receivers):
            check()
            receivers[0].thread.join(0.2) if receivers[0].thread.is_alive() else time.sleep(0.05)
    except BaseException:
        for receiver in receivers:
            receiver.stop()
        raise

"""Ship an image from the head to hosts: ask what is missing, send it through the hosts, load and verify it."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from gpurun.content import seats
from gpurun.content.chain import Hop, Want, chain, rate_of, star
from gpurun.content.export import Exporter, default_folder
from gpurun.content.images import Engine, HeadImage
from gpurun.content.relay import DamagedBlob, Relay
from gpurun.content.seats import Options, options_for
from gpurun.content.store import Stored
from gpurun.errors import GpurunError, HostFailure, HostNotReady, NoRoom
from gpurun.quantities import duration
from gpurun.remote import Agent, Fleet, RemoteOpFailed
from gpurun.state import locks

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from gpurun.inventory.model import Inventory
    from gpurun.remote.agent import Stream


# Progress events and the final report of a ship. Values only.


@dataclass(frozen=True)
class ShipEvent:
    """The progress of one host.

    Attributes:
        state: ``present`` (it had the image), ``receiving``, ``loading``, ``done`` or ``failed``.
        bytes: received so far, of `total`.
        rate_bytes_s: over the last seconds; None while unknown.
        eta_s: seconds until the last byte is received; None while unknown.
        layer, layers: layer k of the n layers that this host receives.
        message: why it failed.
    """

    host: str
    state: str
    bytes: int = 0
    total: int = 0
    rate_bytes_s: float | None = None
    eta_s: float | None = None
    layer: int = 0
    layers: int = 0
    message: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The event as a JSON object without empty fields."""
        return {key: value for key, value in asdict(self).items() if value is not None}


ShipState = Literal["present", "done", "failed"]
"""The end of a copy to one host: it had the content already, it got the content, or neither."""


class ShippedHostShape(TypedDict):
    """The result on one host.

    Attributes:
        state: `present`: the host had the image.
        error: why the copy failed.
    """

    host: str
    state: ShipState
    bytes_received: int
    elapsed_s: float
    error: NotRequired[str]


@dataclass(frozen=True)
class HostShip:
    """The result on one host.

    Attributes:
        state: ``present``, ``done`` or ``failed``.
        bytes_received: the bytes that the host received for itself.
        local: the ID that the host's engine has for the image; "" if it failed.
        error: why it failed.
    """

    host: str
    state: ShipState
    bytes_received: int
    elapsed_s: float
    error: GpurunError | None = None
    local: str = ""

    def as_json(self) -> ShippedHostShape:
        """The result as ``gpurun ship --json`` shows it."""
        told: ShippedHostShape = {
            "host": self.host, "state": self.state, "bytes_received": self.bytes_received,
            "elapsed_s": round(self.elapsed_s, 3),
        }  # fmt: skip
        return {**told, "error": self.error.message} if self.error else told


class ShipShape(TypedDict):
    """The result of a copy of an image. While hosts progress, the command prints one object a line on stderr.

    Attributes:
        bytes_missing: bytes of the layers that at least one host lacked.
    """

    image: str
    id: str
    layers: int
    bytes_missing: int
    hosts: list[ShippedHostShape]
    elapsed_s: float


@dataclass(frozen=True)
class ShipReport:
    """The result of a ship.

    Attributes:
        id: the image's ID on the head.
        layers: how many layers the image has.
        bytes_missing: the size of the layers that at least one host lacked, each counted once.
    """

    image: str
    id: str
    layers: int
    bytes_missing: int
    hosts: tuple[HostShip, ...]
    elapsed_s: float

    @property
    def failed(self) -> Mapping[str, GpurunError]:
        """Return the hosts that do not have the image now, with their errors."""
        return {host.host: host.error for host in self.hosts if host.error is not None}

    def as_json(self) -> ShipShape:
        """The document that ``gpurun ship --json`` prints."""
        return {
            "image": self.image,
            "id": self.id,
            "layers": self.layers,
            "bytes_missing": self.bytes_missing,
            "hosts": [host.as_json() for host in self.hosts],
            "elapsed_s": round(self.elapsed_s, 3),
        }


# Turn hosts' progress reports into rates, remaining times and events for people.


WINDOW_S = 5.0
# A host says at most this often how far it is.
EVERY_S = 0.2


@dataclass
class _HostProgress:
    total: int
    state: str = "receiving"
    received: int = 0
    layer: int = 0
    layers: int = 0
    told_s: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)


class Progress:
    """The progress of every host. Thread-safe.

    Args:
        tell: receives each event, one at a time.
    """

    def __init__(self, tell: Callable[[ShipEvent], None]) -> None:
        self._tell = tell
        self._hosts: dict[str, _HostProgress] = {}
        self._lock = Lock()

    def expect(self, host: str, total: int, layers: int) -> None:
        """Record that a host will receive this many bytes, of an image with this many layers."""
        with self._lock:
            known = self._hosts.setdefault(host, _HostProgress(total, layers=layers))
            known.total = total

    def received(self, host: str, count: int) -> None:
        """Record that a host has received this many bytes."""
        now = time.monotonic()
        with self._lock:
            known = self._hosts[host]
            known.received = max(known.received, count)
            known.marks = [*[mark for mark in known.marks if mark[0] > now - WINDOW_S], (now, known.received)]
            if now - known.told_s >= EVERY_S or known.received >= known.total:
                self._say(host, known)

    def loading(self, host: str, state: str, layer: int) -> None:
        """Record that a host loads, or waits for more."""
        with self._lock:
            known = self._hosts[host]
            if (known.state, known.layer) != (state, layer):
                known.state, known.layer = state, layer
                self._say(host, known)

    def ended(self, host: str, state: str, message: str | None = None) -> None:
        """Record the end of a host's transfer."""
        with self._lock:
            known = self._hosts.setdefault(host, _HostProgress(0))
            known.state = state
            self._say(host, known, message)

    def received_by(self, host: str) -> int:
        """Return the bytes received so far."""
        return self._hosts[host].received if host in self._hosts else 0

    def _say(self, host: str, known: _HostProgress, message: str | None = None) -> None:
        known.told_s = time.monotonic()
        rate = rate_of(known.marks)
        left = max(0, known.total - known.received)
        eta = left / rate if rate and left else None
        total = max(known.total, known.received)
        self._tell(ShipEvent(host, known.state, known.received, total, rate, eta, known.layer, known.layers, message))


# The plan of a ship, as one value that ``--dry-run`` prints and `ship` executes.


MIB = 1 << 20
# Until a transfer has been measured. Sources: mechanics ("Moving images without a registry") for the first and last.
EXPORT_MIB_S, LINK_MIB_S, LOAD_MIB_S = 200.0, 110.0, 38.0


@dataclass(frozen=True)
class Answer:
    """One host's answer about an image.

    Attributes:
        local: the engine's ID of the image; "" = it is not there.
        named: the image has the wanted tags.
        store: ``graph`` or ``containerd``.
        have: layers that gpurun need not send.
        docker_free_bytes, spool_free_bytes: None = unknown.
        one_disk: Docker's folder and the spool share a file system.
    """

    host: str
    local: str
    named: bool
    store: str
    have: tuple[str, ...]
    docker_root: str | None = None
    docker_free_bytes: int | None = None
    spool_free_bytes: int | None = None
    one_disk: bool = True

    @property
    def present(self) -> bool:
        """Return whether the image is there."""
        return bool(self.local)


@dataclass(frozen=True)
class LayerPlan:
    """A layer, and the hosts that lack it."""

    digest: str
    bytes: int
    hosts: tuple[str, ...]


HopShape = TypedDict("HopShape", {"host": str, "rack": str, "from": str, "layers": tuple[str, ...]})
HopShape.__doc__ = "One host of a chain, and the host that it gets the layers from."


class ShipPlanShape(TypedDict):
    """What `gpurun ship` would copy.

    Attributes:
        shape: `nothing`, `chain` or `star`.
        present: hosts that have the image.
        unnamed: hosts that have the image under another name only.
        chains: hosts in the order in which layers travel.
    """

    image: str
    id: str
    bytes_missing: int
    shape: str
    expected_s: float
    present: tuple[str, ...]
    unnamed: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    chains: list[list[HopShape]]


@dataclass(frozen=True)
class ShipPlan:
    """What gpurun will send to which host.

    Attributes:
        present: hosts that have the image.
        unnamed: hosts that have it under another name only.
        layers: the missing layers, lowest first.
        chains: which host pulls from which; several lanes carry stripes of every layer.
        shape: ``nothing``, ``chain`` or ``star``.
        expected_s: the expected duration.
    """

    image: str
    id: str
    present: tuple[str, ...]
    unnamed: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    chains: tuple[tuple[Hop, ...], ...]
    shape: str
    expected_s: float

    @property
    def bytes_missing(self) -> int:
        """Return the size of the missing layers, each counted once."""
        return sum(layer.bytes for layer in self.layers)

    def bytes_of(self, host: str, exact: Mapping[str, int] | None = None) -> int:
        """Return the bytes that a host lacks itself. `exact`: sizes that are now known exactly."""
        known = exact or {}
        return sum(known.get(layer.digest, layer.bytes) for layer in self.layers if host in layer.hosts)

    def as_json(self) -> ShipPlanShape:
        """The document that ``gpurun ship --dry-run --json`` prints."""
        return {
            "image": self.image,
            "id": self.id,
            "bytes_missing": self.bytes_missing,
            "shape": self.shape,
            "expected_s": round(self.expected_s, 2),
            "present": self.present,
            "unnamed": self.unnamed,
            "layers": self.layers,
            "chains": [
                [
                    {"host": hop.host, "rack": hop.rack, "from": hop.upstream or "head", "layers": hop.digests}
                    for hop in hops
                ]
                for hops in self.chains
            ],
        }


def plan_ship(
    image: HeadImage, inventory: Inventory, answers: Sequence[Answer], sizes: Mapping[str, int], full: bool = False
) -> ShipPlan:
    """Return the plan for hosts that answered.

    Args:
        sizes: exact or estimated bytes of each layer's tar.
        full: send every layer, whatever a host reports.
    """
    lacking = [answer for answer in answers if not answer.present]
    wants = [Want(a.host, seats.rack_of(inventory, a.host), missing_layers(image.layers, a, full)) for a in lacking]
    digests = dict.fromkeys(digest for want in wants for digest in want.digests)
    layers = tuple(
        LayerPlan(digest, sizes.get(digest, 0), tuple(want.host for want in wants if digest in want.digests))
        for digest in dict.fromkeys(image.layers)
        if digest in digests
    )
    shape = _shape(inventory, wants)
    return ShipPlan(
        image=image.reference,
        id=image.id,
        present=tuple(answer.host for answer in answers if answer.present),
        unnamed=tuple(answer.host for answer in answers if answer.present and not answer.named),
        layers=layers,
        chains=chains_of(inventory, wants, sizes),
        shape=shape,
        expected_s=_expected(layers, len(wants) if shape == "star" else 1),
    )


def chains_of(
    inventory: Inventory | None, wants: Sequence[Want], sizes: Mapping[str, int]
) -> tuple[tuple[Hop, ...], ...]:
    """Return which host pulls from which, in every lane."""
    hosts = [want.host for want in wants]
    if not wants:
        return ()
    if not seats.host_to_host(inventory, hosts):
        return (star(wants),)
    lanes = seats.lanes(inventory, hosts)
    return tuple(chain(wants, sizes, lane=lane, lanes=lanes) for lane in range(lanes))


def missing_layers(layers: Sequence[str], answer: Answer, full: bool = False) -> tuple[str, ...]:
    """Return the layers to send to a host, each once, lowest first.

    On a graph driver, a host has the lower layers of an image: the same layer on another parent is another layer there.
    """
    if full:
        needed = tuple(layers)
    elif answer.store == "graph":
        needed = tuple(layers[len(answer.have) :])
    else:
        needed = tuple(digest for digest in layers if digest not in answer.have)
    return tuple(dict.fromkeys(needed))


def _shape(inventory: Inventory, wants: Sequence[Want]) -> str:
    if not wants:
        return "nothing"
    return "chain" if seats.host_to_host(inventory, [want.host for want in wants]) else "star"


def _expected(layers: Sequence[LayerPlan], copies: int) -> float:
    """Return the slowest of export, transfer and load, which overlap."""
    mib = sum(layer.bytes for layer in layers) / MIB
    return max(mib / EXPORT_MIB_S, copies * mib / LINK_MIB_S, mib / LOAD_MIB_S)


@dataclass(frozen=True)
class LackOfRoom:
    """Layers do not fit on a host's disk.

    Attributes:
        why: for people.
        lacks_mib: how much more space they need.
    """

    why: str
    lacks_mib: int


def lacks_room(plan: ShipPlan, answer: Answer) -> LackOfRoom | None:
    """Return why the layers do not fit on a host's disks; None if they fit.

    Docker unpacks the tar into its own folder, and then each layer: twice the bytes there. The spool needs the bytes
    once, including those that the host only passes on.
    """
    own = plan.bytes_of(answer.host)
    passing = {digest for hops in plan.chains for hop in hops if hop.host == answer.host for digest in hop.digests}
    spool = sum(layer.bytes for layer in plan.layers if layer.digest in passing)
    needs = [
        (answer.docker_free_bytes, 2 * own, answer.docker_root or "Docker's folder"),
        (answer.spool_free_bytes, spool, "~/.cache"),
    ]
    if answer.one_disk:
        needs = [(answer.docker_free_bytes, 2 * own + spool, answer.docker_root or "Docker's folder")]
    for free, needed, place in needs:
        if free is not None and free < needed:
            why = f"the host's disk is too full: {free >> 20} MiB free in {place}, {needed >> 20} MiB needed"
            return LackOfRoom(why, max(1, (needed - free) >> 20))
    return None


# Ships of the same image to the same host wait for each other instead of sending it twice.


RETRY_S = 0.2


@contextmanager
def hold_image(folder: Path, image_id: str, hosts: Iterable[str], wait: Callable[[float], object]) -> Iterator[bool]:
    """Lock an image on these hosts; yield whether another process held it on one of them.

    Args:
        wait: called with seconds to sleep while another process holds one of them; may raise to give up.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{image_id.removeprefix('sha256:')[:64]}.ship"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # In one order everywhere, so that two ships never wait for each other in a circle.
        waited = False
        for offset in sorted({zlib.crc32(host.encode()) for host in hosts}):
            while not locks.try_take(descriptor, start=offset, length=1):
                waited = True
                wait(RETRY_S)
        yield waited
    finally:
        os.close(descriptor)


ASK_LIMIT_S = 60.0
HINTS = {
    "no-docker": "check that Docker runs on the host, and that the user may use Docker (group docker)",
    "denied": "check that the user may use Docker on the host (group docker)",
    "architecture": "build the image for this host: docker buildx build --platform linux/ARCHITECTURE",
    "no-space": "free some space on the host, for example with: docker system prune",
}


class ShipCancelled(GpurunError):
    """The ship was cancelled."""


def ship(
    image: str,
    fleet: Fleet,
    *,
    inventory: Inventory,
    hosts: Iterable[str],
    docker_host: str | None,
    ident: str = "",
    progress: Callable[[ShipEvent], None] = lambda _event: None,
    cancelled: Callable[[], bool] = lambda: False,
    deadline_s: float = 6 * 3600.0,
    rate_bytes_s: float | None = None,
) -> ShipReport:
    """Make sure that hosts have the head's image, layer by layer.

    Sends each host only the layers that it lacks. Idempotent. If a host fails, the report has its error, and the other
    hosts continue.

    Args:
        hosts: names; each must be in the fleet.
        ident: the head's ID of the image that the reference meant earlier; "" = what it means now.
        progress: receives each host's progress; called from several threads, one event at a time.
        cancelled: called repeatedly; True stops the ship.
        deadline_s: the ship stops after this many seconds.
        rate_bytes_s: highest sending rate of the head and of each host; None = no limit.

    Raises:
        BadInput: the image is not on the head.
        HostNotReady: the head's Docker does not answer, or its disk is full.
        HostFailure: its deadline has passed. What has arrived stays, and the next ship continues with it.
        ShipCancelled: it was cancelled.
    """
    began = time.monotonic()

    def check() -> None:
        if cancelled():
            raise ShipCancelled("shipping the image was cancelled")
        if time.monotonic() - began > deadline_s:
            text = f"shipping the image took longer than its deadline of {duration(deadline_s)}"
            raise HostFailure(text, kind="timeout")

    shipment = Shipment(image, fleet, inventory, docker_host, Progress(progress), check, rate_bytes_s, ident)
    with closing(shipment):
        return shipment.run(list(dict.fromkeys(hosts)))


def plan(image: str, fleet: Fleet, *, inventory: Inventory, hosts: Iterable[str], docker_host: str | None) -> ShipPlan:
    """Return what `ship` would do now.

    Raises:
        BadInput, HostNotReady: as `ship`.
    """
    shipment = Shipment(image, fleet, inventory, docker_host, Progress(lambda _event: None), lambda: None, None)
    with closing(shipment):
        return shipment.plan(shipment.ask(list(dict.fromkeys(hosts))))


@dataclass(frozen=True)
class _Installed:
    """A host's load has ended."""

    host: str
    error: BaseException | None


class Shipment:
    """One ship of one image."""

    def __init__(
        self, image: str, fleet: Fleet, inventory: Inventory, docker_host: str | None, progress: Progress,
        check: Callable[[], None], rate_bytes_s: float | None, ident: str = "",
    ) -> None:  # fmt: skip
        self._engine = Engine(docker_host)
        self._image: HeadImage = self._engine.image(image, ident)
        self._exporter = Exporter(self._engine, self._image)
        try:
            self._spec = self._image.spec(self._exporter.config_id())
        except GpurunError:
            self._exporter.close()
            raise
        self._fleet = fleet
        self._inventory = inventory
        self._progress = progress
        self._check = check
        self._rate_bytes_s = rate_bytes_s
        self._began = time.monotonic()
        self._results: dict[str, HostShip] = {}
        self._bytes_missing = 0

    def close(self) -> None:
        """Allow the head's store to remove the image's layers again. Idempotent."""
        self._exporter.close()

    def run(self, hosts: list[str]) -> ShipReport:
        """Ask the hosts, and send what is missing."""
        answers = self.ask(hosts)
        lacking = [answer.host for answer in answers if not answer.present]
        if lacking:
            with hold_image(default_folder(), self._image.id, lacking, self._wait) as waited:
                if waited:  # meanwhile somebody else may have sent it
                    again = {answer.host: answer for answer in self.ask(lacking)}
                    answers = [again.get(answer.host, answer) for answer in answers if answer.host not in self._results]
                self._send(answers)
        self._name([answer.host for answer in answers if answer.present and not answer.named])
        for answer in answers:
            if answer.host not in self._results:
                self._done(answer.host, "present", local=answer.local)
        in_order = tuple(self._results[host] for host in hosts)
        elapsed = time.monotonic() - self._began
        return ShipReport(
            self._image.reference, self._image.id, len(self._image.layers), self._bytes_missing, in_order, elapsed
        )

    def ask(self, hosts: list[str]) -> list[Answer]:
        """Return what every host has. Hosts that fail are in the results."""
        results = self._fleet.map(
            lambda agent: agent.call("images.ask", image=self._spec, timeout_s=ASK_LIMIT_S).value, hosts
        )
        for host, error in results.failed.items():
            self._done(host, "failed", error)
        answers = []
        for host, said in results.ok.items():
            try:
                answers.append(_answer(host, said))
            except HostFailure as error:
                self._done(host, "failed", error)
        return answers

    def plan(self, answers: list[Answer], full: bool = False) -> ShipPlan:
        """Return what to send to which host."""
        return plan_ship(self._image, self._inventory, answers, self._exporter.sizes(), full)

    def _send(self, answers: list[Answer]) -> None:
        """Send missing layers to hosts with enough space. If a load failed, send the whole image once more.

        A load can fail although all missing layers have arrived, if somebody removed an image with the other layers.
        """
        plan = self._with_room(answers)
        transfer = _Transfer(self._fleet, self._exporter, self._spec, self._progress, self._check)
        by_host = {answer.host: answer for answer in answers}
        try:
            failed = transfer.run(plan, by_host, self._options(plan))
        except DamagedBlob as damaged:  # what hosts have of it is right: they refuse what is not
            self._exporter.discard(damaged.digest)
            transfer = transfer.again()
            failed = transfer.run(plan, by_host, self._options(plan))
        again = [by_host[host] for host, error in failed.items() if _may_be_stale(error, by_host[host])]
        if again:
            whole = plan_ship(self._image, self._inventory, again, self._exporter.sizes(), full=True)
            cleared = {answer.host: Answer(answer.host, "", False, answer.store, ()) for answer in again}
            transfer = transfer.again()
            retried = transfer.run(whole, cleared, self._options(whole))
            failed = {host: error for host, error in failed.items() if host not in cleared} | retried
        for hop in plan.chains[0] if plan.chains else ():
            error = failed.get(hop.host)
            local = transfer.installed.get(hop.host, "")
            self._done(hop.host, "failed" if error else "done", error, transfer.ended_s.get(hop.host), local)
        self._bytes_missing = self._exact(plan).bytes_missing

    def _with_room(self, answers: list[Answer]) -> ShipPlan:
        """Return the plan without the hosts whose disks are too full."""
        plan = self.plan(answers)
        full = {answer.host: lack for answer in answers if not answer.present and (lack := lacks_room(plan, answer))}
        for host, lack in full.items():
            error = NoRoom(lack.why, host=host, hint=HINTS["no-space"])
            error.lacks_mib = lack.lacks_mib
            self._done(host, "failed", error)
        return self.plan([answer for answer in answers if answer.host not in full]) if full else plan

    def _exact(self, plan: ShipPlan) -> ShipPlan:
        """Return the plan with the exact sizes, known after its layers were exported."""
        sizes = self._exporter.sizes()
        layers = tuple(replace(layer, bytes=sizes.get(layer.digest, layer.bytes)) for layer in plan.layers)
        return replace(plan, layers=layers)

    def _options(self, plan: ShipPlan) -> Options:
        return options_for(self._inventory, [hop.host for hops in plan.chains for hop in hops], self._rate_bytes_s)

    def _name(self, hosts: list[str]) -> None:
        """Tag the image on hosts that have it under another name only."""
        results = self._fleet.map(lambda agent: agent.call("images.name", image=self._spec), hosts)
        for host, error in results.failed.items():
            self._done(host, "failed", error)

    def _done(
        self,
        host: str,
        state: ShipState,
        error: GpurunError | None = None,
        ended_s: float | None = None,
        local: str = "",
    ) -> None:
        typed = typed_error(error) if error else None
        elapsed = (ended_s or time.monotonic()) - self._began
        self._results[host] = HostShip(host, state, self._progress.received_by(host), elapsed, typed, local)
        self._progress.ended(host, state, typed.message if typed else None)

    def _wait(self, seconds: float) -> None:
        self._check()
        time.sleep(seconds)


class _Transfer:
    """Sends the layers of a plan and loads them on every host."""

    def __init__(
        self, fleet: Fleet, exporter: Exporter, spec: Mapping[str, Any], progress: Progress, check: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._exporter = exporter
        self._spec = spec
        self._progress = progress
        self._check = check
        self._exported: SimpleQueue[Stored | BaseException] = SimpleQueue()
        self._installed: SimpleQueue[_Installed] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._sizes: dict[str, int] = {}
        self.ended_s: dict[str, float] = {}
        self.installed: dict[str, str] = {}

    def again(self) -> _Transfer:
        """Return a new transfer of the same layers."""
        return _Transfer(self._fleet, self._exporter, self._spec, self._progress, self._check)

    def run(self, plan: ShipPlan, answers: Mapping[str, Answer], options: Options) -> dict[str, GpurunError]:
        """Execute the plan; return the hosts that failed, with their errors."""
        if not plan.chains:
            return {}
        for hop in plan.chains[0]:
            self._progress.expect(hop.host, plan.bytes_of(hop.host), len(self._spec["layers"]))
        relay = Relay(self._fleet, plan.chains, options, self._progress.received)
        failed: dict[str, GpurunError] = {}
        keep = {hop.host for hop in plan.chains[0]}
        try:
            relay.open()
            Thread(target=self._export, args=([layer.digest for layer in plan.layers],), daemon=True).start()
            config = self._exporter.config()
            for host in relay.hosts:
                self._start_install(host, relay.transfer, answers[host], config)
            self._drive(relay, plan, failed)
            keep = {host for host, error in failed.items() if not _is_full(error)}
        finally:
            for stream in self._streams.values():
                stream.close()
            relay.close(keep=keep)
        return failed

    def _drive(self, relay: Relay, plan: ShipPlan, failed: dict[str, GpurunError]) -> None:
        """Run until every host has loaded the image or failed."""
        waiting = set(relay.hosts)
        while True:
            failed.update({host: error for host, error in relay.failed.items() if host not in failed})
            waiting -= set(failed)
            if not waiting:
                relay.settle()
                return
            self._check()
            self._announce(relay, plan)
            relay.step()
            while (installed := _taken(self._installed)) is not None:
                waiting.discard(installed.host)
                self.ended_s[installed.host] = time.monotonic()
                if installed.error is not None and not isinstance(installed.error, GpurunError):
                    raise installed.error
                if installed.error is not None and installed.host not in relay.failed:
                    failed[installed.host] = installed.error
                    relay.give_up(installed.host, installed.error)

    def _announce(self, relay: Relay, plan: ShipPlan) -> None:
        """Announce layers that have become ready to the hosts, and their exact sizes to the progress."""
        while (exported := _taken(self._exported)) is not None:
            if isinstance(exported, BaseException):
                raise exported
            self._sizes[exported.digest] = exported.size
            for hop in plan.chains[0]:
                self._progress.expect(hop.host, plan.bytes_of(hop.host, self._sizes), len(self._spec["layers"]))
            relay.announce(exported)

    def _export(self, digests: list[str]) -> None:
        try:
            for digest in digests:
                self._exported.put(self._exporter.layer(digest))
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else None
            self._exported.put(HostNotReady(f"gpurun cannot read the image on the head: {error.strerror}", where=where))
        except BaseException as error:  # noqa: BLE001 - raised in `_announce`: hosts wait for these layers
            self._exported.put(error)

    def _start_install(self, host: str, transfer: str, answer: Answer, config: bytes) -> None:
        Thread(target=self._install, args=(self._fleet.agents[host], transfer, answer, config), daemon=True).start()

    def _install(self, agent: Agent, transfer: str, answer: Answer, config: bytes) -> None:
        error: BaseException | None = None
        try:
            stream = agent.stream(
                "images.install", payload_in=[config], transfer=transfer, image=self._spec, store=answer.store,
                have=list(answer.have),
            )  # fmt: skip
            self._streams[agent.host] = stream
            for item in stream:
                if "state" in item.value:
                    self._progress.loading(agent.host, item.value["state"], item.value["layer"])
                else:
                    self.installed[agent.host] = _local_id(agent.host, item.value["local"])
        except BaseException as failed:  # noqa: BLE001 - sorted in `_drive`, which waits for this host
            error = failed
        self._installed.put(_Installed(agent.host, error))


def _taken(queue: SimpleQueue[Any]) -> Any:
    """Return the next item if there is one; else None."""
    try:
        return queue.get_nowait()
    except Empty:
        return None


def _answer(host: str, said: Mapping[str, Any]) -> Answer:
    return Answer(
        host=host,
        local=_local_id(host, said["local"]) if said["local"] is not None else "",
        named=bool(said["named"]),
        store=str(said["store"]),
        have=tuple(said["have"]),
        docker_root=said["root"],
        docker_free_bytes=said["free_bytes"],
        spool_free_bytes=said["spool_free_bytes"],
        one_disk=bool(said["one_disk"]),
    )


def _local_id(host: str, said: object) -> str:
    """Return a valid image ID from a host's answer, because it becomes a word of a command line there."""
    if not isinstance(said, str) or not re.fullmatch("sha256:[0-9a-f]{64}", said):
        raise HostFailure(f"the host's Docker answered {str(said)[:80]!r}, which is not an image ID", host=host)
    return said


def _is_full(error: GpurunError) -> bool:
    """Return whether a host failed because its disk is full. Such a host keeps nothing for the next try."""
    return isinstance(error, RemoteOpFailed) and error.kind == "no-space"


def _may_be_stale(error: GpurunError, answer: Answer) -> bool:
    """Return whether a load may have failed because layers have disappeared since the host's answer."""
    stale = ("load-failed", "not-verified", "not-found")
    return isinstance(error, RemoteOpFailed) and error.kind in stale and bool(answer.have)


def typed_error(error: GpurunError) -> GpurunError:
    """Turn an error of a host's agent into the error that the user sees."""
    if not isinstance(error, RemoteOpFailed):
        return error
    if error.kind in HINTS:
        return HostNotReady(error.message, kind=error.kind, host=error.host, hint=HINTS[error.kind])
    return HostFailure(error.message, kind=error.kind, host=error.host)

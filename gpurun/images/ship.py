"""Ship an image from the head to hosts: ask what is missing, send it through the hosts, load and verify it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from gpurun.errors import GpurunError, HostFailure, HostNotReady, NoRoom
from gpurun.images.engine import Engine, HeadImage
from gpurun.images.events import HostShip, ShipEvent, ShipReport
from gpurun.images.export import Exporter, default_folder
from gpurun.images.plan import Answer, ShipPlan, lacks_room, plan_ship
from gpurun.images.progress import Progress
from gpurun.images.relay import DamagedBlob, Relay
from gpurun.images.seats import Options
from gpurun.images.shared import alone
from gpurun.images.store import Stored
from gpurun.images.topology import options_for
from gpurun.quantities.times import duration
from gpurun.remote import Agent, Fleet, RemoteOpFailed

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.remote.agent import Stream

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
            with alone(default_folder(), self._image.id, lacking, self._wait) as waited:
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
        self, host: str, state: str, error: GpurunError | None = None, ended_s: float | None = None, local: str = ""
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

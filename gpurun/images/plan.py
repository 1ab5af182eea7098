"""The plan of a ship, as one value that ``--dry-run`` prints and `ship` executes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpurun.images import topology
from gpurun.images.chain import Hop, Want, chain, star

if TYPE_CHECKING:
    from gpurun.images.engine import HeadImage
    from gpurun.inventory.model import Inventory

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
    """One layer that some host lacks."""

    digest: str
    bytes: int
    hosts: tuple[str, ...]


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

    def as_json(self) -> dict[str, Any]:
        """The document that ``gpurun ship --dry-run --json`` prints."""
        return {
            "image": self.image,
            "id": self.id,
            "bytes_missing": self.bytes_missing,
            "shape": self.shape,
            "expected_s": round(self.expected_s, 2),
            "present": list(self.present),
            "unnamed": list(self.unnamed),
            "layers": [
                {"digest": layer.digest, "bytes": layer.bytes, "hosts": list(layer.hosts)} for layer in self.layers
            ],
            "chains": [
                [
                    {"host": hop.host, "rack": hop.rack, "from": hop.upstream or "head", "layers": list(hop.digests)}
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
    wants = [Want(a.host, topology.rack_of(inventory, a.host), missing_layers(image.layers, a, full)) for a in lacking]
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
    if not topology.host_to_host(inventory, hosts):
        return (star(wants),)
    lanes = topology.lanes(inventory, hosts)
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
    return "chain" if topology.host_to_host(inventory, [want.host for want in wants]) else "star"


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

"""Rules of claims on GPUs: the content of a claim, and who may take which GPU. Pure: no Docker, no process, no clock.

A claim is an empty Docker volume. Its name is the GPU, its labels name the holder. Docker creates a volume only for
the first request, and shows it to every user who may give a container a GPU. A job's container has the same labels, so
it is a claim, too, even if somebody prunes the volume. `gpurun.node.job.claims` carries out these decisions
(docs/decisions/0012-claims-on-the-host.md).
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

Card = Tuple[int, str]
"""A GPU: its index, and its UUID if known. The index is what Docker was given; a lost GPU shifts those behind it."""

PREFIX = "gpurun-gpu-"
CLAIM_LABEL = "gpurun.claim"
JOB_LABEL = "gpurun.job"
CPUS_LABEL = "gpurun.cpus"
EVENLY = "/n"
"""Behind the number in `CPUS_LABEL`: the containers that run divide these cores."""
"""The cores of a container's share, such as ``7.50`` (`gpurun.node.job.watch`)."""
VERSION = "1"

_JOB = re.compile(r"j-[0-9a-f]{8}\Z")
_STATE = re.compile(r"[0-9a-f]{8,64}\Z")
_UUID = re.compile(r"[0-9A-Za-z-]{1,80}\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_MOST_TEXT = 64
_MOST_CARDS = 256


class Claimant(NamedTuple):
    """The holder of a claim.

    Attributes:
        job: its id; "" if the label is missing.
        attempt: the attempt of the job.
        state: the id of the job's state directory.
        user: the name of the job's owner on the head node.
        uid: the owner's number on the head node; -1 if the label is missing.
        head: the name of the head node.
    """

    job: str = ""
    attempt: int = 0
    state: str = ""
    user: str = ""
    uid: int = -1
    head: str = ""

    @property
    def key(self) -> Tuple[str, str, int]:
        """Return the key that all claims of one attempt share."""
        return self.state, self.job, self.attempt

    def labels(self) -> Dict[str, str]:
        """Return the labels that volumes and containers share."""
        return {
            JOB_LABEL: self.job,
            "gpurun.attempt": str(self.attempt),
            "gpurun.state": self.state,
            "gpurun.user": self.user,
            "gpurun.uid": str(self.uid),
            "gpurun.head": self.head,
        }


class Volume(NamedTuple):
    """A claim on a host.

    Attributes:
        name: the Docker volume's name.
        card: the GPU.
        claimant: the holder; empty fields if the labels are damaged.
        account: the number of the host account whose agent made it; -1 if the label is missing.
        since_s: when, by the host's clock, seconds since the epoch; 0 if the label is missing.
        alive: the agent that made it, or a later one for the same attempt, is connected now.
        known: this gpurun understands the labels. It must not judge a claim of a newer gpurun.
    """

    name: str
    card: Card
    claimant: Claimant
    account: int = -1
    since_s: int = 0
    alive: bool = False
    known: bool = True


class Container(NamedTuple):
    """A container of a gpurun job, in any state.

    Attributes:
        id: Docker's id.
        claimant: from its labels; an older gpurun gave it only a job and an attempt.
        cards: its GPUs.
        status: Docker's status, such as ``running``.
    """

    id: str
    claimant: Claimant
    cards: Tuple[Card, ...]
    status: str = ""


class Seen(NamedTuple):
    """All claims on a host's GPUs at one moment."""

    volumes: Tuple[Volume, ...]
    containers: Tuple[Container, ...]


class Refused(NamedTuple):
    """A GPU that another attempt holds.

    Attributes:
        card: the wanted GPU.
        holder: the holder.
        cards: all GPUs of this holder on the host.
        why: the evidence that it still holds them.
    """

    card: Card
    holder: Claimant
    cards: Tuple[Card, ...]
    why: str


class Step(NamedTuple):
    """The action for one wanted GPU: one of these, or none if it is ours already.

    Attributes:
        make: make a claim.
        over: the stale claims to remove first. There are two if one was made by index and one by UUID.
        refused: leave it to its holder.
    """

    card: Card
    make: bool = False
    over: Tuple[Volume, ...] = ()
    refused: Optional[Refused] = None


def decide(me: Claimant, wanted: Iterable[Card], seen: Seen) -> List[Step]:
    """Decide about each wanted GPU, in the one order in which everybody takes them.

    Two claimants that want some of the same GPUs take them in the same order, so one of them gets all that it wants.
    """
    return [_step(me, card, seen) for card in sorted(wanted, key=volume_name)]


def _step(me: Claimant, card: Card, seen: Seen) -> Step:
    for container in seen.containers:
        if container.claimant.key != me.key and holds(container.cards, card):
            return Step(card, refused=refusal(card, container.claimant, seen, _has(container)))
    of_card = [volume for volume in seen.volumes if same_gpu(volume.card, card)]
    others = [volume for volume in of_card if volume.claimant.key != me.key]
    for volume in others:
        why = why_live(volume, seen)
        if why:
            return Step(card, refused=refusal(card, volume.claimant, seen, why))
    return Step(card, make=len(others) == len(of_card), over=tuple(others))


def why_live(volume: Volume, seen: Seen) -> str:
    """Return the evidence that a claim's holder still needs it; "" if there is none."""
    if not volume.known:
        return "a newer version of gpurun reserved the GPU"
    if volume.alive:
        return "the job's head node is connected"
    for container in seen.containers:
        if volume.claimant.job and container.claimant.job == volume.claimant.job:
            return _has(container)
    return ""


def refusal(card: Card, holder: Claimant, seen: Seen, why: str) -> Refused:
    """Return a refusal with all GPUs of the holder on this host."""
    cards = {card}
    cards.update(volume.card for volume in seen.volumes if volume.claimant.key == holder.key)
    cards.update(each for one in seen.containers if one.claimant.key == holder.key for each in one.cards)
    return Refused(card, holder, tuple(sorted(cards)), why)


def _has(container: Container) -> str:
    return "the job's container %s is %s" % (container.id[:12], container.status or "there")


def same_gpu(one: Card, other: Card) -> bool:
    """Return whether two claims are about one GPU: by UUID, or by index if a UUID is missing."""
    return one[1] == other[1] if one[1] and other[1] else one[0] == other[0]


def holds(cards: Iterable[Card], card: Card) -> bool:
    """Return whether a GPU is among `cards`."""
    return any(same_gpu(each, card) for each in cards)


# -- what is written on volumes and containers ----------------------------------------------------------


def volume_name(card: Card) -> str:
    """Return the name of a GPU's claim. Only one such volume can exist, so only one claimant can hold the GPU."""
    index, uuid = card
    return PREFIX + (uuid if _UUID.match(uuid) else "index-%d" % index)


def volume_labels(me: Claimant, card: Card, account: int, since_s: int) -> Dict[str, str]:
    """Return the labels of a new claim."""
    return dict(
        me.labels(),
        **{
            CLAIM_LABEL: VERSION,
            "gpurun.gpu": str(card[0]),
            "gpurun.uuid": card[1],
            "gpurun.account": str(account),
            "gpurun.since": str(since_s),
        },
    )


def container_labels(me: Claimant, cards: Iterable[Card]) -> Dict[str, str]:
    """Return the labels of a job's container."""
    ordered = list(cards)
    labels = dict(me.labels(), **{"gpurun.gpus": ",".join(str(index) for index, _ in ordered)})
    if uuids := uuids_of(ordered):
        labels["gpurun.uuids"] = uuids
    return labels


def uuids_of(cards: Iterable[Card]) -> str:
    """Return the UUIDs of all GPUs, with commas between them; empty if one of them is not known."""
    found = [uuid for _, uuid in cards]
    return ",".join(found) if all(_UUID.match(uuid) for uuid in found) else ""


def read_volume(name: str, labels: Any) -> Optional[Volume]:
    """Read a Docker volume as a claim; None if its name is not a GPU's. Labels may contain anything."""
    if not name.startswith(PREFIX):
        return None
    said = _texts(labels)
    index, uuid = _number(said.get("gpurun.gpu"), -1), name[len(PREFIX) :]
    if uuid.startswith("index-"):
        index, uuid = _number(uuid[len("index-") :], -1), ""
        if index < 0:
            return None
    elif not _UUID.match(uuid):
        return None
    known = said.get(CLAIM_LABEL, VERSION) == VERSION
    account, since_s = _number(said.get("gpurun.account"), -1), _number(said.get("gpurun.since"), 0, 12)
    return Volume(name, (index, uuid), read_claimant(said), account, since_s, known=known)


def read_claimant(labels: Any) -> Claimant:
    """Read the claimant in labels. Ignores invalid values."""
    said = _texts(labels)
    job, state = said.get(JOB_LABEL, ""), said.get("gpurun.state", "")
    return Claimant(
        job if _JOB.match(job) else "",
        _number(said.get("gpurun.attempt"), 0),
        state if _STATE.match(state) else "",
        _shown(said.get("gpurun.user", "")),
        _number(said.get("gpurun.uid"), -1),
        _shown(said.get("gpurun.head", "")),
    )


def read_cards(labels: Any) -> Optional[Tuple[Card, ...]]:
    """Read the GPUs in a container's labels; None if there is no such label, as with an older gpurun."""
    said = _texts(labels)
    if "gpurun.gpus" not in said:
        return None
    indices = [_number(text, -1) for text in said["gpurun.gpus"].split(",")[:_MOST_CARDS]]
    uuids = said.get("gpurun.uuids", "").split(",")
    if len(uuids) != len(indices) or not all(_UUID.match(uuid) for uuid in uuids):
        uuids = [""] * len(indices)
    return tuple(card for card in zip(indices, uuids) if card[0] >= 0 or card[1])


def given_cards(requests: Any) -> Tuple[Card, ...]:
    """Read a container's GPUs from Docker's ``HostConfig.DeviceRequests``: indices or UUIDs."""
    found = []
    for request in requests if isinstance(requests, list) else []:
        ids = request.get("DeviceIDs") if isinstance(request, dict) else None
        for text in ids if isinstance(ids, list) else []:
            if isinstance(text, str) and _NUMBER.match(text):
                found.append((int(text), ""))
            elif isinstance(text, str) and _UUID.match(text):
                found.append((-1, text))
    return tuple(found)


def _texts(labels: Any) -> Mapping[str, str]:
    if not isinstance(labels, dict):
        return {}
    return {key: value for key, value in labels.items() if isinstance(key, str) and isinstance(value, str)}


def _number(text: Optional[str], otherwise: int, digits: int = 9) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > digits:
        return otherwise
    return int(text)


def _shown(text: str) -> str:
    """Return a name from a label without control characters, and shortened."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_TEXT])

"""Claims on GPUs: what a claim says, and who may take which GPU. Pure: no Docker, no process, no clock.

A claim is an empty Docker volume whose name is the GPU and whose labels name the holder. Docker makes a volume once,
whoever asks first, and shows it to everybody who may give a container a GPU. A job's container carries the same labels:
it is a claim too, also after somebody has pruned the volume. `gpurun.node.claims` does what is decided here
(docs/decisions/0012-claims-on-the-host.md).
"""

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

Card = Tuple[int, str]
"""A GPU: its index, and its UUID if known. The index is what Docker was given; a lost GPU shifts those behind it."""

PREFIX = "gpurun-gpu-"
CLAIM_LABEL = "gpurun.claim"
JOB_LABEL = "gpurun.job"
VERSION = "1"

_JOB = re.compile(r"j-[0-9a-f]{8}\Z")
_STATE = re.compile(r"[0-9a-f]{8,64}\Z")
_UUID = re.compile(r"[0-9A-Za-z-]{1,80}\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_MOST_TEXT = 64
_MOST_CARDS = 256


class Claimant(NamedTuple):
    """Who wants GPUs.

    Attributes:
        job: its id; "" where a label does not say.
        attempt: which start of the job it is.
        state: the id of the state directory that the job belongs to.
        user: the name of the job's owner on the head node.
        uid: the owner's number on the head node; -1 where a label does not say.
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
        """What makes two claims those of one attempt."""
        return self.state, self.job, self.attempt

    def labels(self) -> Dict[str, str]:
        """The labels that volumes and containers share."""
        return {
            JOB_LABEL: self.job,
            "gpurun.attempt": str(self.attempt),
            "gpurun.state": self.state,
            "gpurun.user": self.user,
            "gpurun.uid": str(self.uid),
            "gpurun.head": self.head,
        }


class Volume(NamedTuple):
    """A claim as a host has it.

    Attributes:
        name: of the Docker volume.
        card: the GPU.
        claimant: who holds it; empty fields where the labels are damaged.
        account: the host account, by number, whose agent made it; -1 where the label does not say.
        since_s: when, by the host's clock, seconds since the epoch; 0 where the label does not say.
        alive: the agent that made it, or a later one for the same attempt, is connected now.
        known: this gpurun understands the labels. A claim of a newer gpurun is not for us to judge.
    """

    name: str
    card: Card
    claimant: Claimant
    account: int = -1
    since_s: int = 0
    alive: bool = False
    known: bool = True


class Container(NamedTuple):
    """A container of a gpurun job, in whatever state.

    Attributes:
        id: Docker's id.
        claimant: as its labels say; an older gpurun gave it a job and an attempt alone.
        cards: the GPUs it was given.
        status: Docker's word, such as ``running``.
    """

    id: str
    claimant: Claimant
    cards: Tuple[Card, ...]
    status: str = ""


class Seen(NamedTuple):
    """What claims a host's GPUs at one moment."""

    volumes: Tuple[Volume, ...]
    containers: Tuple[Container, ...]


class Refused(NamedTuple):
    """A GPU that somebody else holds.

    Attributes:
        card: the GPU that was wanted.
        holder: who holds it.
        cards: all GPUs that this holder has on the host.
        why: how one knows that it still holds them.
    """

    card: Card
    holder: Claimant
    cards: Tuple[Card, ...]
    why: str


class Step(NamedTuple):
    """What to do about one wanted GPU: nothing if it is ours already, or one of these.

    Attributes:
        make: make a claim.
        over: the stale claims to remove first. There are two where one was made by index and one by UUID.
        refused: leave it to its holder.
    """

    card: Card
    make: bool = False
    over: Tuple[Volume, ...] = ()
    refused: Optional[Refused] = None


def decide(me: Claimant, wanted: Iterable[Card], seen: Seen) -> List[Step]:
    """What to do about each wanted GPU, in the one order in which everybody takes them.

    Two claimants that want some of the same GPUs take them in the same order: so one of them gets all that it wants.
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
    """How one knows that a claim's holder still needs it; "" if nothing of the holder is to be seen."""
    if not volume.known:
        return "a newer gpurun made the claim"
    if volume.alive:
        return "its head node is connected"
    for container in seen.containers:
        if volume.claimant.job and container.claimant.job == volume.claimant.job:
            return _has(container)
    return ""


def refusal(card: Card, holder: Claimant, seen: Seen, why: str) -> Refused:
    """A refusal that names all GPUs of the holder on this host."""
    cards = {card}
    cards.update(volume.card for volume in seen.volumes if volume.claimant.key == holder.key)
    cards.update(each for one in seen.containers if one.claimant.key == holder.key for each in one.cards)
    return Refused(card, holder, tuple(sorted(cards)), why)


def _has(container: Container) -> str:
    return "its container %s is %s" % (container.id[:12], container.status or "there")


def same_gpu(one: Card, other: Card) -> bool:
    """Whether two claims are about one GPU: UUIDs tell it, indices only where a UUID is missing."""
    return one[1] == other[1] if one[1] and other[1] else one[0] == other[0]


def holds(cards: Iterable[Card], card: Card) -> bool:
    """Whether a GPU is among `cards`."""
    return any(same_gpu(each, card) for each in cards)


# -- what is written on volumes and containers ----------------------------------------------------------


def volume_name(card: Card) -> str:
    """The name of a GPU's claim. Only one such volume can exist, so only one claimant can hold the GPU."""
    index, uuid = card
    return PREFIX + (uuid if _UUID.match(uuid) else "index-%d" % index)


def volume_labels(me: Claimant, card: Card, account: int, since_s: int) -> Dict[str, str]:
    """The labels of a new claim."""
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
    """The labels of a job's container."""
    ordered = list(cards)
    labels = dict(me.labels(), **{"gpurun.gpus": ",".join(str(index) for index, _ in ordered)})
    if ordered and all(_UUID.match(uuid) for _, uuid in ordered):
        labels["gpurun.uuids"] = ",".join(uuid for _, uuid in ordered)
    return labels


def read_volume(name: str, labels: Any) -> Optional[Volume]:
    """A Docker volume as a claim; None if its name is no GPU's. Labels may hold anything."""
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
    """Who the labels name. What is no proper value counts as not said."""
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
    """The GPUs that a container's labels name; None if there is no such label, as on those of an older gpurun."""
    said = _texts(labels)
    if "gpurun.gpus" not in said:
        return None
    indices = [_number(text, -1) for text in said["gpurun.gpus"].split(",")[:_MOST_CARDS]]
    uuids = said.get("gpurun.uuids", "").split(",")
    if len(uuids) != len(indices) or not all(_UUID.match(uuid) for uuid in uuids):
        uuids = [""] * len(indices)
    return tuple(card for card in zip(indices, uuids) if card[0] >= 0 or card[1])


def given_cards(requests: Any) -> Tuple[Card, ...]:
    """The GPUs that a container was given, from Docker's ``HostConfig.DeviceRequests``: indices or UUIDs."""
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
    """A name from a label, fit to be printed: no control characters, and not the whole screen."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_TEXT])

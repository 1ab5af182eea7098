"""Read a host's report about claims on its GPUs: who holds which GPU, and the evidence. A host is not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpurun.errors import HostNotReady
from gpurun.facts.documents import convert
from gpurun.node.gpu.claim_rules import Claimant, Refused, Seen, read_claimant, why_live

_MOST_TEXT = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}\Z")


@dataclass(frozen=True)
class HeldGpus:
    """Everything that one attempt holds on one host.

    Attributes:
        gpus: the GPUs' indices.
        why: the evidence that the attempt still needs them; "" if there is none: the claim is stale.
        volumes: the names of its claims.
        containers: the ids of its containers.
        since_s: when the first claim was made, by the host's clock, seconds since the epoch; 0 if unknown.
    """

    claimant: Claimant
    gpus: tuple[int, ...] = ()
    why: str = ""
    volumes: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    since_s: int = 0


@dataclass
class _Gathered:
    claimant: Claimant
    gpus: set[int] = field(default_factory=set)
    why: str = ""
    volumes: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    since_s: set[int] = field(default_factory=set)


def held(host: str, document: object) -> tuple[HeldGpus, ...]:
    """Return who holds GPUs of a host, from its answer to ``claims.list``.

    Raises:
        HostNotReady: the answer is not valid.
    """
    seen = convert(host, Seen, document)
    found: dict[tuple[str, str, int], _Gathered] = {}
    for volume in seen.volumes:
        who = _said(volume.claimant)
        one = found.setdefault(who.key, _Gathered(who))
        one.gpus.add(volume.card[0])
        one.volumes.append(_name(host, volume.name))
        one.why = one.why or printable(why_live(volume, seen))
        one.since_s.add(volume.since_s)
    for container in seen.containers:
        who = _said(container.claimant)
        one = found.setdefault(who.key, _Gathered(who))
        one.gpus.update(index for index, _ in container.cards)
        one.containers.append(_name(host, container.id))
        one.why = one.why or printable(f"the job's container {container.id[:12]} is {container.status or 'present'}")
    return tuple(_shown(one) for one in found.values())


def refused(host: str, document: object) -> Iterator[HeldGpus]:
    """Yield the holders of GPUs that a host refused, each once, from the detail of its error ``claimed``.

    Raises:
        HostNotReady: the answer is not valid.
    """
    done = set()
    for each in convert(host, list[Refused], document):
        who = _said(each.holder)
        if who.key not in done:
            done.add(who.key)
            yield _shown(_Gathered(who, {index for index, _ in (each.card, *each.cards)}, printable(each.why)))


def printable(text: str) -> str:
    """Return a host's text without control characters, and shortened."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_TEXT])


def _name(host: str, said: str) -> str:
    """Return a valid name of a Docker volume or container. gpurun shows people commands with such names.

    Raises:
        HostNotReady: the name is not valid.
    """
    if not _NAME.match(said):
        raise HostNotReady(f"the host's answer is not valid: {printable(said)!r} is not a name in Docker", host=host)
    return said


def _said(claimant: Claimant) -> Claimant:
    """Read a claimant as untrusted text, like the labels of a container."""
    return read_claimant(claimant.labels())


def _shown(one: _Gathered) -> HeldGpus:
    gpus = tuple(sorted(index for index in one.gpus if index >= 0))
    since_s = min((each for each in one.since_s if each > 0), default=0)
    return HeldGpus(one.claimant, gpus, one.why, tuple(one.volumes), tuple(one.containers), since_s)

"""Take, check and release claims on this host's GPUs (docs/decisions/0012-claims-on-the-host.md).

The head calls `take` before it ships an image, before it creates a container, and again when the container exists and
before it starts. The last check decides: if the containers of two claimants exist, the one that looks last sees the
other's container, and does not start. So no GPU has two gangs, whatever happens to volumes in between.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import struct
import threading
import time
import urllib.parse
from typing import Any, Dict, List, Optional, Protocol, Sequence, Set, Tuple

from gpurun.node import docker, gpus
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.claim_rules import (
    JOB_LABEL,
    PREFIX,
    Card,
    Claimant,
    Container,
    Refused,
    Seen,
    Step,
    Volume,
    decide,
    given_cards,
    read_cards,
    read_claimant,
    read_volume,
    refusal,
    volume_labels,
    volume_name,
)
from gpurun.node.docker import of_jobs
from gpurun.node.job import hooks, parts
from gpurun.node.nvml_apart import Nvml

# The storage of claims on this host: Docker's volumes and containers, and signs that agents are connected.


TIMEOUT_S = 30.0
_BUSY = -1
_BUSY_TRIES, _BUSY_TRY_S = 20, 0.01
"""An agent takes each call at once. Whoever keeps its line full for longer is not believed: it may be anybody."""
_SIGN = "gpurun-claim-%s-%s-%d-"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (man 7 unix)
_signs: Dict[str, socket.socket] = {}


class DockerStore:
    """The claims of this host. Not for several threads at the same time.

    Every request to the engine may raise:
        OpError: ``no-docker`` or ``docker``: nothing is known about claims.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def look(self) -> Seen:
        """Return all present claims. Lists containers second, so it sees one that appears meanwhile."""
        volumes = self._ask("GET", "/volumes?filters=" + _filter("name", PREFIX), "listing claims").get("Volumes")
        found = [read_volume(str(each.get("Name")), each.get("Labels")) for each in volumes or []]
        signs = _seen_signs()
        listed = self._ask("GET", "/containers/json?all=1&filters=" + _filter("label", JOB_LABEL), "listing jobs")
        containers = of_jobs(listed, lambda path: self._exchange("GET", path))
        return Seen(
            tuple(one._replace(alive=_is_alive(one, signs)) for one in found if one is not None),
            tuple(each for each in map(self._container, containers) if each is not None),
        )

    def make(self, me: Claimant, card: Card) -> Claimant:
        """Claim a GPU unless it is claimed; return the present claimant."""
        labels = volume_labels(me, card, os.getuid(), int(time.time()))
        answer = self._ask("POST", "/volumes/create", "making a claim", {"Name": volume_name(card), "Labels": labels})
        return read_claimant(answer.get("Labels"))

    def remove(self, volume: Volume) -> bool:
        """Remove exactly this claim; return False if it is still there, or another one now has its name."""
        path = "/volumes/" + urllib.parse.quote(volume.name)
        status, answer = self._exchange("GET", path)
        if status == 404:
            return True
        found = docker.parse_answer(answer)
        now = read_volume(volume.name, found.get("Labels")) if isinstance(found, dict) else None
        if status != 200 or now != volume._replace(alive=False):
            return False
        return self._exchange("DELETE", path)[0] in (204, 404)

    def still_runs(self, volume: Volume) -> str:
        """Return what is still left of a stale claim's holder on this host; "" if nothing is.

        The caller has already looked for its containers. This looks for its processes, of any owner, and for users of
        the GPU.
        """
        if volume.claimant.job:
            for process in parts.processes_of(volume.claimant.job, everybody=True):
                return "the job's process %d still runs (%s)" % (process.pid, process.command[:120])
        with Nvml() as nvml:
            users = gpus.find_holders(nvml, [volume.card])
        for holder in users.holders:
            return "pid %d of %s holds the GPU" % (holder["pid"], holder["user"] or "an unknown user")
        return users.problem

    def _container(self, listed: Dict[str, Any]) -> Optional[Container]:
        """Return a listed container as a claim; None if it was removed since."""
        ident, labels = str(listed.get("Id")), listed.get("Labels")
        cards = read_cards(labels)
        if cards is None:
            status, answer = self._exchange("GET", "/containers/%s/json" % ident)
            if status == 404:
                return None
            if status != 200:
                raise docker.failure(status, answer, "inspecting a container")
            cards = given_cards(docker.parse_answer(answer).get("HostConfig", {}).get("DeviceRequests"))
        return Container(ident, read_claimant(labels), cards, str(listed.get("State", "")))

    def _ask(self, method: str, path: str, what: str, body: Any = None) -> Any:
        status, answer = self._exchange(method, path, body)
        if status not in (200, 201):
            raise docker.failure(status, answer, what)
        return docker.parse_answer(answer)

    def _exchange(self, method: str, path: str, body: Any = None) -> Tuple[int, bytes]:
        connection = docker.open_engine(self._call, timeout_s=TIMEOUT_S)
        try:
            return docker.exchange(connection, method, path, body)
        except (socket.timeout, http.client.HTTPException, ConnectionError) as error:
            self._call.check()
            raise OpError(
                "no-docker", "Docker closed the connection during %s %s: %r" % (method, path, error)
            ) from None
        finally:
            connection.close()


def _filter(kind: str, value: str) -> str:
    return urllib.parse.quote('{"%s":["%s"]}' % (kind, value))


# -- signs of life -------------------------------------------------------------------------------------


def show_life(me: Claimant) -> None:
    """Show, until `hide_life` or the end of this process, that an attempt's agent is connected.

    If the kernel does not allow it, a claim without a container counts as stale. Everybody who starts a container
    checks the claims again, so two gangs never get one GPU.
    """
    name = _SIGN % me.key
    if name in _signs:
        return
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sign.bind("\0%s%d" % (name, os.getpid()))
        sign.listen(16)
    except OSError:
        sign.close()
        return
    _signs[name] = sign
    threading.Thread(target=_take_calls, args=(sign,), name="sign of life", daemon=True).start()


def _take_calls(sign: socket.socket) -> None:
    """Take and end every call until the sign is hidden: a full line would not say who listens."""
    while True:
        try:
            sign.accept()[0].close()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED):
                return
            time.sleep(_BUSY_TRY_S)


def hide_life(me: Claimant) -> None:
    """Remove the sign that the agent is connected. Idempotent."""
    sign = _signs.pop(_SIGN % me.key, None)
    if sign is not None:
        sign.shutdown(socket.SHUT_RDWR)  # ends the wait for the next call
        sign.close()


def _close_signs() -> None:
    """Close the sockets in a child of the agent: it may outlive the agent, but must not look like it."""
    for sign in _signs.values():
        sign.close()
    _signs.clear()


os.register_at_fork(after_in_child=_close_signs)


def _seen_signs() -> List[str]:
    """Return the names of all abstract sockets of this host (man proc_pid_net: ``@`` replaces the first NUL)."""
    names: Set[str] = set()
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as stream:
            for line in stream:
                path = line.rstrip("\n").split(" ")[-1]
                if path.startswith("@gpurun-claim-"):
                    names.add(path[1:])
    except OSError:
        pass  # then claims without a container count as stale; starting a container checks again
    return sorted(names)


def _is_alive(volume: Volume, signs: List[str]) -> bool:
    """Return whether an agent of the attempt is connected: it listens as the account that made the claim, or as
    root.
    """
    asked = [name for name in signs if name.startswith(_SIGN % volume.claimant.key)]
    for _ in range(_BUSY_TRIES):
        listeners = {name: _listener(name) for name in asked}
        if not {volume.account, 0}.isdisjoint(listeners.values()):
            return True
        asked = [name for name, listener in listeners.items() if listener == _BUSY]
        if not asked:
            return False
        time.sleep(_BUSY_TRY_S)
    return False


def _listener(name: str) -> Optional[int]:
    """Return the account that listens on an abstract socket; None if no process listens; `_BUSY`: nobody knows."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect("\0" + name)
        except OSError as error:
            # EAGAIN: its backlog is full. A process listens, but the kernel does not say which account.
            return _BUSY if error.errno == errno.EAGAIN else None
        size = _CREDENTIALS.size
        return int(_CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


class Store(Protocol):
    """The storage of claims: `DockerStore`, or a test's."""

    def look(self) -> Seen:
        """Return all present claims."""

    def make(self, me: Claimant, card: Card) -> Claimant:
        """Claim a GPU unless it is claimed; return the present claimant. Atomic."""

    def remove(self, volume: Volume) -> bool:
        """Remove exactly this claim; return False if it is still there, or another one now has its name."""

    def still_runs(self, volume: Volume) -> str:
        """Return what is still left of a stale claim's holder on this host; "" if nothing is."""


def take(store: Store, me: Claimant, wanted: Sequence[Card]) -> List[Refused]:
    """Claim all these GPUs, or none of those that were not claimed before. Idempotent.

    Returns:
        The GPUs that others hold; empty if all are ours now.
    """
    seen = store.look()
    steps = decide(me, wanted, seen)
    refused = [step.refused for step in steps if step.refused is not None]
    made: List[Card] = []
    for step in [] if refused else steps:
        refused = _take_over(store, step, seen)
        if refused:
            break
        if step.make:
            holder = store.make(me, step.card)
            if holder.key != me.key:
                refused = [refusal(step.card, holder, seen, "this job has just claimed the GPU")]
                break
            made.append(step.card)
    if refused:
        _give_back(store, me, made)
    return refused


def _take_over(store: Store, step: Step, seen: Seen) -> List[Refused]:
    """Remove the stale claims on a GPU; return the holders that turn out to be alive."""
    for volume in step.over:
        why = store.still_runs(volume)
        if not why and not store.remove(volume):
            why = "another job has just taken over the claim"
        if why:
            return [refusal(step.card, volume.claimant, seen, why)]
    return []


def _give_back(store: Store, me: Claimant, made: Sequence[Card]) -> None:
    if made:
        for volume in store.look().volumes:
            if volume.claimant.key == me.key and volume.card in made:
                store.remove(volume)


def release_claims(store: Store, me: Claimant) -> List[str]:
    """Remove every claim of an attempt; return the names of those that are still there. Idempotent.

    Only a fence calls this, after it has checked that nothing of the job is left on this host.
    """
    for volume in store.look().volumes:
        if volume.claimant.key == me.key:
            store.remove(volume)
    return [volume.name for volume in store.look().volumes if volume.claimant.key == me.key]


# -- operations ----------------------------------------------------------------------------------------


def take_here(call: Call, claimant: Dict[str, Any], cards: List[List[Any]]) -> None:
    """Claim GPUs of this host for an attempt, and show that its agent is connected. Idempotent.

    Args:
        claimant: the fields of a `Claimant`.
        cards: ``[index, uuid]`` of each GPU; ``""`` for an unknown UUID.

    Raises:
        OpError: ``claimed``: another attempt holds one of them. ``refused`` in the detail lists the holders, as
            `Refused`.
    """
    me = Claimant(**claimant)
    show_life(me)
    refused = take(DockerStore(call), me, [(int(index), str(uuid)) for index, uuid in cards])
    if refused:
        hide_life(me)
        raise OpError("claimed", "other jobs hold %d of the GPUs" % len(refused), refused=refused)


def take_first(call: Call, claimant: Dict[str, Any], cards: List[List[Any]]) -> None:
    """Claim GPUs as `take_here`, for the first time in an attempt, and note that it holds them."""
    take_here(call, claimant, cards)
    hooks.begin_hooks(str(claimant["job"]), int(claimant["attempt"]))


def release_here(call: Call, me: Claimant) -> List[str]:
    """Remove an attempt's claims on this host, as `release`, and the sign that its agent is connected."""
    hide_life(me)
    return release_claims(DockerStore(call), me)


def list_here(call: Call) -> Seen:
    """Return every claim on this host, and every container of a gpurun job."""
    return DockerStore(call).look()


def of_others(call: Call, job: str, attempt: int) -> List[Container]:
    """Return the containers on this host of other gpurun jobs, and of this job's later attempts."""
    found = DockerStore(call).look().containers
    return [each for each in found if each.claimant.job != job or each.claimant.attempt > attempt]


OPS = {"take": take_first, "list": list_here}

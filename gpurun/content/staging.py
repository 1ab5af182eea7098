"""Copy a data set, or a job's code, to hosts: ask which hosts have it, send it to those that lack it, and name it once
it is complete.

A set travels like an image (`gpurun.content.relay`), as one blob: from the user's folder on the head, or from a host
that has it. The head makes no copy. Hosts take the files that they have from earlier sets. Of code, each host says what
it lacks; little of it comes directly over the host's SSH channel, as setting up a transfer would take longer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypedDict

from gpurun.content import seats
from gpurun.content.chain import Hop, Want, chain, star
from gpurun.content.data import DataContent, DataFolder, content_of_code, content_of_folder, content_of_host
from gpurun.content.export import default_folder
from gpurun.content.relay import DamagedBlob, Relay
from gpurun.content.ship import Progress, ShipEvent, ShipState, hold_image
from gpurun.content.workdir import Code
from gpurun.errors import BadInput, GpurunError, HostFailure, HostNotReady, HostUnreachable, StateError, messages_of
from gpurun.inventory.model import Inventory
from gpurun.node.agent import frames
from gpurun.node.transfer.sets import CODE, DATA, packed
from gpurun.remote import Agent, Fleet, RemoteOpFailed, Results
from gpurun.remote.agent import bad_answer
from gpurun.state import caches

if TYPE_CHECKING:
    from typing_extensions import NotRequired

# Decide from which host each host gets a data set. Pure.


def routes(
    inventory: Inventory | None, lacking: Sequence[str], holders: Iterable[str], blob: str, size: int
) -> tuple[tuple[Hop, ...], ...]:
    """Return the hops of each lane, including the holders, which pull nothing.

    Args:
        lacking: hosts that need the set.
        holders: hosts that have the set, the preferred host first.
        blob: the set's blob, of `size` bytes.
    """
    wants = [Want(host, seats.rack_of(inventory, host), (blob,)) for host in lacking]
    if not seats.host_to_host(inventory, [*lacking, *holders]):
        return (star(wants),)
    lanes = seats.lanes(inventory, lacking)
    sources = [Hop(host, seats.rack_of(inventory, host), None, (blob,)) for host in holders]
    return tuple(_behind(sources, chain(wants, {blob: size}, lane=lane, lanes=lanes)) for lane in range(lanes))


def _behind(sources: Sequence[Hop], hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the hops of a chain: those of each rack behind a holder in that rack, the others behind any holder."""
    ordered: dict[str, Hop] = {}
    for rack, group in groupby(hops, key=lambda hop: hop.rack):
        near = next((source for source in sources if source.rack == rack), None)
        source = near or (next(iter(sources), None) if not ordered else None)
        if source is not None:
            ordered.setdefault(source.host, source)
        for hop in group:
            before = source.host if source is not None else hop.upstream
            ordered[hop.host] = Hop(hop.host, hop.rack, before, hop.digests)
            source = None
    return tuple(ordered.values())


# Check a host's copy of a data set, and discard a damaged one.


SILENCE_S, READ_LIMIT_S = 120.0, 6 * 3600.0
DISCARD_LIMIT_S = 600.0


class DamagedCopy(HostFailure):
    """A host says that its copy of a set is not what the set's digest says."""


class Unusable(HostFailure):
    """A host cannot use what another host sends. It is unknown which of the two is at fault."""


def damage_of(agent: Agent, digest: str, check: Callable[[], object]) -> DamagedCopy | None:
    """Let a host read its whole copy of a set; return the damage that it finds.

    Args:
        check: called repeatedly; raises to stop.

    Raises:
        HostFailure: the host has no copy, or does not read it in time.
    """
    deadline = time.monotonic() + READ_LIMIT_S
    try:
        with agent.stream("data.verify", digest=digest, silence_s=SILENCE_S) as progress:
            for _ in progress:
                check()
                if time.monotonic() > deadline:
                    raise HostFailure(
                        f"the host did not read its copy of the data within {READ_LIMIT_S:g} s", host=agent.host
                    )
    except RemoteOpFailed as error:
        if error.kind != "corrupt":
            raise
        hint = "remove the damaged copy with `gpurun data evict`, and submit the job again"
        return DamagedCopy(f"the host's copy of the data is damaged: {error.message}", host=agent.host, hint=hint)
    return None


def discard(agent: Agent, digest: str, job: str) -> None:
    """Remove a host's damaged copy of a set.

    Args:
        job: uses the copy, but has not started.

    Raises:
        HostFailure: another job uses it, or the host sends it at the moment.
    """
    kept = agent.call("data.evict", digests=[digest], job=job, timeout_s=DISCARD_LIMIT_S).value
    if not kept.keys() <= {digest}:
        raise bad_answer(agent.host, "the host's answer to data.evict names a data set that gpurun did not ask for")
    if kept:
        raise HostFailure(
            f"the host's copy of the data is damaged, and gpurun cannot replace the copy: {kept[digest]}",
            host=agent.host,
        )


ASK_LIMIT_S, MAKE_LIMIT_S, CODE_LIMIT_S = 60.0, 3600.0, 600.0
SLOW_BYTES_S = 8e6
"""A host that reads or copies a job's code has `CODE_LIMIT_S`, and the time that a slow disk needs."""
LIMIT_S = 6 * 3600.0
DIRECT_BYTES = 2 << 20
"""Up to here each host is sent the code that it lacks over its SSH channel."""
FULL_HINT = "free some space on the host, or remove data sets that no job uses with `gpurun data evict`"


@dataclass(frozen=True)
class DataUser:
    """The attempt of a job that needs the sets. Hosts keep the sets until its fence."""

    job: str
    attempt: int


@dataclass(frozen=True)
class StagedHost:
    """The result on one host.

    Attributes:
        state: ``present`` (it had the set), ``done`` or ``failed``.
        bytes_received: the bytes that it received.
        error: why it failed.
    """

    host: str
    state: ShipState
    bytes_received: int = 0
    error: GpurunError | None = None

    def as_json(self) -> StagedHostShape:
        """The result as ``gpurun data stage --json`` shows it."""
        told: StagedHostShape = {"host": self.host, "state": self.state, "bytes_received": self.bytes_received}
        return {**told, "error": self.error.message} if self.error else told


class StagedHostShape(TypedDict):
    """The result on one host."""

    host: str
    state: ShipState
    bytes_received: int
    error: NotRequired[str]


class StageShape(TypedDict):
    """The result of a copy of a data set.

    Attributes:
        bad_copies: hosts whose copy could not be used, and why.
    """

    digest: str
    bytes: int
    hosts: list[StagedHostShape]
    elapsed_s: float
    bad_copies: dict[str, str]


@dataclass(frozen=True)
class StageReport:
    """The result of copying a set to hosts.

    Attributes:
        bad_copies: hosts whose copy could not be used, so that the set came from another host.
    """

    digest: str
    size_bytes: int
    hosts: tuple[StagedHost, ...]
    elapsed_s: float
    bad_copies: Mapping[str, GpurunError] = field(default_factory=dict)

    @property
    def failed(self) -> Mapping[str, GpurunError]:
        """Return the hosts that do not have the set now, with their errors."""
        return {each.host: each.error for each in self.hosts if each.error is not None}

    def as_json(self) -> StageShape:
        """The document that ``gpurun data stage --json`` prints."""
        return {
            "digest": self.digest, "bytes": self.size_bytes, "hosts": [each.as_json() for each in self.hosts],
            "elapsed_s": round(self.elapsed_s, 3), "bad_copies": messages_of(self.bad_copies),
        }  # fmt: skip


@dataclass(frozen=True)
class Staging:
    """How gpurun copies sets to hosts.

    Attributes:
        fleet: reaches the hosts, and hosts that may already have the set.
        user: the attempt that needs the set; None = no attempt needs it yet.
        quotas: host → bytes that all sets may take there; default: a quarter of the disk.
        keep: digests of sets that hosts must not remove to free space.
        store: `DATA`, or `CODE` for the code of jobs.
        reach: connects to more hosts, if no host of the fleet has the set.
        progress: receives the state of each host.
        check: called repeatedly; raises to stop the copy.
    """

    fleet: Fleet
    inventory: Inventory | None = None
    user: DataUser | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    keep: Collection[str] = ()
    reach: Callable[[Sequence[str]], Fleet] = lambda _: Fleet({}, {})
    progress: Callable[[ShipEvent], None] = lambda _: None
    check: Callable[[], object] = lambda: None
    store: str = DATA


def stage_code(
    code: Code | DataFolder, hosts: Iterable[str], how: Staging, *, neighbours: Iterable[str] = ()
) -> StageReport:
    """Make sure that hosts have a job's code, and that the job uses it there. Like `stage`, for how.store = `CODE`.

    Raises:
        BadInput, StateError: the code on the head has changed, or is damaged.
    """
    return stage(code.timed_digest, code, hosts, how, neighbours=neighbours)


def stage(
    digest: str, tree: Code | DataFolder | None, hosts: Iterable[str], how: Staging, *, neighbours: Iterable[str] = ()
) -> StageReport:
    """Make sure that hosts have a set. If a host fails, the report names it and the others continue. Idempotent.

    Args:
        tree: the folder of the head that holds the set; None: it must come from a host.
        neighbours: hosts of the fleet that may have the set.

    Raises:
        BadInput: the set changes while gpurun sends it; or neither the head nor any host has it any more.
        HostFailure: ``unreachable``: only hosts that do not answer now may still have it.
    """
    began, names = time.monotonic(), list(dict.fromkeys(hosts))
    sender = _Sender(digest, tree, how)
    results = sender.run(names, [name for name in neighbours if name not in names])
    staged = tuple(results[name] for name in names)
    return StageReport(digest, sender.size, staged, time.monotonic() - began, sender.bad_copies)


class _Sender:
    """Copies one set."""

    def __init__(self, digest: str, tree: Code | DataFolder | None, how: Staging) -> None:
        self.size = tree.size if tree is not None else 0
        self.bad_copies: dict[str, GpurunError] = {}
        self._digest, self._tree, self._how = digest, tree, how
        self._progress = Progress(how.progress)
        self._results: dict[str, StagedHost] = {}
        self._accused: set[str] = set()
        self._replaced: list[str] = []
        self._silent: dict[str, GpurunError] = {}

    def run(self, hosts: Sequence[str], neighbours: Sequence[str]) -> Mapping[str, StagedHost]:
        """Ask the hosts, then send the set."""
        lacking = self._ask(hosts)
        if lacking:
            with hold_image(default_folder(), self._lock, lacking, self._wait) as waited:
                if waited:  # meanwhile another job may have brought it
                    lacking = self._ask(lacking)
                if lacking:
                    have = [host for host, one in self._results.items() if one.state == "present"]
                    if self._how.store == CODE and self._tree is not None:
                        self._bring_code(self._tree, lacking, have, neighbours)
                    else:
                        self._bring(lacking, [*have, *self._holders(neighbours)])
        return self._results

    @property
    def _lock(self) -> str:
        """Return the name of the lock. Each name stays as a file, and code has a new digest with every edit."""
        return self._digest if self._how.store == DATA else f"code-{self._digest[7:9]}"

    @property
    def _code_limit_s(self) -> float:
        return CODE_LIMIT_S + self.size / SLOW_BYTES_S

    def _ask(self, hosts: Sequence[str]) -> list[str]:
        """Return the hosts that lack the set. The results record hosts that have it or do not answer."""
        asked = self._asked(hosts, self._how.user)
        for host, error in asked.failed.items():
            self._done(host, "failed", error)
        for host in (host for host, has in asked.ok.items() if has):
            self._done(host, "present")
        return [host for host, has in asked.ok.items() if not has]

    def _asked(self, hosts: Sequence[str], user: DataUser | None, fleet: Fleet | None = None) -> Results[bool]:
        def ask(agent: Agent) -> bool:
            said = agent.call(
                "data.use", digests=[self._digest], job=user.job if user is not None else "",
                attempt=user.attempt if user is not None else 0, store=self._how.store,
                timeout_s=self._code_limit_s if self._how.store == CODE and user is not None else ASK_LIMIT_S,
            ).value  # fmt: skip
            if said not in ([], [self._digest]):
                raise bad_answer(
                    agent.host, "the host's answer to data.use names a data set that gpurun did not ask for"
                )
            return bool(said)

        asked = (fleet or self._how.fleet).map(ask, hosts)
        self._silent.update(asked.failed)
        if self._how.store == CODE:
            return asked
        caches.note_sites(
            self._digest,
            has=[host for host, has in asked.ok.items() if has],
            lacks=[host for host, has in asked.ok.items() if not has],
        )  # fmt: skip
        return asked

    def _holders(self, hosts: Sequence[str], fleet: Fleet | None = None) -> list[str]:
        return [host for host, has in self._asked(hosts, None, fleet).ok.items() if has]

    def _bring(self, lacking: Sequence[str], holders: Sequence[str]) -> None:
        """Send the set from the head, from the hosts in `holders`, or from any other known holder."""
        fleet, others = self._how.fleet, Fleet({}, {})
        try:
            if self._tree is None and not holders:
                known = sorted(caches.hosts_of(self._digest) - fleet.agents.keys())
                others = self._how.reach(known)
                self._silent.update(others.failures)
                holders = self._holders(list(others.agents), others)
                fleet = Fleet({}, {})
                fleet.agents = {**self._how.fleet.agents, **others.agents}
            if isinstance(self._tree, DataFolder):
                failed = self._send_from_head(self._tree, fleet, holders, lacking)
            else:
                failed = self._send_from_holders(fleet, holders, lacking)
            for host in [*lacking, *self._replaced]:
                self._done(host, "failed" if host in failed else "done", failed.get(host))
        finally:
            others.close()

    def _bring_code(
        self, code: Code | DataFolder, lacking: Sequence[str], have: Sequence[str], neighbours: Sequence[str]
    ) -> None:
        """Send code: what a host lacks directly if that is little, else as a data set."""
        failed = self._send_code(code, lacking, have, neighbours)
        accused = [member for member in self._members(have) if member in self._accused]
        left = [member for member, has in self._asked(accused, self._how.user).ok.items() if not has]
        if left:  # their copies were damaged, and are put aside
            self._replaced += left
            failed = {**failed, **self._send_code(code, left, (), ())}
        for host in [*lacking, *self._replaced]:
            self._done(host, "failed" if host in failed else "done", failed.get(host))

    def _send_code(
        self, code: Code | DataFolder, lacking: Sequence[str], have: Sequence[str], neighbours: Sequence[str]
    ) -> Mapping[str, GpurunError]:
        """Return the hosts that failed."""
        fleet, transfer, entries = self._how.fleet, secrets.token_hex(8), packed(code.entries)
        begun: Results[bool] = Results({}, {})

        def begin(agent: Agent) -> bool:
            lacks = agent.call(
                "data.begin", transfer=transfer, digest=self._digest, store=CODE, direct=DIRECT_BYTES,
                payload=entries, timeout_s=self._code_limit_s,
            ).value  # fmt: skip
            if lacks is None:
                return False
            if not code.files.keys() >= set(lacks):
                raise bad_answer(agent.host, "the host's answer to data.begin names content that gpurun did not offer")
            wanted = dict.fromkeys(lacks)
            size = sum(code.files[digest].size for digest in wanted)
            if size > DIRECT_BYTES:
                raise bad_answer(agent.host, f"the host's answer to data.begin asks for {size} bytes at once")
            agent.call("data.put", transfer=transfer, payload=b"".join(_contents(code, wanted)), timeout_s=CODE_LIMIT_S)
            self._progress.expect(agent.host, size, 0)
            self._progress.received(agent.host, size)
            return True

        try:
            begun = fleet.map(begin, lacking)
            for error in begun.failed.values():
                if isinstance(error, (BadInput, StateError)):  # it is the head's
                    raise error
            failed = {host: _typed(error) for host, error in begun.failed.items()}
            if rest := [host for host, is_done in begun.ok.items() if not is_done]:
                done = [host for host, is_done in begun.ok.items() if is_done]
                content = content_of_code(code, fleet, [*have, *done, *self._holders(neighbours)])
                failed.update(self._send(content, rest, transfer))
            return failed
        finally:
            self._drop(fleet, [host for host in lacking if not begun.ok.get(host)], transfer)

    def _drop(self, fleet: Fleet, hosts: Iterable[str], transfer: str) -> None:
        alive = [host for host in hosts if fleet.agents[host].alive]
        fleet.map(lambda agent: agent.call("data.drop", transfer=transfer, timeout_s=ASK_LIMIT_S), alive)

    def _send_from_head(
        self, tree: DataFolder, fleet: Fleet, holders: Sequence[str], lacking: Sequence[str]
    ) -> Mapping[str, GpurunError]:
        """Send the set from the head and from these hosts; return the hosts that failed.

        A member whose copy turns out to be damaged gets a whole copy.
        """
        failed = self._send(content_of_folder(tree, fleet, holders), lacking)
        accused = [member for member in self._members(holders) if member in self._accused]
        damaged = [member for member in accused if self._is_damaged(fleet, member)]
        if left := self._discard(fleet, damaged):
            whole = [holder for holder in holders if holder not in damaged]
            failed = {**failed, **self._send(content_of_folder(tree, fleet, whole), left)}
        return failed

    def _send_from_holders(
        self, fleet: Fleet, holders: Sequence[str], lacking: Sequence[str]
    ) -> Mapping[str, GpurunError]:
        """Send the set from one of these hosts after the other, until each host has it; return the hosts that failed.

        A member whose copy turns out to be damaged gets a whole copy from the next holder.
        """
        left, damaged, failed = list(lacking), list[str](), dict[str, GpurunError]()
        for holder in holders:
            content = self._content_of(fleet, holder)
            if content is not None:
                self.size = content.size
                left += self._discard(fleet, damaged)
                damaged = []
                sent = self._send(content, left) if left else {}
                failed = {host: error for host, error in failed.items() if host not in left}
                failed.update(sent)
                left = [host for host in left if isinstance(sent.get(host), Unusable)]
            is_suspect = content is None or left or (holder in self._accused and self._members([holder]))
            if is_suspect and self._is_damaged(fleet, holder):
                damaged.append(holder)
            if not left and not self._members(damaged):
                return failed
        if self.bad_copies.keys() >= set(holders):
            raise self._nobody_has_it()
        for member in self._members(damaged):
            self._done(member, "failed", self.bad_copies[member])
        return failed

    def _content_of(self, fleet: Fleet, holder: str) -> DataContent | None:
        """Return the set as a host describes it; None if the host cannot."""
        try:
            return content_of_host(fleet, holder, self._digest, self._how.check)
        except HostFailure as error:
            self.bad_copies[holder] = _typed(error)
            return None

    def _is_damaged(self, fleet: Fleet, holder: str) -> bool:
        """Return whether a host finds its own copy damaged. No other host's report proves that."""
        try:
            found: GpurunError | None = damage_of(fleet.agents[holder], self._digest, self._how.check)
        except HostFailure as error:
            found = _typed(error)
        if found is not None:
            self.bad_copies[holder] = found
        return isinstance(found, DamagedCopy)

    def _members(self, hosts: Iterable[str]) -> list[str]:
        """Return those of these hosts that need the set."""
        return [host for host in hosts if host in self._results and self._results[host].state == "present"]

    def _discard(self, fleet: Fleet, damaged: Iterable[str]) -> list[str]:
        """Remove damaged copies of members; return the members that need another copy now."""
        user = self._how.user
        removed = fleet.map(
            lambda agent: discard(agent, self._digest, user.job if user is not None else ""), self._members(damaged)
        )
        for host, error in removed.failed.items():
            self._done(host, "failed", error)
        self._replaced += removed.ok
        return list(removed.ok)

    def _nobody_has_it(self) -> GpurunError:
        lost = {host: error for host, error in self.bad_copies.items() if isinstance(error, HostUnreachable)}
        cut = {host: HostUnreachable("gpurun lost the connection to the host", host=host)
               for host, agent in self._how.fleet.agents.items() if not agent.alive}  # fmt: skip
        silent: dict[str, GpurunError] = {**cut, **self._silent, **lost}
        if known := sorted(silent.keys() & caches.hosts_of(self._digest)):
            return HostFailure(
                f"no reachable host has the data set {self._digest[7:19]}; {', '.join(known)} had a copy, "
                f"but {known[0]} failed: {silent[known[0]].message}",
                kind="unreachable", host=known[0],
                hint=f"gpurun copies the data set when {' or '.join(known)} answers again",
            )  # fmt: skip
        damaged = [host for host, error in self.bad_copies.items() if isinstance(error, DamagedCopy)]
        if damaged:
            return HostFailure(
                f"the data set {self._digest[7:19]} is damaged on {', '.join(damaged)}, and gpurun knows no other copy",
                host=damaged[0], hint="remove the damaged copies with `gpurun data evict`, and submit the job again",
            )  # fmt: skip
        return BadInput(
            f"no host has a copy of the data set {self._digest[7:19]}, and the data set's source has changed",
            hint="submit the job again to use the source's current content",
        )

    def _send(self, content: DataContent, lacking: Sequence[str], begun: str = "") -> Mapping[str, GpurunError]:
        """Send the set through the hosts; return the hosts that failed. Incomplete sets are removed everywhere.

        Args:
            begun: the transfer for which hosts have begun to receive the set.
        """
        lanes = routes(self._how.inventory, lacking, content.holders, self._digest, content.size)
        everybody = list(dict.fromkeys(hop.host for hops in lanes for hop in hops))
        options = seats.options_for(self._how.inventory, everybody)
        relay = Relay(content.fleet, lanes, options, self._received, begun)
        self._lacking = frozenset(lacking)
        for host in lacking:
            self._progress.expect(host, content.stored, 0)
        try:
            relay.open()
            self._begin(relay, content, everybody, begun)
            relay.announce(content.announced)
            deadline = time.monotonic() + LIMIT_S
            while not relay.finished([self._digest]):
                self._how.check()
                if time.monotonic() > deadline:
                    raise HostFailure(f"sending the data took longer than {LIMIT_S:g} s")
                self._step(relay, content)
            self._finish(relay, content)
        finally:
            self._accused |= relay.accused
            relay.close()
            self._drop(content.fleet, lacking, relay.transfer)
        return {host: _typed(error) for host, error in relay.failed.items() if host in self._lacking}

    def _step(self, relay: Relay, content: DataContent) -> None:
        try:
            relay.step()
        except DamagedBlob as damaged:
            if content.changed is not None:
                raise content.changed from None
            relay.give_up(damaged.receiver, _unusable(damaged.receiver, content))

    def _begin(self, relay: Relay, content: DataContent, everybody: Iterable[str], begun: str) -> None:
        """Make hosts free space, create the files, and expect the blob. Hosts that cannot are given up."""

        def begin(agent: Agent) -> None:
            if agent.host in self._lacking and not begun:
                agent.call(
                    "data.begin", transfer=relay.transfer, digest=self._digest, quota=self._how.quotas.get(agent.host),
                    keep=sorted({*self._how.keep} - {self._digest}), stored=content.stored, payload=content.entries,
                    timeout_s=MAKE_LIMIT_S,
                )  # fmt: skip
            agent.call(
                "data.expect", transfer=relay.transfer, digest=self._digest, blob=self._digest, payload=content.hashes,
                store=self._how.store, timeout_s=ASK_LIMIT_S,
            )  # fmt: skip

        ready = content.fleet.map(begin, [host for host in everybody if host not in relay.failed])
        for host, error in ready.failed.items():
            relay.give_up(host, error)

    def _finish(self, relay: Relay, content: DataContent) -> None:
        def finish(agent: Agent) -> None:
            agent.call("data.finish", transfer=relay.transfer, verify=not content.is_on_head, timeout_s=MAKE_LIMIT_S)

        finished = content.fleet.map(finish, [host for host in relay.hosts if host in self._lacking])
        for host, error in finished.failed.items():
            is_corrupt = isinstance(error, RemoteOpFailed) and error.kind == "corrupt" and not content.is_on_head
            relay.give_up(host, _unusable(host, content) if is_corrupt else error)
        if self._how.store == CODE:
            return
        caches.note_sites(self._digest, has=finished.ok)

    def _received(self, host: str, count: int) -> None:
        if host in self._lacking:
            self._progress.received(host, count)

    def _done(self, host: str, state: ShipState, error: GpurunError | None = None) -> None:
        self._results[host] = StagedHost(
            host, state, self._progress.received_by(host), _typed(error) if error else None
        )
        self._progress.ended(host, state, error.message if error else None)

    def _wait(self, seconds: float) -> None:
        self._how.check()
        time.sleep(seconds)


def _contents(code: Code | DataFolder, digests: Iterable[str]) -> Iterator[bytes]:
    """Yield contents as frames for ``data.put``."""
    for digest in digests:
        for piece in code.content(digest):
            yield frames.encode({"d": digest}, piece)


def _unusable(host: str, content: DataContent) -> Unusable:
    return Unusable(f"the host could not use the copy of the data that {content.holders[0]} sent", host=host)


def _typed(error: GpurunError) -> GpurunError:
    """Turn an error of a host's agent into the error that the user sees."""
    if not isinstance(error, RemoteOpFailed):
        return error
    if error.kind == "no-space":
        return HostNotReady(error.message, kind=error.kind, host=error.host, hint=FULL_HINT)
    return HostFailure(error.message, kind=error.kind, host=error.host)

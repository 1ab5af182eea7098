"""The head's copy of a job's outputs. New files arrive beside it; once all are there, it changes as a whole.

An untrusted program wrote these files, and a host that may lie lists them. So gpurun checks every name, and the size
and digest of every content, and follows no link. If data do not match the host's list, they replace nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from gpurun.errors import HostFailure
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.usage import measure
from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.folder import batches, below, contents
from gpurun.node.folder.batches import Item
from gpurun.node.folder.beginnings import Begun
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.making import Receiver
from gpurun.remote.agent import Agent
from gpurun.state import durable, lock, syncing
from gpurun.state.own_lock import open_own_lock
from gpurun.state.path import may_pass, told
from gpurun.supervisor import outputs_changes, outputs_whole
from gpurun.supervisor.outputs_arriving import NAME, NEW, Arriving, discard
from gpurun.supervisor.outputs_changes import Change, changes_of
from gpurun.supervisor.outputs_keeping import Keeper
from gpurun.supervisor.outputs_listed import COPIED, SILENCE_S, HostOutputs, Unbrought
from gpurun.supervisor.outputs_plan import (
    CopyPlan,
    Origin,
    is_changing,
    is_same,
    plan_copy,
)
from gpurun.supervisor.outputs_room import OutputsRoom

OUTPUTS = b"outputs"


class HeadCopy:
    """The head's copy of one job's outputs.

    Args:
        limit: its largest size in bytes; None = as much as the disk can hold.

    Attributes:
        seen: what the hosts had when the copy was made; empty if it does not hold all of that.
        listed: what each host listed last.
        keeper: keeps whole states of the copy.
    """

    def __init__(self, folder: JobFolder, limit: int | None = None) -> None:
        self._folder = folder
        self._limit = limit
        self._origins: dict[str, Origin] = {}
        self._given: dict[str, Mapping[str, Listed]] = {}
        self.seen: tuple[HostOutputs, ...] = ()
        self.listed: dict[str, HostOutputs] = {}
        self.keeper = Keeper(folder, limit)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the copy: a supervisor and the keeper of a lost host may both want to replace it."""
        descriptor = open_own_lock(self._folder.path / "outputs.lock")
        try:
            lock.take(descriptor)
            yield
        finally:
            os.close(descriptor)

    def replace(
        self,
        agents: Mapping[str, Agent],
        hosts: Sequence[HostOutputs],
        *,
        onto: bool,
        late: bool = False,
        force: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Unbrought, ...]:
        """Make the copy hold what hosts have. Fetches only changes. Durable at the end.

        If a file changes while it is read, the copy keeps the old version, or leaves it out. So the head never has a
        torn file.

        Args:
            hosts: in rank order.
            onto, late: see `plan_copy`.
            force: also read files whose modes keep their owner out.

        Returns:
            What could not be copied.

        Raises:
            HostFailure: a host failed or lies, or it was cancelled; the present copy stays.
            StateError: the head could not write it; the present copy stays.
        """
        try:
            return self._replace(agents, hosts, onto, late, force, cancelled)
        except OSError as error:
            raise told(error, self._folder.path / "outputs", "copied") from error

    def _replace(
        self,
        agents: Mapping[str, Agent],
        hosts: Sequence[HostOutputs],
        onto: bool,
        late: bool,
        force: bool,
        cancelled: Callable[[], bool],
    ) -> tuple[Unbrought, ...]:
        self.keeper.begin()
        with ExitStack() as stack:
            home = _opened(stack, self._folder.path.open_folder())
            self.settle(home)
            mine = _held(_old(stack, home), has_sizes=late or self._limit is not None)
            came_before = measure(self._folder.path / os.fsdecode(NAME)).total
            room = OutputsRoom(home, self._limit, came_before)
            plan = plan_copy(mine, hosts, self._origins, onto=onto, late=late, given=self._given, room=room)
            arriving = stack.enter_context(Arriving(home))
            arrival = _Arrival(arriving, room, job=self._folder.id, force=force, cancelled=cancelled)
            try:
                arrival.fetch_all(plan, agents)
                arriving.end()
            except OSError:
                discard(home)  # a full disk needs the room
                raise
            except HostFailure:
                if not arriving.break_off():
                    discard(home)
                raise
            refused = self._make(home, changes_of(mine, plan, arrival.origins.keys()))
            discard(home)
        arrival.refused(refused)
        unbrought = (*(each for host in hosts for each in host.unbrought), *plan.unfit, *arrival.unbrought)
        kept = {path: self._origins[path] for path in plan.kept if path in self._origins}
        self._origins = {**kept, **arrival.origins}
        self.seen = () if is_changing(arrival.unbrought) else tuple(hosts)
        return unbrought

    def _make(self, home: int, changes: Sequence[Change]) -> list[tuple[str, OSError]]:
        """Make changes to the copy, after their files have arrived; return those that the file system refuses."""
        with ExitStack() as stack:
            arriving = _opened(stack, below.open_folder(home, NAME))
            syncing.sync_tree(self._folder.path.plain / os.fsdecode(NAME))
            outputs_changes.write(arriving, changes)
            return self._go_on(home, arriving, changes)

    def _go_on(self, home: int, arriving: int, changes: Sequence[Change]) -> list[tuple[str, OSError]]:
        with ExitStack() as stack:
            with suppress(FileExistsError):
                os.mkdir(OUTPUTS, 0o755, dir_fd=home)
            top = _opened(stack, below.open_folder(home, OUTPUTS, below.CHANGE))
            cursor = stack.enter_context(below.Cursor(_opened(stack, below.open_folder(arriving, NEW)), below.CHANGE))
            refused = list(outputs_changes.make(changes, top, cursor))
        durable.sync_folder(self._folder.path)
        os.unlink(outputs_changes.CHANGES, dir_fd=arriving)
        syncing.sync_open_folder(arriving)
        return refused

    def settle(self, home: int | None = None) -> None:
        """Complete changes that a crash has interrupted."""
        with ExitStack() as stack:
            if home is None:
                home = _opened(stack, self._folder.path.open_folder())
            try:
                arriving = _opened(stack, below.open_folder(home, NAME))
            except FileNotFoundError:
                return
            if changes := outputs_changes.read(arriving):
                self._go_on(home, arriving, changes)

    def restore(self) -> bool:
        """Make the copy its last generation, with the logs that it has. Returns False if there is no generation.

        Raises:
            OSError: the disk failed; the copy stays, or is restored by the next `settle`.
        """
        with ExitStack() as stack:
            home = _opened(stack, self._folder.path.open_folder())
            self.settle(home)
            found = outputs_whole.newest(home)
            if found is None:
                return False
            discard(home)
            os.mkdir(NAME, 0o700, dir_fd=home)
            changes = outputs_whole.back(home, *found, _opened(stack, below.open_folder(home, NAME)))
            self._make(home, changes)
            discard(home)
        return True

    def gave(self, mine: Mapping[str, Listed], hosts: Sequence[HostOutputs]) -> None:
        """Remember what hosts have of the copy before their ranks start: it need not come back, see `plan_copy`.

        Args:
            mine: what the copy holds.
            hosts: the hosts that received it, in rank order.
        """
        for each in reversed(hosts):
            same = {path: there for path, there in each.entries.items() if path in mine and is_same(mine[path], there)}
            self._given[each.host] = same
            self._origins.update((path, (each.host, there.marks)) for path, there in same.items())

    def entries(self) -> Mapping[str, Listed]:
        """Return what the copy holds; nothing if there is none."""
        with ExitStack() as stack:
            return _held(_old(stack, _opened(stack, self._folder.path.open_folder())), has_sizes=True)

    def contents_of(self, entries: Sequence[Listed]) -> Iterator[Item]:
        """Yield entries as frames, each file's followed by its content."""
        with ExitStack() as stack:
            top = _opened(stack, below.open_folder(_opened(stack, self._folder.path.open_folder()), OUTPUTS))
            cursor = stack.enter_context(below.Cursor(top, below.READ))
            for number, entry in enumerate(entries):
                yield entry.header(), b""
                if entry.kind == "file":
                    parts = below.parts_of(entry.path)
                    descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1], force=True)
                    try:
                        yield from contents.content(number, descriptor, status)
                    finally:
                        os.close(descriptor)


class _Arrival:
    """Fetches the files that the next copy needs."""

    def __init__(
        self, arriving: Arriving, room: OutputsRoom, *, job: str, force: bool, cancelled: Callable[[], bool]
    ) -> None:
        self._arriving = arriving
        self._room = room
        self._came = 0
        self._job = job
        self._force = force
        self._cancelled = cancelled
        self.unbrought: list[Unbrought] = []
        self.origins: dict[str, Origin] = {}

    def fetch_all(self, plan: CopyPlan, agents: Mapping[str, Agent]) -> None:
        """Fetch every planned file, from an earlier copy's files or from its host."""
        left = {host: self._resume(host, wanted) for host, wanted in plan.fetched.items()}
        self._arriving.forget_others()
        for host, (lacking, begun) in left.items():
            if lacking:
                self._arriving.of(host)
                self._fetch(agents[host], lacking, begun)
        for path, first in plan.twins.items():
            if first in self.origins:
                self.origins[path] = self.origins[first]

    def refused(self, refused: Sequence[tuple[str, OSError]]) -> None:
        """Report what the head's file system refuses, with everything below it."""
        for path, error in refused:
            lost = [path, *(name for name in self.origins if name.startswith(f"{path}/"))]
            for name in lost:
                host, _ = self.origins.pop(name, ("", []))
                self.unbrought.append(Unbrought(host, name, f"cannot be kept on the head ({error.strerror})"))

    def _resume(self, host: str, wanted: Sequence[Listed]) -> tuple[list[Listed], Mapping[str, Begun]]:
        """Return the files that a host must still send, and their beginnings that are here."""
        lacking, begun = [], {}
        for entry in wanted:
            left = self._arriving.resume(host, entry, check=lambda: self._check(host))
            if left is True:
                held = self._arriving.held(entry.path)
                if refused := self._room.refuses(entry, held, 0):
                    self._arriving.remove(entry.path)
                    self.unbrought.append(Unbrought(host, entry.path, refused, no_room=True))
                    continue
                self._room.end(entry, held)
                self.origins[entry.path] = (host, entry.marks)
                continue
            lacking.append(entry)
            if left:
                begun[entry.path] = left
        return lacking, begun

    def _check(self, host: str) -> None:
        if self._cancelled():
            raise HostFailure("the copy was cancelled", host=host)

    def _fetch(self, agent: Agent, wanted: Sequence[Listed], begun: Mapping[str, Begun]) -> None:
        """Fetch files from one host."""
        asked = batches.packed((_question(entry, begun.get(entry.path)), b"") for entry in wanted)
        stream = agent.stream("outputs.read", job=self._job, force=self._force, payload_in=asked, silence_s=SILENCE_S)
        receiver, number, is_refused = Receiver(self._arriving), 0, False

        def pieces() -> Iterator[bytes]:
            for reply in stream:
                self._check(agent.host)
                yield reply.payload

        try:
            for frame in batches.unpacked(pieces()):
                if number == len(wanted) or frame.header.get("n") != number:
                    raise OpError("corrupt", "it sends files that nobody asked for")
                ended, is_refused = self._take(agent.host, wanted[number], receiver, frame, is_refused)
                number += ended
        except OpError as error:
            self._arriving.distrust(agent.host)
            name = f"{wanted[number].path!r:.200}: " if number < len(wanted) else ""
            raise HostFailure(f"what it sent is not its outputs: {name}{error.message}", host=agent.host) from error
        except _NoRoomError as error:
            for entry in wanted[number:]:
                self.unbrought.append(Unbrought(agent.host, entry.path, f"{error}", no_room=True))
                self._arriving.forget(entry.path)
            return
        finally:
            stream.close()
        if number < len(wanted):
            raise HostFailure(f"it sent {number} of {len(wanted)} files", host=agent.host)

    def _take(
        self, host: str, entry: Listed, receiver: Receiver, frame: frames.Frame, is_refused: bool
    ) -> tuple[bool, bool]:
        """Take one frame; return whether the file's content has ended, and whether to skip the rest of it."""
        header, payload = frame
        ends = "whole" in header or "sha" in header or "gone" in header
        if is_refused:
            return ends, not ends
        self._came += len(payload)
        if refused := self._room.refuses(entry, self._came, len(payload)):
            receiver.forget()
            self._came = 0
            raise _NoRoomError(refused)
        try:
            why = receiver.take(entry, header, payload)
        except OSError as error:
            if may_pass(error):
                raise  # it ends everything; what else the head's file system refuses is one name
            self.unbrought.append(Unbrought(host, entry.path, f"cannot be kept on the head ({error.strerror})"))
            receiver.forget()
            self._arriving.forget(entry.path)
            self._came = 0
            return ends, not ends
        self._came += header.get("from", 0)  # the receiver knows that so much is there
        if why is None:
            return False, False
        if why:
            self.unbrought.append(Unbrought(host, entry.path, why))
            self._arriving.forget(entry.path)
        else:
            self._room.end(entry, self._came)
            self.origins[entry.path] = (host, receiver.marks)
        self._came = 0
        return True, False


class _NoRoomError(Exception):
    """What arrives does not fit, so no more of this host is taken."""


def _opened(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _old(stack: ExitStack, home: int) -> int | None:
    """Return a descriptor of the present copy; None if there is none."""
    try:
        return _opened(stack, below.open_folder(home, OUTPUTS, below.READ))
    except FileNotFoundError:
        return None


def _held(top: int | None, *, has_sizes: bool) -> Mapping[str, Listed]:
    """Return what the copy holds. Without sizes, returns names of files only, which takes a quarter of the time."""
    if top is None:
        return {}
    found = contents.entries(top, force=True) if has_sizes else contents.names(top)
    return {entry.path: entry for entry in found if entry.kind in COPIED}


def _question(entry: Listed, begun: Begun | None) -> dict[str, Any]:
    if begun is None:
        return {"p": entry.path}
    return {"p": entry.path, "marks": begun.marks, "at": begun.size, "sha": begun.sha}

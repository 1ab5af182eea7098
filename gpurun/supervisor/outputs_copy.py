"""The head's copy of a job's outputs: made anew beside the old one, below a directory descriptor, then swapped in.

What arrives was written by a stranger's program and is told by a host that may lie. So every name is checked, every
content has the size and the digest that were told, no link is followed, and what breaks its word replaces nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from gpurun.errors import GpurunError, HostFailure
from gpurun.jobs.folder import JobFolder
from gpurun.node import below, contents, frames
from gpurun.node.call import OpError
from gpurun.node.contents import Item, Listed
from gpurun.node.making import Maker, Receiver
from gpurun.remote.agent import Agent
from gpurun.state import durable, lock, syncing
from gpurun.state.path import told
from gpurun.supervisor.outputs_plan import (
    CopyPlan,
    HostOutputs,
    Origin,
    Unbrought,
    is_changing,
    is_same,
    outputs_of,
    plan_copy,
)

SILENCE_S = 120.0
"""A host that sends nothing for so long hangs."""
MOST_LISTED_BYTES = 512 << 20
"""No list of outputs is longer: some millions of files."""
ARRIVING, REPLACED, OUTPUTS = b"outputs.arriving", b"outputs.replaced", b"outputs"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)


def list_outputs(agent: Agent, job: str, *, force: bool = False) -> HostOutputs | None:
    """What a host has of a job's outputs; None if it has no folder of them.

    Args:
        force: the gang has ended: look into folders whose modes keep their owner out, too.

    Raises:
        HostFailure: it fails, hangs or lies.
    """
    present = True

    def pieces() -> Iterator[bytes]:
        nonlocal present
        size = 0
        for reply in agent.stream("outputs.list", job=job, force=force, silence_s=SILENCE_S):
            if not reply.payload:
                present = isinstance(reply.value, dict) and bool(reply.value.get("present"))
            size += len(reply.payload)
            if size > MOST_LISTED_BYTES:
                raise HostFailure("its list of outputs does not end", host=agent.host)
            yield reply.payload

    try:
        found = outputs_of(agent.host, (frame.header for frame in contents.unpacked(pieces())))
    except OpError as error:
        raise HostFailure(f"its list of outputs is damaged: {error.message}", host=agent.host) from error
    return found if present else None


class HeadCopy:
    """The copy on the head of one job's outputs.

    Attributes:
        seen: what the hosts had when the copy was made; empty if it does not hold all of that.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._origins: dict[str, Origin] = {}
        self._given: dict[str, Mapping[str, Listed]] = {}
        self.seen: tuple[HostOutputs, ...] = ()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the copy: a supervisor, and the keeper of a host that was lost, may both want to replace it."""
        path = self._folder.path / "outputs.lock"
        descriptor = path.open_file(os.O_RDWR | os.O_CREAT)
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
        """Make the copy hold what hosts have; only what has changed is sent. It is durable when this returns.

        A file that changes while it is read stays as it was in the old copy, or out: the head never has a torn one.

        Args:
            hosts: in rank order.
            onto, late: see `plan_copy`.
            force: read files whose modes keep their owner out, too.

        Returns:
            What could not be brought.

        Raises:
            HostFailure: a host failed or lies, or it was cancelled; the copy that was there stays.
            StateError: the head could not write it; likewise.
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
        with ExitStack() as stack:
            home = _opened(stack, self._folder.path.open_folder())
            self.settle(home)
            below.remove(home, ARRIVING)
            os.mkdir(ARRIVING, dir_fd=home)
            stack.callback(_forget, home, ARRIVING)
            old = _old(stack, home)
            plan = plan_copy(_entries(old), hosts, self._origins, onto=onto, late=late, given=self._given)
            arriving = _opened(stack, below.open_folder(home, ARRIVING))
            source = None if old is None else stack.enter_context(below.Cursor(old, below.READ))
            with Maker(arriving) as maker:
                arrival = _Arrival(maker, source, cancelled=cancelled)
                arrival.carry_out(plan, agents, job=self._folder.id, force=force)
            syncing.sync_tree(self._folder.path.plain / os.fsdecode(ARRIVING))
            self._swap(home)
        unbrought = (*(each for host in hosts for each in host.unbrought), *arrival.unbrought)
        kept = {path: self._origins[path] for path in plan.kept if path in self._origins}
        self._origins = {**kept, **arrival.origins}
        self.seen = () if is_changing(arrival.unbrought) else tuple(hosts)
        return unbrought

    def _swap(self, home: int) -> None:
        below.remove(home, REPLACED)
        with suppress(FileNotFoundError):
            os.rename(OUTPUTS, REPLACED, src_dir_fd=home, dst_dir_fd=home)
        os.rename(ARRIVING, OUTPUTS, src_dir_fd=home, dst_dir_fd=home)
        durable.sync_folder(self._folder.path)
        _forget(home, REPLACED)

    def settle(self, home: int | None = None) -> None:
        """Put back outputs that were being replaced when a crash came before the newer ones had their place."""
        if home is None:
            with ExitStack() as stack:
                self.settle(_opened(stack, self._folder.path.open_folder()))
        elif b"outputs" not in below.names_in(home):
            with suppress(FileNotFoundError):
                os.rename(REPLACED, OUTPUTS, src_dir_fd=home, dst_dir_fd=home)

    def gave(self, mine: Mapping[str, Listed], hosts: Sequence[HostOutputs]) -> None:
        """Remember what hosts have of the copy before their ranks start: it need not come back, see `plan_copy`.

        Args:
            mine: what the copy holds.
            hosts: those that were sent it, in rank order.
        """
        for each in reversed(hosts):
            same = {path: there for path, there in each.entries.items() if path in mine and is_same(mine[path], there)}
            self._given[each.host] = same
            self._origins.update((path, (each.host, there.marks)) for path, there in same.items())

    def entries(self) -> Mapping[str, Listed]:
        """What the copy holds; nothing if there is none."""
        with ExitStack() as stack:
            return _entries(_old(stack, _opened(stack, self._folder.path.open_folder())))

    def contents_of(self, entries: Sequence[Listed]) -> Iterator[Item]:
        """Entries as frames, each file's followed by its content."""
        with ExitStack() as stack:
            top = _opened(stack, below.open_folder(_opened(stack, self._folder.path.open_folder()), OUTPUTS))
            cursor = stack.enter_context(below.Cursor(top, below.READ))
            for number, entry in enumerate(entries):
                yield entry.header(), b""
                if entry.kind == "file":
                    parts = below.parts_of(entry.path)
                    descriptor = below.open_file(cursor.at(parts[:-1]), parts[-1], force=True)
                    try:
                        yield from contents.content(number, descriptor)
                    finally:
                        os.close(descriptor)


class _Arrival:
    """Fills the next copy."""

    def __init__(self, maker: Maker, source: below.Cursor | None, *, cancelled: Callable[[], bool]) -> None:
        self._maker = maker
        self._source = source
        self._cancelled = cancelled
        self.unbrought: list[Unbrought] = []
        self.origins: dict[str, Origin] = {}

    def carry_out(self, plan: CopyPlan, agents: Mapping[str, Agent], *, job: str, force: bool) -> None:
        """Make everything that is planned."""
        for entry in plan.made:
            self._attempt("", entry.path, lambda entry=entry: self._make(entry))  # type: ignore[misc]
        for path in plan.kept:
            self._attempt("", path, lambda path=path: self._keep(path))  # type: ignore[misc]
        for host, wanted in plan.fetched.items():
            self._fetch(agents[host], wanted, job, force)
        for path, first in plan.twins.items():
            if first in self.origins:
                host, marks = self.origins[first]
                if self._attempt(host, path, lambda path=path, first=first: self._twin(path, first)):  # type: ignore[misc]
                    self.origins[path] = (host, marks)
        self._maker.close_folders()

    def _make(self, entry: Listed) -> None:
        if entry.kind == "dir":
            self._maker.folder(entry)
        else:
            self._maker.link(entry)

    def _attempt(self, host: str, path: str, act: Callable[[], object]) -> bool:
        """Do something for one entry. What the head's file system refuses to hold is named; a full disk ends it all."""
        try:
            act()
        except OSError as error:
            if error.errno in _DISK:
                raise
            self.unbrought.append(Unbrought(host, path, f"cannot be kept on the head ({error.strerror})"))
            return False
        return True

    def _keep(self, path: str) -> None:
        parts = below.parts_of(path)
        assert self._source is not None, "there is no old copy to keep a file of"
        below.link_file(self._source.at(parts[:-1]), parts[-1], self._maker.cursor.at(parts[:-1]), parts[-1])

    def _twin(self, path: str, first: str) -> None:
        of, parts = below.parts_of(first), below.parts_of(path)
        with ExitStack() as stack:
            above = _opened(stack, os.dup(self._maker.cursor.at(of[:-1])))
            below.link_file(above, of[-1], self._maker.cursor.at(parts[:-1]), parts[-1])

    def _fetch(self, agent: Agent, wanted: Sequence[Listed], job: str, force: bool) -> None:
        """Bring files from one host."""
        asked = contents.packed(({"p": entry.path}, b"") for entry in wanted)
        stream = agent.stream("outputs.read", job=job, force=force, payload_in=asked, silence_s=SILENCE_S)
        receiver, number, is_refused = Receiver(self._maker), 0, False

        def pieces() -> Iterator[bytes]:
            for reply in stream:
                if self._cancelled():
                    raise HostFailure("the copy was cancelled", host=agent.host)
                yield reply.payload

        try:
            for frame in contents.unpacked(pieces()):
                if number == len(wanted) or frame.header.get("n") != number:
                    raise OpError("corrupt", "it sends files that nobody asked for")
                ended, is_refused = self._take(agent.host, wanted[number], receiver, frame, is_refused)
                number += ended
        except OpError as error:
            name = f"{wanted[number].path!r:.200}: " if number < len(wanted) else ""
            raise HostFailure(f"what it sent is not its outputs: {name}{error.message}", host=agent.host) from error
        finally:
            stream.close()
        if number < len(wanted):
            raise HostFailure(f"it sent {number} of {len(wanted)} files", host=agent.host)

    def _take(
        self, host: str, entry: Listed, receiver: Receiver, frame: frames.Frame, is_refused: bool
    ) -> tuple[bool, bool]:
        """Take one frame; whether the file's content has ended, and whether the rest of it is passed over."""
        ends = "sha" in frame.header or "gone" in frame.header
        if is_refused:
            return ends, not ends
        came: list[str | None] = []
        if not self._attempt(host, entry.path, lambda: came.append(receiver.take(entry, frame.header, frame.payload))):
            receiver.forget()
            return ends, not ends
        why = came[0]
        if why is None:
            return False, False
        if why:
            self.unbrought.append(Unbrought(host, entry.path, why))
            with suppress(OSError):
                if self._source is not None:
                    self._keep(entry.path)
        else:
            self.origins[entry.path] = (host, receiver.marks)
        return True, False


def _opened(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _old(stack: ExitStack, home: int) -> int | None:
    """A descriptor of the present copy; None if there is none."""
    try:
        return _opened(stack, below.open_folder(home, OUTPUTS, below.READ))
    except FileNotFoundError:
        return None


def _entries(top: int | None) -> Mapping[str, Listed]:
    if top is None:
        return {}
    return {entry.path: entry for entry in contents.entries(top, force=True) if entry.kind in ("file", "dir", "link")}


def _forget(home: int, name: bytes) -> None:
    """Remove a copy that nobody needs; what cannot be removed now is removed before the next copy."""
    with suppress(OSError, GpurunError):
        below.remove(home, name)

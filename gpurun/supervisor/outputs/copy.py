"""The head's copy of a job's outputs. New files arrive beside it; once all are there, it changes as a whole.

An untrusted program wrote these files, and a host that may lie lists them. So gpurun checks every name, and the size
and digest of every content, and follows no link. If data do not match the host's list, they replace nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from gpurun.errors import HostFailure
from gpurun.jobs.folder import JobFolder, measure
from gpurun.node.folder import below, contents
from gpurun.node.folder.contents import Item, Listed
from gpurun.node.job.rules import BESIDE
from gpurun.remote.agent import Agent
from gpurun.state import durable, locks
from gpurun.state.durable import sync_open_folder, sync_tree
from gpurun.state.locks import open_own_lock
from gpurun.state.paths import state_error
from gpurun.supervisor.outputs import keeping
from gpurun.supervisor.outputs.arriving import NAME, NEW, Arrival, Arriving, ask_sums, discard
from gpurun.supervisor.outputs.keeping import Keeper, read_given, read_versions, write_given, write_versions
from gpurun.supervisor.outputs.listing import (
    COPIED,
    PAST,
    Given,
    HostOutputs,
    Origin,
    Shares,
    Sums,
    Unbrought,
    Versions,
    is_as_given,
    of_host,
    share,
)
from gpurun.supervisor.outputs.plan import (
    CHANGES,
    Change,
    OutputsRoom,
    changes_of,
    is_changing,
    make,
    of_versions,
    plan_copy,
    read_changes,
    versions_in,
    write_changes,
)

OUTPUTS = b"outputs"
SAMPLE_BYTES, LARGE_BYTES = 16 << 10, 64 << 20
SAMPLES, LARGE_SAMPLES = 8, 64
"""So many places of a file are compared, and of a large one."""


class HeadCopy:
    """The head's copy of one job's outputs.

    Args:
        limit: its largest size in bytes; None = as much as the disk can hold.
        workdir_limit: the same for what ranks wrote beside their code, which counts for `limit`, too.
        is_elastic: see `outputs_versions.share`.

    Attributes:
        seen: what the hosts had when the copy was made; empty if it does not hold all of that.
        listed: what each host listed last.
        keeper: keeps whole states of the copy.
    """

    def __init__(
        self, folder: JobFolder, limit: int | None = None, *, is_elastic: bool = False,
        workdir_limit: int | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._limit = limit
        self._workdir_limit = workdir_limit
        self._is_elastic = is_elastic
        self._origins: dict[str, Origin] = {}
        self._given: Given | None = None
        self._versions: Versions | None = None
        self._sums: Sums = {}
        self.seen: tuple[HostOutputs, ...] = ()
        self.listed: dict[str, HostOutputs] = {}
        self.keeper = Keeper(folder, limit)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the copy: a supervisor and the keeper of a lost host may both want to replace it."""
        descriptor = open_own_lock(self._folder.path / "outputs.lock")
        try:
            locks.take(descriptor)
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
            raise state_error(error, self._folder.path / "outputs", "copied") from error

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
            has_limit = self._limit is not None or any(BESIDE in each.entries for each in hosts)
            mine = _held(_old(stack, home), has_sizes=late or has_limit)
            came_before = measure(self._folder.path / os.fsdecode(NAME)).total
            room = OutputsRoom(home, self._limit, came_before, workdir_limit=self._workdir_limit)
            before, shares = self.versions, self._share(mine, agents, hosts, late=late, force=force)
            plan = plan_copy(mine, hosts, self._origins, shares, self.given, onto=onto, late=late, room=room)
            arriving = stack.enter_context(Arriving(home))
            arrival = Arrival(arriving, room, shares.versions, job=self._folder.id, force=force, cancelled=cancelled)
            if plan.moved and (top := _old(stack, home)) is not None:
                arriving.link_all(top, plan.moved)
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
            changes = changes_of(mine, plan, {*arrival.origins, *plan.moved})
            refused = self._make(home, [*changes, *of_versions(shares.versions)])
            discard(home)
        arrival.refused(refused)
        self.tell_of_versions(before)
        unbrought = (
            *(each for host in hosts for each in host.unbrought),
            *(_by_path(each, shares.versions) for each in (*plan.unfit, *arrival.unbrought)),
        )
        asked = (entry.path for wanted in plan.fetched.values() for entry in wanted)  # what has not come stays
        kept = {path: self._origins[path] for path in (*plan.kept, *asked, *plan.twins) if path in self._origins}
        links = {
            name: (version.host, entry.marks)
            for name, version in shares.versions.items()
            if (entry := shares.hosts.get(version.host, {}).get(name)) is not None and entry.kind == "link"
        }
        self._origins = {**kept, **links, **arrival.origins}
        self.seen = () if is_changing(arrival.unbrought) else tuple(hosts)
        return unbrought

    def _share(
        self, mine: Mapping[str, Listed], agents: Mapping[str, Agent], hosts: Sequence[HostOutputs], *, late: bool,
        force: bool,
    ) -> Shares:  # fmt: skip
        """Decide what each host gives, and compare contents where that is needed."""
        said = [each for each in hosts if each.host in agents]
        decide = partial(
            share, mine, said, self._origins, versions=self.versions, given=self.given, late=late,
            is_elastic=self._is_elastic,
        )  # fmt: skip
        shares = decide(sums=self._sums)
        if shares.doubtful:
            self._sums = {**self._sums, **ask_sums(agents, shares.doubtful, self._folder.id, force=force)}
            shares = decide(sums=self._sums)
            there = {each.host: each.entries for each in hosts}
            self._sums = {at: sum_ for at, sum_ in self._sums.items() if at[1] in there.get(at[0], {})}
        return shares

    def tell_of_versions(self, before: Versions | None = None) -> None:
        """Say once that hosts have different files of one name.

        Args:
            before: those of an earlier copy. What is not among them may be gone in the next copy: ranks save one after
                the other.
        """
        own = sorted(name for name, version in self.versions.items() if name != version.path)
        if lasting := [name for name in own if before is None or name in before]:
            of = self.versions[lasting[0]]
            more = f", and renames {len(lasting) - 1} more" if len(lasting) > 1 else ""
            whose = f"{of.path!r} of {of.host.rstrip(PAST)}"
            self.keeper.say(
                "versions", f"hosts have different files of one name: the head keeps {whose} as {lasting[0]!r}{more}"
            )

    @property
    def versions(self) -> Versions:
        """Return which names of the copy hold versions of several hosts."""
        if self._versions is None:
            self._versions = read_versions(self._folder.path)
        return self._versions

    @property
    def given(self) -> Given:
        """Return what hosts got of the copy when the attempt began."""
        if self._given is None:
            self._given = read_given(self._folder.path)
        return self._given

    def _make(self, home: int, changes: Sequence[Change]) -> list[tuple[str, OSError]]:
        """Make changes to the copy, after their files have arrived; return those that the file system refuses."""
        with ExitStack() as stack:
            arriving = _opened(stack, below.open_folder(home, NAME))
            sync_tree(self._folder.path.plain / os.fsdecode(NAME))
            write_changes(arriving, changes)
            return self._go_on(home, arriving, changes)

    def _go_on(self, home: int, arriving: int, changes: Sequence[Change]) -> list[tuple[str, OSError]]:
        with ExitStack() as stack:
            with suppress(FileExistsError):
                os.mkdir(OUTPUTS, 0o755, dir_fd=home)
            top = _opened(stack, below.open_folder(home, OUTPUTS, below.CHANGE))
            cursor = stack.enter_context(below.Cursor(_opened(stack, below.open_folder(arriving, NEW)), below.CHANGE))
            refused = list(make(changes, top, cursor))
        durable.sync_folder(self._folder.path)
        self._versions = versions_in(changes)
        write_versions(self._folder.path, self._versions)
        os.unlink(CHANGES, dir_fd=arriving)
        sync_open_folder(arriving)
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
            if changes := read_changes(arriving):
                self._go_on(home, arriving, changes)

    def restore(self) -> bool:
        """Make the copy its last generation, with the logs that it has. Returns False if there is no generation.

        Raises:
            OSError: the disk failed; the copy stays, or is restored by the next `settle`.
        """
        with ExitStack() as stack:
            home = _opened(stack, self._folder.path.open_folder())
            self.settle(home)
            found = keeping.newest(home)
            if found is None:
                return False
            discard(home)
            os.mkdir(NAME, 0o700, dir_fd=home)
            arriving = _opened(stack, below.open_folder(home, NAME))
            changes = keeping.back(home, *found, arriving, self.versions)
            self._make(home, changes)
            discard(home)
        return True

    def gave(self, mine: Mapping[str, Listed], hosts: Sequence[HostOutputs]) -> None:
        """Remember what hosts have of the copy before their ranks start: it need not come back, see `plan_copy`.

        Args:
            mine: what the copy holds.
            hosts: the hosts that received it, in rank order.
        """
        self._given = write_given(self._folder.path, mine, self.versions, hosts, is_elastic=self._is_elastic)
        for each in reversed(hosts):
            _, names = self.of_host(mine, each.host)
            given = self._given.get(each.host, {})
            for path, there in each.entries.items():
                if is_as_given(given.get(name := names.get(path, path)), there):
                    self._origins[name] = (each.host, there.marks)

    def entries(self) -> Mapping[str, Listed]:
        """Return what the copy holds; nothing if there is none."""
        with ExitStack() as stack:
            return _held(_old(stack, _opened(stack, self._folder.path.open_folder())), has_sizes=True)

    def samples_of(self, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield each file of the copy with a digest of its size and of some of its content.

        Two contents of a checkpoint differ nearly everywhere, so a few places show that it has changed, however large
        it is. Leaves out what is not a readable file.
        """
        with ExitStack() as stack:
            top = _old(stack, _opened(stack, self._folder.path.open_folder()))
            if top is None:
                return
            cursor = stack.enter_context(below.Cursor(top, below.READ))
            for path in paths:
                parts = below.parts_of(path)
                try:
                    descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1], force=True)
                except OSError:
                    continue
                try:
                    content = _sample(descriptor, status.st_size)
                except OSError:  # a bad block of the disk
                    continue
                finally:
                    os.close(descriptor)
                yield path, content

    def of_host(self, mine: Mapping[str, Listed], host: str) -> tuple[Mapping[str, Listed], Mapping[str, str]]:
        """Return what a host gets of the copy; see `outputs_versions.of_host`."""
        return of_host(mine, self.versions, host, is_elastic=self._is_elastic)

    def contents_of(self, entries: Sequence[Listed], names: Mapping[str, str]) -> Iterator[Item]:
        """Yield entries as frames, each file's followed by its content.

        Args:
            names: those entries' names in the copy that are not their paths.
        """
        with ExitStack() as stack:
            top = _opened(stack, below.open_folder(_opened(stack, self._folder.path.open_folder()), OUTPUTS))
            cursor = stack.enter_context(below.Cursor(top, below.READ))
            for number, entry in enumerate(entries):
                yield entry.header(), b""
                if entry.kind == "file":
                    parts = below.parts_of(names.get(entry.path, entry.path))
                    descriptor, status = below.open_regular(cursor.at(parts[:-1]), parts[-1], force=True)
                    try:
                        yield from contents.content(number, descriptor, status)
                    finally:
                        os.close(descriptor)


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


def _sample(descriptor: int, size: int) -> str:
    """Return a digest of a file's size and of some places, the first and the last bytes among them. PyTorch's archives
    end with checksums of all tensors.
    """
    found = hashlib.sha256(str(size).encode())
    last, samples = max(0, size - SAMPLE_BYTES), LARGE_SAMPLES if size >= LARGE_BYTES else SAMPLES
    for number in range(samples if last else 1):
        found.update(os.pread(descriptor, SAMPLE_BYTES, last * number // (samples - 1)))
    return found.hexdigest()


def _by_path(unbrought: Unbrought, versions: Versions) -> Unbrought:
    """Return something by its path on its host, not by its name in the copy."""
    version = versions.get(unbrought.path)
    return unbrought if version is None else replace(unbrought, path=version.path)

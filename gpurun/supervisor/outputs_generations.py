"""Decide when the head's copy of a job's outputs is one whole state of its program: a generation. No I/O, no clock.

gpurun looks at the hosts' lists of outputs again and again. A copy is whole if nothing changed from before it until a
look after it. A file that changes all the time, such as a log, would hide that everything else rests, so it does not
count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from gpurun.node.folder.contents import Listed
from gpurun.supervisor.outputs_listed import HostOutputs, Unbrought

REST_S = 5.0
"""So long nothing may change around a copy, unless the program says that it has saved."""
LOG_LOOKS, LOG_S = 5, 120.0
"""A log has changed in each of so many looks, for so long."""
SMALL_BYTES, REWRITTEN_S = 1 << 20, 600.0
"""A smaller file may be a log even if it is written anew each time, such as a summary. A larger one may be a log only
if it has only grown for so long. One that is always replaced by a rename is whole whenever it is copied.
"""

Where = tuple[str, str]
"""A host, and a path in its outputs."""


@dataclass(frozen=True)
class Restless:
    """A file that changed in the last looks.

    Attributes:
        since_s: the first of these looks.
        looks: how many they are.
    """

    since_s: float
    looks: int


@dataclass(frozen=True)
class OutputsSeen:
    """What all looks until now say. A value: `looked` returns the next one.

    Attributes:
        at_s: the time of the last look.
        hosts: what each host listed then.
        rest_s: for each host, the look since which nothing but logs has changed.
        restless: files that changed in the last look.
        rewritten: when large files were last written and had not grown: these are no logs.
        replaced: files that were replaced by others of the same name between the last two looks.
    """

    at_s: float = 0.0
    hosts: Mapping[str, HostOutputs] = field(default_factory=dict)
    rest_s: Mapping[str, float] = field(default_factory=dict)
    restless: Mapping[Where, Restless] = field(default_factory=dict)
    rewritten: Mapping[Where, float] = field(default_factory=dict)
    replaced: Set[Where] = frozenset()

    def looked(self, at_s: float, hosts: Sequence[HostOutputs]) -> OutputsSeen:
        """Return these looks and a new one.

        Args:
            at_s: a time before the hosts made their lists, later than the look before.
            hosts: all hosts of the gang that have outputs.
        """
        there = {each.host: each for each in hosts}
        restless: dict[Where, Restless] = {}
        rewritten = {where: s for where, s in self.rewritten.items() if _is_in(there, where)}
        changed: dict[str, set[str]] = {}
        replaced = set()
        for now in hosts:
            before = self.hosts.get(now.host)
            changed[now.host] = set(_changed(before, now))
            for path in changed[now.host]:
                where = now.host, path
                seen = self.restless.get(where, Restless(at_s, 0))
                restless[where] = Restless(seen.since_s, seen.looks + 1)
                old, new = before.entries.get(path) if before else None, now.entries.get(path)
                if old is None or new is None or not old.kind == new.kind == "file":
                    continue
                if old.mark[1:] != new.mark[1:]:
                    replaced.add(where)
                elif new.size <= old.size and old.size > SMALL_BYTES and new.mtime_ns != old.mtime_ns:
                    rewritten[where] = at_s
        looks = OutputsSeen(at_s, there, {}, restless, rewritten, replaced)
        return replace(looks, rest_s={host: self._rest_s(host, paths, looks) for host, paths in changed.items()})

    def _rest_s(self, host: str, changed: Set[str], now: OutputsSeen) -> float:
        """Return since when a host rests, after the next look `now`."""
        before_s = self.rest_s.get(host)
        if before_s is None or now.hosts.keys() != self.hosts.keys() or not changed <= now.logs_of(host):
            return now.at_s
        if self.logs_of(host) <= changed:
            return before_s
        return max(before_s, self.at_s)  # what was a log has rested since the look before

    @property
    def logs(self) -> frozenset[Where]:
        """Return the files that are logs."""
        return frozenset(
            where
            for where, seen in self.restless.items()
            if seen.looks >= LOG_LOOKS
            and self.at_s - seen.since_s >= LOG_S
            and self.at_s - self.rewritten.get(where, -math.inf) >= REWRITTEN_S
            and _is_in(self.hosts, where)
        )

    def logs_of(self, host: str) -> Set[str]:
        """Return the paths of a host's logs."""
        return {path for whose, path in self.logs if whose == host}

    @property
    def rested_s(self) -> float:
        """Return for how long nothing but logs has changed, as far as the looks show."""
        return min((self.at_s - since_s for since_s in self.rest_s.values()), default=0.0)

    @property
    def is_at_rest(self) -> bool:
        """Return whether every host has rested for long enough, or said that it has saved."""
        return bool(self.hosts) and all(
            self.at_s - since_s >= REST_S or self._is_declared(host) for host, since_s in self.rest_s.items()
        )

    @property
    def has_files(self) -> bool:
        """Return whether a host has more than folders: before a job has saved anything, there is no generation."""
        return any(entry.kind != "dir" for each in self.hosts.values() for entry in each.entries.values())

    def is_whole(self, copied_s: float) -> bool:
        """Return whether a copy is whole.

        Args:
            copied_s: the look whose lists the copy was made from. It brought everything but logs.
        """
        return self.has_files and max(self.rest_s.values(), default=0.0) <= copied_s < self.at_s and self.is_at_rest

    @property
    def is_one_file(self) -> bool:
        """Return whether the outputs, but for logs, are one file that the program has replaced as a whole.

        Such a file is whole whenever it is copied: another inode took its name after its last write, as its times or
        `gpurun_runtime.checkpointed` say.
        """
        logs = self.logs
        files = [
            (host, entry)
            for host, listed in self.hosts.items()
            for path, entry in listed.entries.items()
            if entry.kind != "dir" and (host, path) not in logs
        ]
        if len(files) != 1 or files[0][1].kind != "file":
            return False
        host, entry = files[0]
        is_new = (host, entry.path) in self.replaced
        return is_new and (entry.mtime_ns < _changed_ns(entry) or self._is_declared(host))

    def _is_declared(self, host: str) -> bool:
        """Return whether a host's ranks said that their work is saved, after its last change. By the host's clock.

        Not if another host's have saved a later step: these may be about to write it.
        """
        said = self.hosts[host].declared
        if said is None or said.step != self.step:
            return False
        logs, entries = self.logs_of(host), self.hosts[host].entries
        return all(_changed_ns(entry) <= said.at_ns for path, entry in entries.items() if path not in logs)

    @property
    def step(self) -> int | None:
        """Return the last step that the program said it has saved."""
        said = [each.declared.step for each in self.hosts.values() if each.declared is not None]
        return max(said, default=None)


def is_complete(unbrought: Sequence[Unbrought], logs: frozenset[Where]) -> bool:
    """Return whether a copy has brought everything but logs that can ever come."""
    return all((each.host, each.path) in logs or not (each.may_come or each.no_room) for each in unbrought)


def same_state(one: OutputsSeen, other: OutputsSeen) -> bool:
    """Return whether two looks show the same state but for logs of the later one."""
    if set(one.hosts) != set(other.hosts):
        return False
    logs = other.logs
    return not any(
        (now.host, path) not in logs for now in other.hosts.values() for path in _changed(one.hosts[now.host], now)
    )


def _changed(before: HostOutputs | None, now: HostOutputs) -> Iterator[str]:
    """Yield what is not as it was, with what is gone. A folder's times do not count: what it holds does."""
    old = before.entries if before is not None else {}
    if old is now.entries:
        return
    for path, entry in now.entries.items():
        other = old.get(path)
        if other is not entry and (other is None or not _is_untouched(other, entry)):
            yield path
    yield from (path for path in old if path not in now.entries)


def _is_untouched(one: Listed, other: Listed) -> bool:
    if one.kind != other.kind or one.kind == "dir":
        return one.kind == other.kind
    return (one.marks, one.mode, one.target) == (other.marks, other.mode, other.target)


def _is_in(hosts: Mapping[str, HostOutputs], where: Where) -> bool:
    return where[0] in hosts and where[1] in hosts[where[0]].entries


def _changed_ns(entry: Listed) -> int:
    """Return when an entry changed last. Renames and removals show in the times of folders."""
    return max([entry.mtime_ns, *entry.mark[:1]])

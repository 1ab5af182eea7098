"""The space for the head's copy of a job's outputs: the job's ``outputs_limit``, and a reserve of the disk.

The head's disk holds the state of all jobs: if it is full, no supervisor can write that its job has ended. So a copy
leaves a reserve free. What does not fit stays on its host, and the job's record names it. A host can lie about sizes.
So gpurun counts twice: what the host lists, before it sends anything, and what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.node.agent.disk_reserve import disk_of, reserve_of
from gpurun.node.folder.contents import Listed
from gpurun.node.job.layer_rules import is_beside

ENTRY_BYTES = 4096
"""Each entry counts for a multiple of this: empty files and folders fill a disk, too."""
ASKED_AGAIN_BYTES = 4 << 20
"""After so many bytes the head asks again how much room the disk has. The reserve is far larger."""
NO_ROOM = "does not fit"


def cost_of(size: int) -> int:
    """Return the space for an entry with this many bytes of data."""
    return max(1, -(-size // ENTRY_BYTES)) * ENTRY_BYTES


@dataclass
class _Limit:
    """A limit that a recipe or an inventory sets, and how much of it is left, in bytes."""

    name: str
    size: int
    left: int

    @property
    def words(self) -> str:
        return f"{NO_ROOM}: {self.name} is {_gib(self.size)}"


class OutputsRoom:
    """The space for one copy.

    Args:
        top: a descriptor of the folder in which the copy is made; it must stay open.
        limit: the copy's largest size in bytes; None = unlimited.
        came_before: bytes on disk from an interrupted copy: they are used, or removed before more arrives.
        workdir_limit: the same limit for what ranks wrote beside their code, which counts for `limit`, too.
    """

    def __init__(self, top: int, limit: int | None, came_before: int = 0, *, workdir_limit: int | None = None) -> None:
        self._top = top
        self._outputs = [_Limit("outputs_limit", limit, limit)] if limit is not None else []
        self._beside = [*self._outputs]
        if workdir_limit is not None:
            self._beside.append(_Limit("workdir_limit", workdir_limit, workdir_limit))
        free, disk = disk_of(top)
        self._reserve = reserve_of(disk)
        self._new = free + came_before - self._reserve
        self._unasked = 0

    @property
    def has_limit(self) -> bool:
        """Return whether kept files count."""
        return bool(self._beside)

    def hold(self, entry: Listed) -> None:
        """Count an entry that the present copy has and the next one keeps: it takes no more of the disk."""
        self._use(entry, cost_of(entry.data))

    def take(self, entry: Listed) -> str:
        """Count an entry that should arrive; return why it must not, "" if it may."""
        cost = cost_of(entry.data)
        for limit in self._limits(entry):
            if cost > limit.left:
                return limit.words
        if cost > self._new:
            return self._over_disk
        self._use(entry, cost)
        self._new -= cost
        return ""

    def refuses(self, entry: Listed, came: int, more: int) -> str:
        """Return why no more of a file's content may be written, "" if it may.

        Args:
            came: bytes of it that have arrived, including those to write now.
            more: bytes to write now.
        """
        for limit in self._limits(entry):
            if cost_of(came) - cost_of(entry.data) > max(0, limit.left):
                return limit.words
        if not more:
            return ""
        cost = cost_of(more)
        if cost > self._unasked:
            free = disk_of(self._top)[0] - self._reserve
            if more > free:
                return self._over_disk
            self._unasked = min(free, ASKED_AGAIN_BYTES)
        self._unasked -= cost
        return ""

    def end(self, entry: Listed, came: int) -> None:
        """After a file has arrived, count what it has beyond its host's list."""
        self._use(entry, max(0, cost_of(came) - cost_of(entry.data)))

    def _limits(self, entry: Listed) -> Sequence[_Limit]:
        return self._beside if is_beside(entry.path) else self._outputs

    def _use(self, entry: Listed, size: int) -> None:
        for limit in self._limits(entry):
            limit.left -= size

    @property
    def _over_disk(self) -> str:
        return f"{NO_ROOM}: the head keeps {_gib(self._reserve)} of its disk free"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.4g} MiB"

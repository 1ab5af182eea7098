"""Keep the last whole copy of a running gang's outputs: look, decide, link (`outputs_generations`, `outputs_whole`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from gpurun.jobs.folder import JobFolder
from gpurun.jobs.usage import measure
from gpurun.quantities.times import duration
from gpurun.supervisor import outputs_whole
from gpurun.supervisor.outputs_generations import REST_S, OutputsSeen, is_complete, same_state
from gpurun.supervisor.outputs_listed import HostOutputs, Unbrought
from gpurun.supervisor.outputs_versions import Versions, names_of
from gpurun.supervisor.outputs_whole import About

NEVER_S = 300.0
"""A gang whose outputs have not rested for so long is told."""


class Keeper:
    """Keeps generations of one job's outputs. But for `look`, whoever calls it holds the lock of the outputs.

    Args:
        limit: the largest size of copy and generation together, in bytes; None = as much as the disk can hold.

    Attributes:
        looks: what all looks at the running gang say.
        is_kept: the state of the last look is a generation.
    """

    def __init__(self, folder: JobFolder, limit: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._copied_s = -math.inf
        self._left: Sequence[Unbrought] = ()
        self._kept: OutputsSeen | None = None
        self._rested_s: float | None = None
        self._told: set[str] = set()
        self._notes: list[str] = []
        self.looks = OutputsSeen()
        self.is_kept = False

    def look(self, at_s: float, hosts: Sequence[HostOutputs]) -> bool:
        """Take a look at all hosts of the gang into account; return whether the head's copy is whole and not kept yet.

        Args:
            at_s: as for `OutputsSeen.looked`.
        """
        looks = self.looks = self.looks.looked(at_s, hosts)
        self.is_kept = self._kept is not None and same_state(self._kept, looks) and self._kept.logs == looks.logs
        if self.is_kept or looks.rested_s >= REST_S or self._rested_s is None:
            self._rested_s = at_s if hosts else None
        elif at_s - self._rested_s >= NEVER_S:
            self.say(
                "never",
                f"some output changes at least every {duration(REST_S)}, so the head has no whole copy of the "
                "newest outputs: call gpurun_runtime.checkpointed(step) after each save, or save less often",
            )
        return not self.is_kept and looks.is_whole(self._copied_s) and is_complete(self._left, looks.logs)

    @property
    def next_look_s(self) -> float | None:
        """Return in how many seconds another look may find the copy whole; None if the last look need not be followed.

        A copy that was made at rest needs only a look after it.
        """
        if self.is_kept or not self.looks.has_files:
            return None
        return 0.0 if self._copied_s >= self.looks.at_s and self.looks.is_at_rest else REST_S

    @property
    def has_one_file(self) -> bool:
        """Return whether the copy that was just made is one file that is always whole (`OutputsSeen.is_one_file`)."""
        looks = self.looks
        return self._copied_s == looks.at_s and looks.is_one_file and is_complete(self._left, looks.logs)

    def keep(self, versions: Versions) -> None:
        """Make the head's copy, which is whole, the newest generation. If the disk refuses, say so.

        Args:
            versions: those of the copy.
        """
        names = {host: names_of(host, versions) for host in self.looks.hosts}
        logs = tuple(sorted({names[host].get(path, path) for host, path in self.looks.logs}))
        home = self._folder.path.open_folder()
        try:
            outputs_whole.keep(home, self._folder.path.plain, About(time.time(), self.looks.step, logs, versions))
        except OSError as error:
            self.say("kept", f"the head could not keep a whole copy of the outputs: {error.strerror or error}")
            return
        finally:
            os.close(home)
        self._kept, self.is_kept = self.looks, True
        if logs:
            more = f" and {len(logs) - 3} others" if len(logs) > 3 else ""
            self.say(
                "logs",
                f"the job changes {', '.join(map(repr, logs[:3]))}{more} all the time: a restart gets the "
                "newest copy of such a file, and all other outputs from a moment when none of them changed",
            )

    def begin(self) -> None:
        """The head's copy is about to change."""
        self._copied_s = -math.inf

    def copied(self, look_s: float, left: Sequence[Unbrought]) -> None:
        """The head's copy now holds what all hosts had at a look, but for `left`."""
        self._copied_s, self._left = look_s, left

    def make_room(self, left: Sequence[Unbrought]) -> bool:
        """Remove the generation if the newest copy needs its room, or both together exceed the limit.

        Args:
            left: what the newest copy has not brought.

        Returns:
            Whether it was removed.
        """
        home = self._folder.path.open_folder()
        try:
            has_one = outputs_whole.newest(home) is not None
            if not has_one or not (any(each.no_room for each in left) or self._is_over_limit()):
                return False
            outputs_whole.forget(home)
        finally:
            os.close(home)
        self._kept, self.is_kept = None, False
        self.say(
            "room", "gpurun removed the last whole copy of the outputs, because the newest outputs need its disk space"
        )
        return True

    def _is_over_limit(self) -> bool:
        if self._limit is None:
            return False
        live = measure(self._folder.path / "outputs")
        used = live.total + sum(each.size for each in live.linked.values())
        return used + outputs_whole.beside(self._folder.path) > self._limit

    def forget(self) -> None:
        """Remove the generation: the head's copy is whole."""
        self._kept, self.is_kept = None, False
        home = self._folder.path.open_folder()
        try:
            outputs_whole.forget(home)
        finally:
            os.close(home)

    def say(self, what: str, text: str) -> None:
        """Note something once."""
        if what not in self._told:
            self._told.add(what)
            self._notes.append(text)

    def notes(self) -> Sequence[str]:
        """Return what to tell people. Each note comes once."""
        notes, self._notes = self._notes, []
        return notes

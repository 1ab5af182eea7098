"""When a boot of the head began, and how a stamp of one reading of its clock is moved to another. Pure.

`gpurun.state.clock` says why.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_S = 0.5
"""Two readings of the same clock differ by less. A smaller step is ignored."""


@dataclass(frozen=True)
class HeadBoot:
    """A boot of the head, as one reading of the wall clock dates it.

    Attributes:
        id: the kernel's id of the boot, and after an "@" its machine's; "" = unknown.
        began_s: when the boot began by that reading, seconds since the epoch.
    """

    id: str = ""
    began_s: float = 0.0

    def is_like(self, ident: str, began_s: float) -> bool:
        """Return whether stamps by another reading are stamps by this one: no step of the clock was between them.

        Takes no value of this type, because a pass asks ten thousand records.
        """
        return self.id == ident and abs(self.began_s - began_s) < STEP_S

    def moved(self, stamp_s: float, then: HeadBoot) -> float:
        """Return a past moment, stamped by `then`, by this reading. A moment of an earlier boot is before this boot.

        Of a boot of another machine, such as the head before this one took over, only the wall clock tells.
        """
        if not then.id:
            return stamp_s
        if self.id == then.id and stamp_s >= then.began_s:
            return stamp_s + self.began_s - then.began_s
        return min(stamp_s, self.began_s) if self._machine == then._machine else stamp_s

    @property
    def _machine(self) -> str:
        return self.id.partition("@")[2]

    def moved_ahead(self, stamp_s: float, then: HeadBoot) -> float:
        """Return a moment that may be in the future, such as the end of a pause. Between boots, it stays as it is."""
        return self.moved(stamp_s, then) if self.id == then.id else stamp_s


@dataclass(frozen=True)
class ClockReading:
    """The kernel's clocks at one moment.

    Attributes:
        boot: the id of the boot.
        up_s: CLOCK_BOOTTIME, seconds.
        wall_s: seconds since the epoch.
    """

    boot: str
    up_s: float
    wall_s: float

"""The head's clock: times that people can read, and that a step of the wall clock does not change; and presence.

A stamp in a file is a wall time. Between two stamps of one boot, the elapsed time is the kernel's CLOCK_BOOTTIME, which
nobody can set and which counts a suspended machine, too. So each process measures once when the boot began by the wall
clock (`HeadBoot`), and counts from there. A file says by which `HeadBoot` its stamps were made. A reader moves them to
its own, so a step of the wall clock between both moves the stamps with it. Only between boots does the wall clock
decide.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from gpurun.errors import StateUnavailable
from gpurun.state.boot import ClockReading, HeadBoot

SETTLED_S = 600.0
"""So long after the boot, a clock that no time server has set is believed all the same."""
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def read_clocks() -> ClockReading:
    """Read the kernel's clocks."""
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    wall_s = time.time()
    return ClockReading(boot_id(), (before_s + time.clock_gettime(time.CLOCK_BOOTTIME)) / 2, wall_s)


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot, "@" and a checksum of the machine's id; "" if the kernel tells none.

    It has only a checksum, because machine-id(5) asks programs not to show the id to others.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        machine = f"{zlib.crc32(Path('/etc/machine-id').read_bytes()):08x}"
    except OSError:
        machine = ""
    return f"{boot}@{machine}"


def is_synchronised() -> bool:
    """Return whether the kernel knows that a time server sets the wall clock (adjtimex(2))."""
    import ctypes  # noqa: PLC0415 - only a process that meets an earlier boot needs it

    asked = ctypes.create_string_buffer(512)  # struct timex with no bit in `modes`: only a question
    try:
        return bool(0 <= ctypes.CDLL(None).adjtimex(asked) != _TIME_ERROR)
    except (OSError, AttributeError):
        return False


class HeadClock:
    """The clock of one process. Calling it returns the time, in seconds since the epoch as its first reading had it."""

    def __init__(
        self, read: Callable[[], ClockReading] = read_clocks, *, is_synchronised: Callable[[], bool] = is_synchronised
    ) -> None:
        self._read = read
        self._is_synchronised = is_synchronised
        self.boot = _boot_of(read())
        """The reading by which this process makes its stamps."""
        self._sure_began_s: float | None = None

    def __call__(self) -> float:
        """Return the time now, by `boot`."""
        return self.boot.began_s + self._read().up_s

    def boot_now(self) -> HeadBoot:
        """Return the boot as the wall clock dates it now: files keep times that people can compare with a clock."""
        now = _boot_of(self._read())
        return self.boot if self.boot.is_like(now.id, now.began_s) else now

    def elapsed_s(self, stamp_s: float) -> float:
        """Return the seconds since a stamp by `boot`. A stamp in the future counts as now.

        Before the boot, only the wall clock can tell how long it was. It counts once a time server has set it, or ten
        minutes after the boot: until then, a moment of an earlier boot counts as the moment of the boot. From then on,
        no step of the wall clock changes when the boot began.
        """
        reading = self._read()
        if stamp_s >= self.boot.began_s:
            return max(0.0, self.boot.began_s + reading.up_s - stamp_s)
        if self._sure_began_s is None and (reading.up_s >= SETTLED_S or self._is_synchronised()):
            self._sure_began_s = _boot_of(reading).began_s
        return reading.up_s + (0.0 if self._sure_began_s is None else max(0.0, self._sure_began_s - stamp_s))


def _boot_of(reading: ClockReading) -> HeadBoot:
    return HeadBoot(reading.boot, reading.wall_s - reading.up_s)


_of_process: HeadClock | None = None


def head_clock() -> HeadClock:
    """Return the clock of this process."""
    global _of_process  # noqa: PLW0603 - a process has one clock, from its first stamp on
    if _of_process is None:
        _of_process = HeadClock()
    return _of_process


def now_s() -> float:
    """Return the time by the clock of this process, seconds since the epoch."""
    return head_clock()()


# Whether the state directory is still the one with which a process began.


AWAY_MOST_S = 600.0
"""How long a directory may be away before it counts as moved for good."""


class Presence:
    """Knows the state directory by its device and inode, from the first time it is there."""

    def __init__(self, home: Path, held: Callable[[], int] | None = None) -> None:
        """Look at the directory.

        Args:
            held: returns the descriptor of a file in the directory on which this process holds a lock.
        """
        self._home = home
        self._held = held
        self._known: tuple[int, int] | None = None
        self._away_since_s: float | None = None
        self._is_here()

    def check(self) -> None:
        """Return if the directory is there.

        Raises:
            StateUnavailable: another one is there, or none.
            FileNotFoundError: this has been so for `AWAY_MOST_S`, or the directory was removed.
        """
        if self.is_gone():
            raise FileNotFoundError(errno.ENOENT, "the state directory is gone", str(self._home))
        if self.is_away():
            raise StateUnavailable(
                "the state directory does not exist, or another directory has replaced it", where=str(self._home),
                hint="mount the state directory again, or move it back",
            )  # fmt: skip

    def is_away(self) -> bool:
        """Return whether the directory is not there now, but may come back."""
        return not self.is_gone() and self._away_since_s is not None

    def is_gone(self) -> bool:
        """Return whether the directory does not come back."""
        if self._is_here():
            self._away_since_s = None
            return False
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        return now_s - self._away_since_s >= AWAY_MOST_S or self._is_removed()

    def _is_here(self) -> bool:
        try:
            found = self._home.stat()
        except OSError as error:
            # one that does not answer is there: whoever uses it meets the same error
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)
        self._known = self._known or (found.st_dev, found.st_ino)
        return self._known == (found.st_dev, found.st_ino)

    def _is_removed(self) -> bool:
        """Return whether the held file has no name any more; that of a directory that is only away has one."""
        if self._held is None:
            return False
        try:
            return os.fstat(self._held()).st_nlink == 0
        except OSError:
            return False

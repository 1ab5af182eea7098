"""Read what the script of each rank leaves in the job's `run` folder (`gpurun.launch.rank` describes it).

The program in the container can write all of it. So this module follows no link, reads only regular files, and limits
what it reads of folders. A program that changes its own reports harms only its own job.
"""

import ctypes
import errno
import itertools
import os
import re
import stat
import time
from typing import Iterator, List, NamedTuple, Optional, Tuple

from gpurun.node.job import job_parts

MOST_RANKS = 4096
"""So many ranks of one attempt are looked at, the newest: elastic gangs start ranks again and again."""
_MOST_NAMES = 1 << 14
_MOST_FILES = 64
_NUMBER_BYTES = 8
_ID = re.compile(r"(0|[1-9]\d{0,5})\.([1-9]\d{0,9})\.([1-9]\d{0,19})\Z", re.ASCII)
_END = re.compile(r"end\.(0|[1-9]\d{0,2})\Z", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITTEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PUNCH_HOLE = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``: linux/falloc.h."""
STREAMS = ("o", "e", "m")
"""What a rank prints, to stdout and to stderr, and the metrics that it reports."""


class Name(NamedTuple):
    """The name of a rank's folder. `pid` and `started` are those of its script, inside its container."""

    id: str
    rank: int
    pid: int
    started: int


class RankState(NamedTuple):
    """A rank's folder at one moment.

    Attributes:
        begun_s: when the rank started, by this host's clock.
        code: None while no end is recorded.
        ended_s: when the end was recorded; 0 if it is not.
        sizes: bytes of each of `STREAMS`.
    """

    begun_s: float
    code: Optional[int]
    ended_s: float
    sizes: Tuple[int, ...]


def run_folder(job: str) -> str:
    """Return the job's `run` folder on this host."""
    return os.path.join(job_parts.folder(job), "run")


def parse(name: str) -> Optional[Name]:
    """Split a folder's name; None for a name that no script made."""
    found = _ID.match(name)
    return None if found is None else Name(name, *(int(number) for number in found.groups()))


class RankFolders:
    """The open folder with the ranks of one attempt. If it is missing, there are no ranks."""

    def __init__(self, job: str, attempt: int) -> None:
        self._descriptor = _open_below(run_folder(job), "ranks", "%d" % int(attempt))

    def __enter__(self) -> "RankFolders":
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def names(self) -> List[Name]:
        """Return the ranks that have a folder, in the order of their start."""
        if self._descriptor is None:
            return []
        found = (parse(name) for name in _first_names(self._descriptor, _MOST_NAMES))
        ranks = sorted((one for one in found if one is not None), key=lambda one: (one.started, one.pid, one.rank))
        return ranks[-MOST_RANKS:]

    def see(self, name: str) -> Optional[RankState]:
        """Return what a rank has reported; None if it has not started, or its folder is gone."""
        folder = self._open(name)
        if folder is None:
            return None
        try:
            start = _plain(folder, "start")
            if start is None or not start.st_size:
                return None
            code, ended_s = _end(folder)
            # The sizes are read after the end: all that the rank printed is in them.
            found = [_plain(folder, stream) for stream in STREAMS]
            return RankState(start.st_mtime, code, ended_s, tuple(0 if one is None else one.st_size for one in found))
        finally:
            os.close(folder)

    def was_told(self, name: str) -> bool:
        """Return whether the rank's script has passed a signal of the launcher on to it."""
        folder = self._open(name)
        if folder is None:
            return False
        try:
            return _plain(folder, "told") is not None
        finally:
            os.close(folder)

    def number_now(self, name: Name) -> int:
        """Return the rank's number: its first one, unless the rank has reported another since."""
        _, data = self.read(name.id, "now", 0, _NUMBER_BYTES)
        return int(data) if data.isdigit() and len(data) < _NUMBER_BYTES else name.rank

    def read(self, name: str, file: str, offset: int, most: int) -> Tuple[int, bytes]:
        """Return the next bytes of a file from `offset` on, and where they end. Skips a hole in the file."""
        folder = self._open(name)
        if folder is None:
            return offset, b""
        try:
            descriptor = os.open(file, _FILE, dir_fd=folder)
        except OSError:
            return offset, b""
        finally:
            os.close(folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or offset >= status.st_size:
                return offset, b""
            begin = _next_data(descriptor, offset, status.st_size)
            data = os.pread(descriptor, min(most, status.st_size - begin), begin)
            return begin + len(data), data
        except OSError:
            return offset, b""  # the disk's, or the program's own doing: the next look may find it readable
        finally:
            os.close(descriptor)

    def release(self, name: str, file: str, until: int) -> int:
        """Free the disk space of a file before an offset by a hole, so that offsets stay. Returns the freed bytes.

        Does nothing on file systems without holes.
        """
        folder = self._open(name)
        if folder is None:
            return 0
        try:
            descriptor = os.open(file, _WRITTEN, dir_fd=folder)
        except OSError:
            return 0
        finally:
            os.close(folder)
        try:
            status = os.fstat(descriptor)
            length = min(until, status.st_size)
            if length <= 0 or not stat.S_ISREG(status.st_mode) or not _make_hole(descriptor, length):
                return 0
            return max(0, status.st_blocks - os.fstat(descriptor).st_blocks) * 512
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> Optional[int]:
        if self._descriptor is None:
            return None
        try:
            return os.open(name, _FOLDER, dir_fd=self._descriptor)
        except OSError:
            return None


def tell_to_stop(job: str, attempt: int) -> None:
    """Make ranks of this attempt that start from now on end immediately. Idempotent; does not affect other attempts.

    Raises:
        OSError: there is no such job here, or its disk is full.
    """
    folder = os.open(run_folder(job), _FOLDER)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open("stop.%d" % int(attempt), flags, 0o600, dir_fd=folder))
    except FileExistsError:
        pass
    finally:
        os.close(folder)


def age_s(moment_s: float) -> float:
    """Return the seconds since a file's time, which a program may have set to anything."""
    return max(0.0, time.time() - moment_s)


def _open_below(path: str, *names: str) -> Optional[int]:
    descriptor = None
    try:
        descriptor = os.open(path, _FOLDER)
        for name in names:
            below = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        return descriptor
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None


def _first_names(descriptor: int, most: int) -> Iterator[str]:
    try:
        with os.scandir(descriptor) as entries:
            yield from [entry.name for entry in itertools.islice(entries, most)]
    except OSError:
        return


def _end(folder: int) -> Tuple[Optional[int], float]:
    """Return the recorded exit code and its time; of several, those of the oldest file."""
    found = []
    for name in _first_names(folder, _MOST_FILES):
        match = _END.match(name)
        status = None if match is None else _plain(folder, name)
        if match is not None and status is not None and int(match.group(1)) < 256:
            found.append((status.st_mtime, int(match.group(1))))
    return (None, 0.0) if not found else (min(found)[1], min(found)[0])


def _plain(folder: int, name: str) -> Optional[os.stat_result]:
    """Return a regular file's status; None for anything else."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _make_hole(descriptor: int, length: int) -> bool:
    """Make a hole from the file's beginning on (man fallocate); return False if that is impossible."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length)) == 0)


def _next_data(descriptor: int, offset: int, size: int) -> int:
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset

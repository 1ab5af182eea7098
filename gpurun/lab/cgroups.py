"""Control groups of a lab's containers, in every hierarchy the machine has (cgroup v1, v2 or both)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_EMPTY_TIMEOUT_S = 5.0


def hierarchies() -> tuple[Path, ...]:
    """Return the mount points of all cgroup hierarchies (proc_pid_mountinfo(5): type after the ``-``)."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _dash, after = line.partition(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split()[4]))
    return tuple(found)


@dataclass(frozen=True)
class Cgroup:
    """A cgroup by its path below the root of every hierarchy. Docker creates it; only the lab removes it."""

    name: str

    @property
    def path(self) -> str:
        """The path in the form of ``dockerd --cgroup-parent``."""
        return f"/{self.name}"

    def places(self) -> list[Path]:
        """Return its existing folders."""
        return [place for root in hierarchies() if (place := root / self.name).is_dir()]

    def remove(self) -> list[Path]:
        """Remove it with all child groups. Returns the folders that still contain processes."""
        deadline = time.monotonic() + _EMPTY_TIMEOUT_S
        while True:
            left = [place for place in self.places() if not _remove_tree(place)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def _remove_tree(place: Path) -> bool:
    """Remove a cgroup folder depth first. Removes only folders, because the files belong to the kernel."""
    for child in place.iterdir():
        if child.is_dir():
            _remove_tree(child)
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

"""What this machine knows of the labs that are up: one small file each, below ``/run``.

The kernel is the truth about what exists; the record says what it was made from, and where its folder is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path

from gpurun.lab.lock import alone
from gpurun.lab.paths import RUNTIME
from gpurun.lab.spec import LabSpec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Record:
    """A lab that is up, or was being brought up.

    Attributes:
        complete: False from before the first thing is made until everything answers.
    """

    spec: LabSpec
    subnet: IPv4Network
    folder: Path
    complete: bool = False

    def completed(self) -> Record:
        """The same, now that everything answers."""
        return replace(self, complete=True)

    def save(self) -> None:
        """Write it, whole or not at all."""
        place = runtime(self.spec.name)
        place.mkdir(parents=True, exist_ok=True)
        fields = {
            "boot_id": _boot_id(),
            "spec": self.spec.to_json(),
            "subnet": str(self.subnet),
            "folder": os.fsdecode(self.folder),
            "complete": self.complete,
        }
        draft = place / ".record.json"
        draft.write_text(json.dumps(fields))
        draft.rename(place / "record.json")


def load(lab: str) -> Record | None:
    """The record of a lab; None if there is none, it is from before a reboot, or it says nothing sensible."""
    try:
        fields = json.loads((runtime(lab) / "record.json").read_text())
        if fields["boot_id"] != _boot_id():
            return None
        return Record(
            spec=LabSpec.from_json(fields["spec"]),
            subnet=IPv4Network(fields["subnet"]),
            folder=Path(fields["folder"]),
            complete=bool(fields["complete"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(lab: str) -> None:
    """Remove everything about a lab below ``/run``; nothing happens if there is nothing."""
    shutil.rmtree(runtime(lab), ignore_errors=True)


def labs() -> Iterator[Record]:
    """Every lab of this machine that is up or half up, by name."""
    for place in sorted(RUNTIME.glob("*/record.json")):
        record = load(place.parent.name)
        if record is not None:
            yield record


def runtime(lab: str) -> Path:
    """Where a lab's record and those of its hosts are."""
    return RUNTIME / lab


def init_record(lab: str, host: str) -> Path:
    """Where a host's process 1 writes down who it is."""
    return runtime(lab) / f"{host}.json"


def hosts_with_record(lab: str) -> list[str]:
    """Hosts whose process 1 has been on record since the lab came up."""
    return sorted(path.stem for path in runtime(lab).glob("[!.]*.json") if path.stem != "record")


def locked(lab: str) -> AbstractContextManager[None]:
    """Hold the lock of one lab."""
    return alone(_lock(lab))


def remove_lock(lab: str) -> None:
    """Remove the lock's file of a lab that is no more; only its holder may."""
    _lock(lab).unlink(missing_ok=True)


def all_locked() -> AbstractContextManager[None]:
    """Hold the lock under which labs choose their addresses."""
    return alone(RUNTIME / "all.lock")


def _lock(lab: str) -> Path:
    return RUNTIME / f"{lab}.lock"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()

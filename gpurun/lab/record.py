"""The machine's records of running labs: one small file per lab, below ``/run``.

The kernel is authoritative for existing objects. The record contains the lab's options and its folder.
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
    """A lab that is up, or whose start is not complete.

    Attributes:
        complete: False until every host answers.
    """

    spec: LabSpec
    subnet: IPv4Network
    folder: Path
    complete: bool = False

    def completed(self) -> Record:
        """Return the same record, marked as complete."""
        return replace(self, complete=True)

    def save(self) -> None:
        """Write it atomically."""
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
    """Return the record of a lab; None if there is none, if it is older than the last reboot, or if it is invalid."""
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
    """Remove all files of a lab below ``/run``; does nothing if there are none."""
    shutil.rmtree(runtime(lab), ignore_errors=True)


def labs() -> Iterator[Record]:
    """Return every lab of this machine that is up or partly up, by name."""
    for place in sorted(RUNTIME.glob("*/record.json")):
        record = load(place.parent.name)
        if record is not None:
            yield record


def runtime(lab: str) -> Path:
    """Return the folder of a lab's record and of its hosts' records."""
    return RUNTIME / lab


def init_record(lab: str, host: str) -> Path:
    """Return the file in which a host's process 1 records its identity."""
    return runtime(lab) / f"{host}.json"


def hosts_with_record(lab: str) -> list[str]:
    """Return the hosts whose process 1 has a record since the lab started."""
    return sorted(path.stem for path in runtime(lab).glob("[!.]*.json") if path.stem != "record")


def locked(lab: str) -> AbstractContextManager[None]:
    """Hold the lock of one lab."""
    return alone(_lock(lab))


def remove_lock(lab: str) -> None:
    """Remove the lock file of a removed lab; only the lock's holder may call this."""
    _lock(lab).unlink(missing_ok=True)


def all_locked() -> AbstractContextManager[None]:
    """Hold the lock for the choice of addresses."""
    return alone(RUNTIME / "all.lock")


def _lock(lab: str) -> Path:
    return RUNTIME / f"{lab}.lock"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()

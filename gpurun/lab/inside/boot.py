"""The instructions for a host's process 1: one JSON file. ``gpurun lab up`` writes it with this module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpurun.lab.inside.init import Service


@dataclass(frozen=True)
class File:
    """A file of the host.

    Attributes:
        keep: write the file only if the host has none: users may have changed it.
        uid: owner and group.
    """

    path: str
    text: str
    mode: int = 0o644
    uid: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Copy:
    """A file of the host that is copied from the machine."""

    source: str
    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Boot:
    """One start of one host.

    Attributes:
        disk: folder that is the host's disk, or the mount point of `image`.
        image: file with an ext4 file system; None = `disk` itself is the disk.
        hardware: folder that appears in the host as ``/run/gpurun-lab``.
        devices: device nodes to create below ``/dev``; the stand-ins discard all input, like ``/dev/null``.
        homes: uid by user name.
        authorized_key: public key that these users accept.
    """

    name: str
    disk: str
    image: str | None
    hardware: str
    files: tuple[File, ...]
    copies: tuple[Copy, ...]
    devices: tuple[str, ...]
    homes: Mapping[str, int]
    authorized_key: str
    services: tuple[Service, ...]

    def save(self, path: Path) -> None:
        """Write the file. Only root may read it, because it contains the host's private key."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Boot:
        """Read the file that `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        fields["files"] = tuple(File(**each) for each in fields["files"])
        fields["copies"] = tuple(Copy(**each) for each in fields["copies"])
        fields["services"] = tuple(service_from(each) for each in fields["services"])
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)


def service_from(fields: Mapping[str, Any]) -> Service:
    """Return a `Service` from its JSON."""
    return Service(**{**fields, "argv": tuple(fields["argv"]), "stale": tuple(fields["stale"])})

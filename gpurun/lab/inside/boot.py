"""What a host's process 1 is told by ``gpurun lab up``: one JSON file, made and read by this module."""

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
        keep: write it only where the host has none yet: people may have changed it.
        uid: owner and group.
    """

    path: str
    text: str
    mode: int = 0o644
    uid: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Copy:
    """A file of the host that comes from the machine."""

    source: str
    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Boot:
    """One start of one host.

    Attributes:
        disk: folder that is the host's disk, or where `image` is mounted.
        image: file that holds an ext4 file system; None = `disk` itself is the disk.
        hardware: folder that appears in the host as ``/run/gpurun-lab``.
        devices: device nodes to make below ``/dev``, stand-ins that swallow everything.
        homes: uid by user name.
        authorized_key: public key that opens those users' accounts.
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
        """Write it; it holds the host's private key, so for root only."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Boot:
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        fields["files"] = tuple(File(**each) for each in fields["files"])
        fields["copies"] = tuple(Copy(**each) for each in fields["copies"])
        fields["services"] = tuple(service_from(each) for each in fields["services"])
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)


def service_from(fields: Mapping[str, Any]) -> Service:
    """A `Service` from its JSON."""
    return Service(**{**fields, "argv": tuple(fields["argv"]), "stale": tuple(fields["stale"])})

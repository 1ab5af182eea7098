"""Progress events and the final report of a ship. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpurun.errors import GpurunError


@dataclass(frozen=True)
class ShipEvent:
    """The progress of one host.

    Attributes:
        state: ``present`` (it had the image), ``receiving``, ``loading``, ``done`` or ``failed``.
        bytes: received so far, of `total`.
        rate_bytes_s: over the last seconds; None while unknown.
        eta_s: seconds until the last byte is received; None while unknown.
        layer, layers: layer k of the n layers that this host receives.
        message: why it failed.
    """

    host: str
    state: str
    bytes: int = 0
    total: int = 0
    rate_bytes_s: float | None = None
    eta_s: float | None = None
    layer: int = 0
    layers: int = 0
    message: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The event as a JSON object without empty fields."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class HostShip:
    """The result on one host.

    Attributes:
        state: ``present``, ``done`` or ``failed``.
        bytes_received: the bytes that the host received for itself.
        local: the ID that the host's engine has for the image; "" if it failed.
        error: why it failed.
    """

    host: str
    state: str
    bytes_received: int
    elapsed_s: float
    error: GpurunError | None = None
    local: str = ""


@dataclass(frozen=True)
class ShipReport:
    """The result of a ship.

    Attributes:
        id: the image's ID on the head.
        layers: how many layers the image has.
        bytes_missing: the size of the layers that at least one host lacked, each counted once.
    """

    image: str
    id: str
    layers: int
    bytes_missing: int
    hosts: tuple[HostShip, ...]
    elapsed_s: float

    @property
    def failed(self) -> Mapping[str, GpurunError]:
        """Return the hosts that do not have the image now, with their errors."""
        return {host.host: host.error for host in self.hosts if host.error is not None}

    def as_json(self) -> dict[str, Any]:
        """The document that ``gpurun ship --json`` prints."""
        hosts = [
            {
                "host": host.host,
                "state": host.state,
                "bytes_received": host.bytes_received,
                "elapsed_s": round(host.elapsed_s, 3),
                **({"error": host.error.message} if host.error else {}),
            }
            for host in self.hosts
        ]
        return {
            "image": self.image,
            "id": self.id,
            "layers": self.layers,
            "bytes_missing": self.bytes_missing,
            "hosts": hosts,
            "elapsed_s": round(self.elapsed_s, 3),
        }

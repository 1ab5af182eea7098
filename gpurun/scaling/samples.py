"""One measured run of a scaling campaign, as a frozen value and as a line of JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import msgspec

from gpurun.errors import BadInput
from gpurun.msgspec_types import ready
from gpurun.scaling.shape import LinkRates, Shape

Exchange = Literal["ring", "hierarchical", "servers"]
"""The exchange of gradients: one ring of all ranks; rings inside hosts and one of the hosts; parameter servers."""

LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
MOST_BYTES = 1 << 50
MOST_RATE = 1e12
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6
MOST_WINDOWS = 10_000
PRECISIONS = re.compile(r"([a-z0-9]{1,8}(\+[a-z0-9]{1,8})*)?")


@dataclass(frozen=True)
class Sample:
    """One measured run.

    Attributes:
        ranks_per_host: training ranks, host by host in rank order; 0 for a host that has only parameter servers.
        racks: the rack of each host.
        batch_per_rank: images of one step of one rank.
        gradient_bytes: bytes of one rank's gradients in one step, before compression, as the program counted them: with
            autocast they are fp32, whatever the precision.
        step_s: median seconds of a step, without warm-up.
        images_per_s: of all ranks together.
        windows_s: seconds of a step in each window of the measurement.
        gpus: GPUs that the job held; 0 if its ranks have none.
        exchange: how ranks exchange gradients.
        servers_per_host: parameter servers on each host; empty without servers.
        launcher: the launcher's name, such as ``horovod``. Each launcher has its own model.
        compute_s: seconds of computation in a step of one rank; None = not known.
        compute_spread: standard deviation of ranks' compute times over their mean; None = not known.
        exchange_s: seconds of communication in a step, including hidden communication; None = not known.
        rates: nominal link rates during the run.
        compression: gradient bytes over bytes sent: 2 for fp16.
        precision: what the ranks compute in, such as ``bf16``; with ``+`` between them if ranks differ; "" = not known.
        is_compiled: whether the network was compiled; None = not known.
        job: the id of the measured job.

    Raises:
        ValueError: a value is not possible.
    """

    ranks_per_host: tuple[int, ...]
    racks: tuple[str, ...]
    batch_per_rank: int
    gradient_bytes: int
    step_s: float
    images_per_s: float
    windows_s: tuple[float, ...] = ()
    gpus: int = 0
    exchange: Exchange = "ring"
    servers_per_host: tuple[int, ...] = ()
    launcher: str = ""
    compute_s: float | None = None
    compute_spread: float | None = None
    exchange_s: float | None = None
    rates: LinkRates = field(default_factory=LinkRates)
    compression: float = 1.0
    precision: str = ""
    is_compiled: bool | None = None
    job: str = ""

    def __post_init__(self) -> None:
        _between("batch_per_rank", self.batch_per_rank, 1, MOST_BYTES)
        _between("gradient_bytes", self.gradient_bytes, 1, MOST_BYTES)
        _between("gpus", self.gpus, 0, MOST_BYTES)
        _between("step_s", self.step_s, LEAST_SECONDS, MOST_SECONDS)
        _positive("images_per_s", self.images_per_s, MOST_RATE)
        _between("compression", self.compression, LEAST_FACTOR, MOST_FACTOR)
        _between("the number of windows_s", len(self.windows_s), 0, MOST_WINDOWS)
        for window_s in self.windows_s:
            _between("windows_s", window_s, LEAST_SECONDS, MOST_SECONDS)
        if self.compute_s is not None:
            _between("compute_s", self.compute_s, LEAST_SECONDS, MOST_SECONDS)
        if self.exchange_s:
            _between("exchange_s", self.exchange_s, LEAST_SECONDS, MOST_SECONDS)
        if self.compute_spread is not None:
            _between("compute_spread", self.compute_spread, 0.0, MOST_FACTOR)
        if not PRECISIONS.fullmatch(self.precision):
            raise ValueError(
                f"precision {self.precision[:40]!r} must be a name such as bf16, or several names joined by +"
            )
        if (self.exchange == "servers") != any(self.servers_per_host):
            raise ValueError(
                "servers_per_host must have a server if the exchange is 'servers', and must have no server otherwise"
            )
        _ = self.shape

    @property
    def shape(self) -> Shape:
        """The hosts of its ranks and servers, with the links."""
        return Shape(self.ranks_per_host, self.racks, self.servers_per_host, self.rates)

    @property
    def ranks(self) -> int:
        """The number of training ranks."""
        return sum(self.ranks_per_host)

    @property
    def bytes_sent(self) -> float:
        """The bytes of one rank's gradients on the network."""
        return self.gradient_bytes / self.compression


def _between(name: str, value: float, least: float, most: float) -> None:
    if not (isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} {value!r} must be from {least:g} to {most:g}")


def _positive(name: str, value: float, most: float) -> None:
    if not (isfinite(value) and 0 < value <= most):
        raise ValueError(f"{name} {value!r} must be above 0 and at most {most:g}")


def encode(sample: Sample) -> bytes:
    """Return a sample as a line of JSON, with its newline."""
    return msgspec.json.encode(sample) + b"\n"


def decode(data: bytes, where: str) -> tuple[Sample, ...]:
    """Read samples, one per line; skips empty lines.

    Args:
        where: the file's name in messages.

    Raises:
        BadInput: a line is not a sample; the error names the line.
    """
    return tuple(_decoded(enumerate(data.split(b"\n"), 1), where))


def _decoded(lines: Iterable[tuple[int, bytes]], where: str) -> Iterable[Sample]:
    decoder = msgspec.json.Decoder(ready(Sample))
    for number, line in lines:
        if line.strip():
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise BadInput(
                    f"the line is not a measured run: {error}",
                    where=f"{where}:{number}",
                    hint="remove the line, or measure again with `gpurun scale`",
                ) from None

"""What ``--json`` prints about hosts, images and data sets."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from gpurun.doctor.findings import Severity
from gpurun.facts import Hardware


class FindingShape(TypedDict):
    """A problem on hosts.

    Attributes:
        check: the stable name of the check, such as `link-rate`.
        remedy: the proposed repair.
        gpus: GPU indices by host, if the problem concerns some GPUs only.
        links: from and to, if the problem concerns links only.
    """

    check: str
    severity: Severity
    hosts: list[str]
    evidence: str
    remedy: str
    gpus: dict[str, list[int]]
    links: list[list[str]]


class DoctorShape(TypedDict):
    """Problems on hosts and links.

    Attributes:
        cordoned: the hosts that `--cordon` cordoned.
        findings: errors and warnings.
    """

    inventory: str
    healthy: list[str]
    unhealthy: list[str]
    cordoned: list[str]
    findings: list[FindingShape]
    notes: list[FindingShape]
    elapsed_s: float


LinkShape = TypedDict(
    "LinkShape",
    {"from": str, "to": str, "gbit_per_s": float, "latency_us": float, "rate_gbit_per_s": float | None},
)
LinkShape.__doc__ = """One link between two hosts, in one direction.

    Attributes:
        rate_gbit_per_s: the nominal rate; null: unknown.
    """


class CollectiveShape(TypedDict):
    """One allreduce of all ranks.

    Attributes:
        algbw_gbyte_per_s: bytes divided by time.
        busbw_gbyte_per_s: the bus bandwidth, as nccl-tests define it.
    """

    engine: str
    ranks: int
    bytes: int
    time_us: float
    algbw_gbyte_per_s: float
    busbw_gbyte_per_s: float


class BenchShape(TypedDict):
    """Latency and bandwidth between hosts.

    Attributes:
        skipped: engines that were not measured, with the reason.
    """

    inventory: str
    hosts: list[str]
    mpi: str
    links: list[LinkShape]
    allreduce: list[CollectiveShape]
    skipped: dict[str, str]
    findings: list[FindingShape]


class DifferenceShape(TypedDict):
    """A key of a host where the inventory and the machine disagree."""

    key: str
    stated: Any
    found: Any


class ProbedHostShape(Hardware):
    """A host's hardware, compared with the inventory."""

    differences: tuple[DifferenceShape, ...]


class FailedHostShape(TypedDict):
    """A host that did not answer."""

    host: str
    error: str
    hint: str | None


class ProbeShape(TypedDict):
    """The hardware of hosts."""

    inventory: str
    hosts: list[ProbedHostShape]
    failed: list[FailedHostShape]
    elapsed_s: float


class _ShippedAlways(TypedDict):
    host: str
    state: Literal["present", "done", "failed"]
    bytes_received: int
    elapsed_s: float


class ShippedHostShape(_ShippedAlways, total=False):
    """The result on one host.

    Attributes:
        state: `present`: the host had the image.
        error: why the copy failed.
    """

    error: str


class ShipShape(TypedDict):
    """The result of a copy of an image. While hosts progress, the command prints one object a line on stderr.

    Attributes:
        bytes_missing: bytes of the layers that at least one host lacked.
    """

    image: str
    id: str
    layers: int
    bytes_missing: int
    hosts: list[ShippedHostShape]
    elapsed_s: float


class MissingLayerShape(TypedDict):
    """A layer, and the hosts that lack it."""

    digest: str
    bytes: int
    hosts: list[str]


HopShape = TypedDict("HopShape", {"host": str, "rack": str, "from": str, "layers": list[str]})
HopShape.__doc__ = "One host of a chain, and the host that it gets the layers from."


class ShipPlanShape(TypedDict):
    """What `gpurun ship` would copy.

    Attributes:
        shape: `nothing`, `chain` or `star`.
        present: hosts that have the image.
        unnamed: hosts that have the image under another name only.
        chains: hosts in the order in which layers travel.
    """

    image: str
    id: str
    bytes_missing: int
    shape: str
    expected_s: float
    present: list[str]
    unnamed: list[str]
    layers: list[MissingLayerShape]
    chains: list[list[HopShape]]


class PlacedImageShape(TypedDict):
    """An image that gpurun put on a host.

    Attributes:
        names: tags that gpurun gave the image.
        present: whether the image is still on the host.
        temporary: whether the image contains only layers of an interrupted copy.
        shipped_s: when gpurun copied the image, by the host's clock; null: unknown.
        used_by: containers that use the image.
    """

    id: str
    names: list[str]
    present: bool
    temporary: bool
    shipped_s: float | None
    size_bytes: int
    used_by: list[str]


class ImagesShape(TypedDict, total=False):
    """Images by host.

    Attributes:
        images: all images on each host; only without `--prune`.
        pruned: the images that gpurun removed from each host; only with `--prune`.
        failed: hosts that failed, with the error.
    """

    images: dict[str, list[PlacedImageShape]]
    pruned: dict[str, list[PlacedImageShape]]
    failed: dict[str, str]


class DataSetShape(TypedDict):
    """A data set.

    Attributes:
        source: where the data set came from; empty: unknown.
        used_s: when a job last used the data set; seconds since 1970.
        jobs: jobs that need the data set and have not ended.
    """

    digest: str
    bytes: int
    files: int
    source: str
    hosts: list[str]
    used_s: float
    jobs: list[str]


class DataListShape(TypedDict):
    """Data sets on hosts."""

    sets: list[DataSetShape]
    failed: dict[str, str]


class _StagedAlways(TypedDict):
    host: str
    state: Literal["present", "done", "failed"]
    bytes_received: int


class StagedHostShape(_StagedAlways, total=False):
    """The result on one host."""

    error: str


class StageShape(TypedDict):
    """The result of a copy of a data set.

    Attributes:
        bad_copies: hosts whose copy could not be used, and why.
    """

    digest: str
    bytes: int
    hosts: list[StagedHostShape]
    elapsed_s: float
    bad_copies: dict[str, str]


class EvictShape(TypedDict):
    """The data sets that gpurun removed.

    Attributes:
        evicted: each data set's digest, with the hosts that removed the data set.
        kept: each data set's digest, with each host that keeps the data set, and the reason.
    """

    evicted: dict[str, list[str]]
    kept: dict[str, dict[str, str]]
    failed: dict[str, str]


class CachesShape(TypedDict):
    """A user's caches on one host.

    Attributes:
        jobs: jobs that use the caches on the host.
        freed_bytes: how many bytes a prune removed.
        stuck: some entries that could not be removed, and why.
    """

    host: str
    bytes: int
    jobs: list[str]
    freed_bytes: int
    stuck: list[str]


class CachesSizeShape(TypedDict):
    """The disk space of caches on hosts; only with `--caches`."""

    caches: list[CachesShape]
    failed: dict[str, str]


class CachesPruneShape(TypedDict):
    """The disk space of caches that `prune --caches` removed on hosts, or would remove with `--dry-run`."""

    dry_run: bool
    caches: list[CachesShape]
    failed: dict[str, str]

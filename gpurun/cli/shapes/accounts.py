"""What ``--json`` prints about sweeps, campaigns, the history and gpurun itself."""

from __future__ import annotations

from typing import Any, TypedDict

from gpurun.documents.plain import Problem
from gpurun.history.report import Share
from gpurun.history.row import HistoryRow
from gpurun.inventory.change import RecordedChange
from gpurun.inventory.model import Fabric, Host, Pool
from gpurun.remote.trust import KeyState
from gpurun.scaling.model import LinkRates
from gpurun.scheduler.explain import Fate
from gpurun.state.hosts import Cordon, Out
from gpurun.studies.campaign_pictures import CurvePoint, PredictedPoint
from gpurun.studies.campaign_plan import RefusedSize


class SweepStartedShape(TypedDict):
    """A sweep that was started."""

    sweep: str
    trials: int


class TrialShape(TypedDict):
    """A trial. Times are seconds since 1970.

    Attributes:
        state: `open`, `waits`, `stopping`, `complete`, `pruned`, `failed` or `cancelled`.
        value: the newest value of the metric; null: no value yet, or not a number.
        step: the step at which the metric had this value.
    """

    trial: int
    state: str
    value: float | None
    step: int | None
    job: str
    parameters: dict[str, Any]
    reason: str
    asked_s: float
    ended_s: float | None


class BestTrialShape(TrialShape):
    """The best trial.

    Attributes:
        outputs: the folder of the trial's outputs; empty: the trial has no outputs.
    """

    outputs: str


class _SweepAlways(TypedDict):
    sweep: str
    name: str
    search: str
    points: int
    metric: str | None
    done: bool
    stopped: bool
    counts: dict[str, int]
    best: TrialShape | None
    trouble: str


class SweepShape(_SweepAlways, total=False):
    """A sweep.

    Attributes:
        search: `grid`, `random` or `tpe`.
        points: how many combinations of parameters the sweep tries.
        counts: trials by outcome; `open`: not ended.
        trouble: why the sweep cannot continue, or why gpurun stopped the sweep; empty: the sweep has no trouble.
        trials: all trials, the best first; only `gpurun sweep status SWEEP` and `gpurun sweep table` print them.
    """

    trials: list[TrialShape]


class SweepsShape(TypedDict):
    """All sweeps. With a SWEEP, the document is the sweep with its `trials`."""

    sweeps: list[SweepShape]


class CampaignRowShape(TypedDict):
    """One campaign."""

    campaign: str
    created_s: float
    done: bool
    unit: str
    runs_in_all: int
    gpu_hours: float


class CampaignsShape(TypedDict):
    """All campaigns."""

    campaigns: list[CampaignRowShape]


class RunShape(TypedDict):
    """One run of a campaign.

    Attributes:
        run: the number of the repetition.
        rate: the median rate; null: not measured.
        windows: the rate in each window of the measurement.
        placement: GPU indices by host.
        sample: the run's data for the cost model; null: no data.
    """

    launcher: str
    gpus: int
    run: int
    outcome: str
    reason: str
    job: str
    rate: float | None
    low: float | None
    high: float | None
    windows: list[float] | None
    hosts: int
    racks: int
    placement: dict[str, list[int]]
    gpu_hours: float
    held_s: float
    metrics: dict[str, float]
    sample: dict[str, Any] | None


class VersionsShape(TypedDict):
    """Versions of a campaign's software."""

    gpurun: str
    python: str
    commit: str


class CampaignShape(TypedDict):
    """A campaign, which measures how a recipe's rate grows with the number of GPUs.

    Attributes:
        unit: unit of the rate.
        predicted: the rates that the cost model predicts.
        refused: sizes that cannot run.
        settings: the settings of each job.
    """

    campaign: str
    created_s: float
    done: bool
    unit: str
    runs_in_all: int
    curve: list[CurvePoint]
    predicted: list[PredictedPoint]
    refused: list[RefusedSize]
    runs: list[RunShape]
    gpu_hours: float
    settings: list[dict[str, Any]]
    rates_bit_per_s: LinkRates
    inventory: str
    repeat: int
    versions: VersionsShape
    head: str


class CampaignFilesShape(TypedDict):
    """The files of a campaign's report, as paths.

    Attributes:
        json: the document of `gpurun scale show CAMPAIGN --json`, with the predictions of the cost model.
    """

    campaign: str
    html: str
    json: str
    csv: str


class HistoryShape(TypedDict):
    """Ended attempts, the newest first."""

    attempts: list[HistoryRow]


class LargestShape(HistoryRow):
    """An attempt, with its GPU use in words."""

    use: str


class ReportShape(TypedDict):
    """Resource use in a period. Times are seconds.

    Attributes:
        since_s: start of the period, seconds since 1970.
        until_s: end of the period.
        capacity: GPUs in the inventory; null: unknown.
        outcomes: attempts by outcome.
        causes: failures by cause.
        failed_hosts: failures by host.
        timeline: leased GPUs in equal parts of the period.
        largest: the attempts with the most GPU time.
    """

    since_s: float
    until_s: float
    capacity: int | None
    total: Share
    users: dict[str, Share]
    pools: dict[str, Share]
    projects: dict[str, Share]
    generations: dict[str, Share]
    outcomes: dict[str, int]
    causes: dict[str, int]
    failed_hosts: dict[str, int]
    timeline: list[float]
    largest: list[LargestShape]


class AuditShape(TypedDict):
    """The audit log, the oldest entry first.

    Attributes:
        entries: each has `what`; most have `time_s`, `user`, `uid`, `host`, `pid`, `command` and `job`.
    """

    entries: list[dict[str, Any]]


class DamagedShape(TypedDict):
    """A file that cannot be read."""

    file: str | None
    reason: str


class RestartedShape(TypedDict):
    """The processes that a recovery started for another user.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: whether gpurun started the user's waiter.
    """

    user: str
    adopted: list[str]
    waiter: bool


class RecoverShape(TypedDict):
    """What a recovery did.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: whether gpurun started this user's waiter, the process that starts queued jobs.
        others: the processes that root's recovery started for other users.
    """

    adopted: list[str]
    waiter: bool
    others: list[RestartedShape]
    damaged: list[DamagedShape]


class SettingShape(TypedDict):
    """A file or variable that commands use, and why commands use it."""

    name: str
    value: str
    why: str


class ConfigShape(TypedDict):
    """Files and variables that commands use."""

    settings: list[SettingShape]


class PythonShape(TypedDict):
    """The Python that runs gpurun."""

    version: str
    implementation: str


class VersionShape(TypedDict):
    """Versions.

    Attributes:
        packages: null: the package is not installed.
    """

    version: str
    python: PythonShape
    packages: dict[str, str | None]


# What ``--json`` prints about inventories.


class KnownHostShape(Host):
    """A host with its defaults and its state.

    Attributes:
        drain: the progress of the drain in words, during a drain.
        cordon: the host's cordon; null: the host is not cordoned.
        out: why the last check found the host broken; only if the host is out.
    """

    __optional_keys__ = frozenset({"drain", "out"})
    state: str
    drain: str
    out: Out
    cordon: Cordon | None


class InventoryListShape(TypedDict):
    """Hosts."""

    inventory: str
    hosts: list[KnownHostShape]


class GenerationShape(TypedDict):
    """The hosts of one GPU generation, as a host set."""

    hosts: str
    gpus: int


class InventoryShape(TypedDict):
    """A summary of the cluster. With HOSTS, the command prints the document of `gpurun inventory list`.

    Attributes:
        racks: the hosts of each rack, as a host set.
    """

    inventory: str
    hosts: int
    gpus: int
    generations: dict[str, GenerationShape]
    racks: dict[str, str]
    fabrics: dict[str, Fabric]
    pools: dict[str, Pool]
    ssh_config: str | None
    docker_host: str | None


class ValidateShape(TypedDict):
    """Problems in an inventory."""

    inventory: str
    valid: bool
    problems: list[Problem]


class ChangesShape(TypedDict):
    """Changes of an inventory, the newest last."""

    inventory: str
    changes: list[RecordedChange]


class CordonShape(TypedDict):
    """Hosts whose state changed.

    Attributes:
        hosts: the named hosts.
        changed: the named hosts that had another state before.
    """

    hosts: list[str]
    changed: list[str]
    state: str


class LeavingShape(TypedDict):
    """A job on a host that is drained.

    Attributes:
        fate: what the drain does to the job.
        why: for `waits` and `ends`: why the job does not move.
        until_s: for `waits`: when gpurun stops the job; null: never.
    """

    job: str
    hosts: list[str]
    fate: Fate
    why: str
    until_s: float | None


class DrainShape(TypedDict):
    """A drain.

    Attributes:
        state: `draining` or `drained`.
    """

    hosts: list[str]
    changed: list[str]
    state: str
    jobs: list[LeavingShape]


class KeyShape(TypedDict):
    """A host key.

    Attributes:
        known: fingerprints in known_hosts, if they differ.
    """

    type: str
    fingerprint: str
    state: KeyState
    known: list[str]


class TrustedHostShape(TypedDict):
    """The keys of one host.

    Attributes:
        name: the host's name in known_hosts.
        state: `known`, `new`, `changed`, `revoked` or `unreachable`.
    """

    host: str
    name: str
    known_hosts: str
    state: str
    keys: list[KeyShape]


class TrustShape(TypedDict):
    """Host keys."""

    hosts: list[TrustedHostShape]
    keys_written: int

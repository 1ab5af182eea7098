"""What ``--json`` prints about jobs."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from gpurun.jobs.record import Origin, OutputsLeft, Restart, StartFailure, State
from gpurun.jobs.spec import JobSpec, Placement
from gpurun.launch.container import HostShare
from gpurun.launch.fabric import Setting
from gpurun.scaling.choice import SmallerGang
from gpurun.scheduler.explain import Change, Explanation, Occupant, PoolUse
from gpurun.scheduler.explain import State as Decision
from gpurun.scheduler.model import HostGroup
from gpurun.state.hosts import Out
from gpurun.studies.campaign_plan import RefusedSize
from gpurun.views.picture import WaitingJob


class GrantShape(TypedDict):
    """GPUs that a job holds on one host.

    Attributes:
        gpus: indices, as NVML numbers them.
    """

    host: str
    gpus: list[int]


class FirstFailureShape(TypedDict):
    """The first failure.

    Attributes:
        rank: the first rank that failed; null if no rank did.
        exit_code: that rank's exit code; 128 + n for signal n.
        excerpt: the last lines that the rank printed.
        kind: the class of the cause, such as `rank`, `host-lost`, `oom`, `hang` or `disk-full`.
        evidence: a host's report, verbatim.
    """

    reason: str
    rank: int | None
    host: str | None
    exit_code: int | None
    excerpt: list[str]
    kind: str
    evidence: str


class WholeShape(TypedDict):
    """The last whole copy of a job's outputs. A restarted job gets this copy.

    Attributes:
        at_s: when gpurun found the outputs at rest; seconds since 1970.
        step: the last step that the program reported as saved; null if the program reported no step.
        path: the folder with the copy. You may read the copy's files, but not change the files.
    """

    at_s: float
    step: int | None
    path: str


class _JobAlways(TypedDict):
    id: str
    name: str
    state: State
    gpus: int
    hosts: list[str]
    pool: str | None
    priority: int
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    reason: str
    owner: str
    attempt: int
    restarts: int
    grants: list[GrantShape]
    restart: Restart | None
    outputs_left: OutputsLeft | None
    first_failure: FirstFailureShape | None


class JobShape(_JobAlways, total=False):
    """A job. Times are seconds since 1970.

    Attributes:
        hosts: the hosts that the job holds now.
        pool: the job's pool; null: no pool.
        started_s: when RUNNING began; null before.
        exit_code: the exit code of the first rank that failed, or 0.
        reason: why the job is in this state; empty: no reason.
        owner: the user who submitted the job.
        attempt: how often gpurun has started the job.
        restarts: how often gpurun restarted the job after a host's fault.
        restart: when gpurun starts the job again; null if no restart is planned.
        outputs_left: outputs that are not on the head; null if all are.
        whole: the last whole copy of the job's outputs; null if there is none. Only `status JOB` prints this key.
        beside: files on the head that ranks wrote beside their code. Only `status JOB` prints this key.
        warnings: likely problems of the job's last attempt. Only `status JOB` prints this key.
    """

    whole: WholeShape | None
    beside: list[str]
    warnings: list[str]


class ForeignShape(TypedDict):
    """GPUs that another gpurun, or a process that no gpurun job started, holds on a host.

    Attributes:
        process: the process with its user and pid; empty: a job holds the GPUs.
    """

    gpus: list[int]
    job: str
    user: str
    head: str
    process: str


class _HostAlways(TypedDict):
    host: str
    rack: str
    generation: str
    gpus: int
    free: int
    state: str
    seen_s: float | None


class HostShape(_HostAlways, total=False):
    """A host and its free GPUs.

    Attributes:
        free: GPUs that no job holds; 0 while the host is out.
        state: `ok`, `cordoned`, `draining`, `drained`, `lost`, `out`, or `unknown` while a lease is damaged.
        seen_s: when this user's processes last checked the host; seconds since 1970; null: never.
        drain: the progress of the drain in words, during a drain.
        out: why the last check found the host broken; only if the host is out.
        foreign: GPUs that another gpurun or a process holds there; only if there are any.
    """

    drain: str
    out: Out
    foreign: list[ForeignShape]


class StatusShape(TypedDict):
    """Hosts and jobs. With a JOB, `hosts` is empty."""

    hosts: list[HostShape]
    jobs: list[JobShape]


class JobsShape(TypedDict):
    """The jobs that were named, in the order of the arguments."""

    jobs: list[JobShape]


class SubmittedShape(TypedDict):
    """The submitted job. With `--follow`, the document shows the job after its end."""

    job: JobShape


class PlacedHostShape(TypedDict):
    """One host of a plan, in rank order."""

    host: str
    rack: str
    gpus: list[int]


class PlacedShape(TypedDict):
    """Where a job would run."""

    generation: str
    racks: list[str]
    hosts: list[PlacedHostShape]


class EnvironmentShape(TypedDict):
    """The packages on top of the image.

    Attributes:
        built: whether the image with the packages exists already.
    """

    image: str
    base: str
    base_id: str
    key: str
    built: bool
    requirements: list[str]
    index: str | None


class RecipeProblemShape(TypedDict):
    """A problem of a recipe.

    Attributes:
        line, column: counted from 1; 1 and 1: values of the recipe contradict each other.
        value: the text in the file, if the problem is about one value.
        allowed: the values that you may write instead; empty: gpurun knows no closed list of values.
    """

    file: str
    line: int
    column: int
    message: str
    value: str | None
    allowed: list[str]


class RecipeCheckShape(TypedDict):
    """The problems of a recipe.

    Attributes:
        missing: keys that the command line must give.
    """

    recipe: str
    valid: bool
    problems: list[RecipeProblemShape]
    missing: list[str]


class _PlanAlways(TypedDict):
    job: JobSpec
    placement: PlacedShape | None
    containers: dict[str, list[str]]
    launch: list[str]
    ranks: dict[str, list[dict[str, str]]]
    said: list[str]


class PlanShape(_PlanAlways, total=False):
    """The plan of `gpurun submit`, of one trial of `gpurun sweep run`, or of the largest run of `gpurun scale run`.

    Attributes:
        job: the frozen job: every setting, defaults included.
        placement: where the job would run; null: the job would wait.
        containers: the argv of `docker run` for each host.
        launch: the argv of the launcher, or of each rank.
        ranks: for each host, the environment of each rank, if gpurun itself starts the ranks.
        said: how gpurun read the command: which flags gpurun replaces, keeps and leaves out.
        settings: for each host, fabric settings with their reasons; only with a placement.
        shares: for each host, the memory and cores that the job may use; only with a placement.
        wait: why the job would wait; only without a placement.
        environment: only if the recipe has `python`.
        image_problem: why `submit` would refuse the job: the head does not have the image, or has no Docker.
        trials: the number of trials; only for `gpurun sweep run`.
        runs: the number of runs; only for `gpurun scale run`.
        refused: the sizes that cannot run; only for `gpurun scale run`.
    """

    settings: dict[str, list[Setting]]
    shares: dict[str, HostShare]
    wait: Explanation
    environment: EnvironmentShape
    image_problem: str
    trials: int
    runs: int
    refused: list[RefusedSize]


class _WhyAlways(TypedDict):
    job: str
    state: State | Decision
    message: str


class WhyShape(_WhyAlways, total=False):
    """Why a job waits. If the scheduler does not consider the job, only `job`, `state` and `message` are present.

    Attributes:
        state: the job's state; for a waiting job, the decision: `starts`, `waits`, `never`.
        reason: why the job's last attempt ended; only if the job had an attempt.
        position: 1: first in the queue; null: the job has no place in the queue.
        ahead: ids of the jobs before this job.
        behind: the job or pool that keeps this job waiting.
        groups: hosts, grouped by what keeps the job off them.
        holders: the jobs that hold GPUs which this job could use, the soonest to end first.
        expected_start_s: seconds since 1970; null: unknown.
        changes: changes that would start the job now.
        smaller_gang: a smaller job that would start now, if that is known.
        out: by host: why the last check found it broken, for hosts that the job could use otherwise.
        start_failures: why hosts could not start the job, the newest failure of each; only if there are any.
    """

    reason: str
    gang: str
    gpus: int
    position: int | None
    ahead: list[str]
    behind: str | None
    placement: Placement | None
    groups: list[HostGroup]
    holders: list[Occupant]
    pool: PoolUse | None
    expected_start_s: float | None
    unknown_because: str
    changes: list[Change]
    smaller_gang: SmallerGang | None
    out: dict[str, Out]
    start_failures: list[StartFailure]


class QueueShape(TypedDict):
    """Waiting jobs in the order in which they would start."""

    queue: list[WaitingJob]


class LogLineShape(TypedDict):
    """One line of a log. The command prints one such object a line.

    Attributes:
        time: when gpurun read the line: UTC, as RFC 3339 writes it.
        rank: null: the launcher printed it.
        stream: `stdout` or `stderr`.
    """

    time: str
    rank: int | None
    stream: Literal["stdout", "stderr"]
    text: str


class EventShape(TypedDict):
    """One event of a job. The command prints one such object a line.

    Attributes:
        time_s: seconds since 1970; null: the event's time is damaged.
        kind: `state`, `placement`, `host`, `note`, `notify`, or what goes to hosts: `ship`, `stage`, `workdir`.
        text: the event in one line, for people.
        details: what this kind of event says, such as `host`, `state`, `reason` or `attempt`.
    """

    time_s: float | None
    kind: str
    text: str
    details: dict[str, Any]


class LeftShape(TypedDict):
    """Outputs that are not on the head."""

    count: int
    first: list[str]
    hosts: list[str]


class OutputsShape(TypedDict):
    """A job's outputs on the head.

    Attributes:
        path: null: there are none.
        left: null: all outputs are on the head.
    """

    job: str
    path: str | None
    files: int
    bytes: int
    left: LeftShape | None


class ShowShape(TypedDict):
    """A job's inputs and results.

    Attributes:
        inputs: settings that differ from their defaults, by path, such as `constraints.locality`.
        metrics: the last value of each metric.
        code_files: files and folders of the workdir; null: the job has none.
        placements: the hosts and GPUs of each attempt.
    """

    job: JobShape
    inputs: dict[str, Any]
    origin: Origin
    metrics: dict[str, float]
    code_files: int | None
    placements: list[str]


class DiffShape(TypedDict):
    """How two jobs differ.

    Attributes:
        differs: by setting: the value in the first job and in the second.
        files: files of the workdir that differ.
    """

    differs: dict[str, list[Any]]
    files: list[str]


class SizesShape(TypedDict):
    """Bytes on the head's disk."""

    outputs: int
    logs: int
    other: int
    total: int


class DiskRowShape(TypedDict):
    """The disk space of one job on the head.

    Attributes:
        state: the job's state, `left over` or `damaged`.
        unread: folders that you may not read.
    """

    id: str
    name: str
    owner: str
    state: str
    ended_s: float | None
    files: int
    bytes: SizesShape
    unread: list[str]


class DiskShape(TypedDict):
    """The disk space of jobs on the head, the largest first."""

    jobs: list[DiskRowShape]
    total: SizesShape
    files: int
    disk_free_bytes: int | None


class PrunedJobShape(TypedDict):
    """A job that was removed."""

    id: str
    owner: str
    bytes: int


class PruneShape(TypedDict):
    """What was removed.

    Attributes:
        skipped: jobs that match but stay, with the reason.
        failed: jobs that could not be removed, with the error.
        left_bytes: bytes that are left, with `--keep-below`; else null.
    """

    dry_run: bool
    jobs: list[PrunedJobShape]
    bytes: int
    skipped: dict[str, str]
    failed: dict[str, str]
    left_bytes: int | None

"""Every key of a recipe: its type, examples, what it means, and its flag. `gpurun.jobs.recipe_values` reads it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from gpurun.documents.convert import Kind, keys_of, short_for
from gpurun.documents.convert import json_schema as of_type
from gpurun.jobs.recipe_values import (
    MAX_GPUS,
    Command,
    Data,
    DataName,
    Duration,
    EnvName,
    Gpus,
    HostOrLabel,
    Image,
    JobName,
    KeyFlag,
    Knob,
    Mount,
    Name,
    Notify,
    OutputsPath,
    Pause,
    PoolName,
    ProjectName,
    SecretName,
    Size,
    Text,
    WholeSeconds,
    means,
    settings_of,
)
from gpurun.jobs.spec import (
    MOST_GPUS,
    MOST_RETRIES,
    Constraints,
    Controller,
    HorovodKnobs,
    JobSpec,
    Locality,
    Retry,
    RetryOn,
)

WHAT, WHERE, FAILS, FILES = "What to run", "Where and when the job runs", "When the job fails", "Files"
SWEEPS = "What to try"
GROUPS = (SWEEPS, WHAT, WHERE, FAILS, FILES)
"""The groups of options in the help."""
HOST_SET = "HOSTS is a host set, such as @rack:r1 or 'gpu-[01-04]'"
NO_CAMPAIGN = ("submit", "sweep run")


class ConstraintKeys(TypedDict, total=False):
    """The keys of a recipe's constraints."""

    generation: Annotated[
        tuple[Name, ...],
        means(
            "use only GPUs of these generations, such as `pascal`; a job never mixes generations",
            "pascal",
            "[pascal, volta]",
            flag=KeyFlag(WHERE, "GENERATION", complete="generations"),
        ),
    ]
    gpu_model: Annotated[
        Text,
        means(
            "use only GPUs that have this model name in the inventory",
            "Tesla-P100",
            flag=KeyFlag(WHERE, "MODEL", complete="gpu_models"),
        ),
    ]
    min_gpu_memory: Annotated[
        Size, means("use only GPUs with at least this much memory", "16GiB", flag=KeyFlag(WHERE, "SIZE"))
    ]
    gpus_per_host: Annotated[
        int,
        Meta(ge=1, le=MOST_GPUS),
        means("use exactly this many GPUs on each host", "4", flag=KeyFlag(WHERE, "NUMBER")),
    ]
    locality: Annotated[
        Locality,
        means("keep all ranks on one `host` or in one `rack`; `any` allows all hosts", "rack", flag=KeyFlag(WHERE)),
    ]
    prefer: Annotated[
        Locality,
        means(
            "wait for free GPUs on one `host` or in one `rack`; after `locality_wait`, accept GPUs on any hosts",
            "rack",
            flag=KeyFlag(WHERE),
        ),
    ]
    locality_wait: Annotated[
        Duration,
        means("how long the job waits for the host or rack that `prefer` asks for", "10m", flag=KeyFlag(WHERE, "TIME")),
    ]
    hosts: Annotated[
        tuple[Name, ...],
        means(
            "run the job only on these hosts",
            "[gpu-r1-01, gpu-r1-02]",
            flag=KeyFlag(WHERE, "HOSTS", ("--host",), complete="hosts", more=HOST_SET),
        ),
    ]
    avoid: Annotated[
        tuple[Name, ...],
        means(
            "do not run the job on these hosts",
            "[gpu-r1-07]",
            flag=KeyFlag(WHERE, "HOSTS", complete="hosts", more=HOST_SET),
        ),
    ]
    nvlink: Annotated[
        bool, means("on each host, use only GPUs that NVLink connects to each other", "true", flag=KeyFlag(WHERE))
    ]


class HorovodKeys(TypedDict, total=False):
    """The keys of a recipe's horovod section: flags of horovodrun."""

    fusion_threshold_mb: Annotated[Knob, means("size of the buffer in which Horovod joins tensors, in MB", "64")]
    cycle_time_ms: Annotated[
        float,
        Meta(ge=0, title="a number of 0 or more"),
        means("time between two of Horovod's rounds of communication, in ms", "1"),
    ]
    cache_capacity: Annotated[Knob, means("number of tensors whose negotiation Horovod remembers", "1024")]
    hierarchical_allreduce: Annotated[bool, means("let Horovod reduce tensors within each host first", "true")]
    hierarchical_allgather: Annotated[bool, means("let Horovod gather tensors within each host first", "true")]
    torus_allreduce: Annotated[
        bool, means("let Horovod reduce tensors within each host, then between hosts (a torus)", "true")
    ]
    autotune: Annotated[
        bool,
        means(
            "let Horovod search for fast settings; the job's next attempt uses the settings that Horovod found", "true"
        ),
    ]
    timeline: Annotated[
        bool, means("write a timeline of Horovod's operations to `horovod-timeline.json` in the outputs", "true")
    ]
    stall_check_warning: Annotated[WholeSeconds, means("warn about a rank that is missing for this long", "60s")]
    stall_check_shutdown: Annotated[WholeSeconds, means("end the job if a rank is missing for this long", "10m")]
    thread_affinity: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=4096)], ...],
        means("the CPU core for the background thread of each rank on a host", "[0, 8]"),
    ]
    num_nccl_streams: Annotated[Knob, means("number of NCCL streams", "2")]
    gloo_timeout: Annotated[
        WholeSeconds, means("how long Gloo waits for other ranks; for elastic jobs, gpurun's default is 1m", "5m")
    ]
    start_timeout: Annotated[WholeSeconds, means("how long the start of all ranks may take", "120s")]


class RoleKeys(TypedDict, total=False):
    """The keys of a recipe's roles."""

    ps: Annotated[
        int,
        Meta(ge=0, le=MAX_GPUS),
        means(
            "number of parameter servers, which use no GPU. Without `ps_hosts`, the number is at most the number of "
            "workers",
            "2",
        ),
    ]
    ps_hosts: Annotated[
        tuple[HostOrLabel, ...],
        means(
            "run the parameter servers on hosts with these names or labels; the inventory gives these hosts `gpus: 0`",
            "[cpu-01, cpu-02]",
            "[role=ps]",
        ),
    ]
    workers: Annotated[Gpus, means("number of workers, which must equal `gpus`; you may leave out `workers`", "8")]
    chief: Annotated[
        bool,
        means(
            "whether an extra rank coordinates the others. Default: `true` with parameter servers and without `flags`",
            "false",
        ),
    ]
    evaluator: Annotated[
        bool,
        means(
            "start one more rank, without a GPU, to evaluate checkpoints",
            "true",
        ),
    ]
    flags: Annotated[
        bool, means("append `--ps_hosts --worker_hosts --job_name --task_index` to each rank's command", "true")
    ]


def _swept(value: str = "", *, more: str = "") -> KeyFlag:
    return KeyFlag(SWEEPS, value, more=more, only=("sweep run",), why="only a sweep tries parameters")


Seed = Annotated[int, Meta(ge=0, le=1 << 31)]


class SweepKeys(TypedDict, total=False):
    """The keys of a recipe's sweep. What stands in them is read as on the command line (`studies.sweep_plan`)."""

    grid: Annotated[
        dict[Text, tuple[Text, ...]],
        means(
            "a list of values for each parameter of the sweep",
            "{lr: [0.1, 0.01], optimizer: [adam, sgd]}",
            more="Without `random` and `tpe`, gpurun tries every combination of the values",
            flag=_swept("NAME=A,B", more="Without --random and --tpe, gpurun tries every combination of the values"),
        ),
    ]
    space: Annotated[
        dict[Text, Text],
        means(
            "a range of values for each parameter, for `random` and `tpe`",
            '{lr: "log:1e-5..1e-1", layers: 2..8}',
            flag="give NAME=RANGE as arguments of `gpurun sweep run`",
        ),
    ]
    random: Annotated[Gpus, means("try this many random combinations of parameters", "50", flag=_swept("NUMBER"))]
    tpe: Annotated[
        Gpus,
        means(
            "try this many combinations of parameters, each chosen near the best results so far",
            "50",
            flag=_swept("NUMBER"),
        ),
    ]
    metric: Annotated[
        Text,
        means(
            "the metric that trials report, and whether the highest value (`max`) or the lowest value (`min`) is best",
            "accuracy:max",
            flag=_swept("NAME:max|min"),
        ),
    ]
    stop: Annotated[
        Text,
        means(
            "the rule by which gpurun stops weak trials early",
            "asha:min=1,factor=3",
            flag=_swept("RULE", more="Example: asha:min=1,factor=3"),
        ),
    ]
    max_parallel: Annotated[Gpus, means("run at most this many trials at a time", "8", flag=_swept("NUMBER"))]
    seed: Annotated[Seed, means("seed of the random choice of parameters", "7", flag=_swept("NUMBER"))]
    as_flags: Annotated[bool, means("append each parameter to the command, such as `--lr=0.1`", "true", flag=_swept())]


class PythonKeys(TypedDict, total=False):
    """The keys of a recipe's python: packages on top of the image (`gpurun.content.inside`)."""

    requirements: Annotated[Text, means("a requirements file for pip", "requirements.txt")]
    lock: Annotated[
        Text,
        means("a lock file of uv; to read the file, the head needs `pip install 'gpurun[lock]'`", "uv.lock"),
    ]
    project: Annotated[
        Text,
        means(
            "a folder with a `pyproject.toml`; gpurun installs the project's `dependencies`, but not the project "
            "itself",
            ".",
        ),
    ]
    index: Annotated[
        Text,
        means(
            "the only package index, given as a folder of wheels or as a URL. Default: the indexes of your own pip",
            "./wheels",
        ),
    ]
    secret: Annotated[
        Text,
        means(
            "a netrc file with the password of the package index; only the build of the image reads the file", "netrc"
        ),
    ]


class RetryKeys(TypedDict, total=False):
    """The keys of a recipe's retry section. The flags of all but `times` begin with ``--retry-``."""

    times: Annotated[
        int,
        Meta(ge=0, le=MOST_RETRIES),
        means("how often gpurun retries the job at most", "3", flag="`--retry` gives this number"),
    ]
    on: Annotated[
        tuple[RetryOn, ...],
        Meta(min_length=1),
        means(
            "retry the job after these ends: its program failed (`failure`), gpurun stopped it because it hung "
            "(`hang`), or its `time_limit` ended it",
            "[failure, hang, time_limit]",
            default="failure and hang",
            flag=KeyFlag(FAILS, "failure|hang|time_limit", ("--retry-on",)),
        ),
    ]
    only_with_progress: Annotated[
        bool,
        means(
            "stop retrying after two failures in a row without progress, or after a time limit without progress",
            "false",
            default="true",
            more="Progress is a further step that the program reports, or a new checkpoint: one that the program "
            "reports, or a new or changed file of the outputs that is no log",
            flag=KeyFlag(FAILS, "", ("--retry-only-progress",)),
        ),
    ]
    wait: Annotated[
        Pause,
        means(
            "wait this long before each retry, without GPUs",
            "30s",
            default="3s, doubled with each retry up to 5m",
            flag=KeyFlag(FAILS, "TIME", ("--retry-wait",)),
        ),
    ]


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe."""

    name: Annotated[
        JobName,
        means(
            "the name of the job or of the sweep",
            "resnet-a",
            flag=KeyFlag(
                WHAT,
                "NAME",
                only=NO_CAMPAIGN,
                why="In `gpurun scale`, `--name` names the campaign",
            ),
        ),
    ]
    image: Annotated[
        Image,
        means(
            "a Docker image on the head, the machine that runs gpurun; gpurun copies missing layers to each host",
            "gpurun/train:tf2.15",
            flag=KeyFlag(WHAT, "IMAGE", complete="images"),
        ),
    ]
    python: Annotated[
        PythonKeys,
        means(
            "install Python packages on top of the image",
            "{requirements: requirements.txt}",
            flag=KeyFlag(
                WHAT, "FILE", ("--requirements",), complete="files", more="FILE is a requirements file for pip"
            ),
        ),
    ]
    gpus: Annotated[
        Gpus,
        means(
            "number of GPUs; gpurun starts one rank for each GPU, or one rank for each host with `one_per_host`",
            "8",
            flag=KeyFlag(
                WHAT,
                "GPUS",
                ("-n", "--gpus"),
                only=NO_CAMPAIGN,
                why="In `gpurun scale`, `--gpus` lists all numbers of GPUs to measure",
                more="auto:80% is the largest number of GPUs with at least 80 % efficiency, from measurements of "
                "`gpurun scale`",
            ),
        ),
    ]
    min_gpus: Annotated[
        Gpus,
        means(
            "make the job elastic: the job runs with at least this many GPUs, and with more GPUs while no other job "
            "waits",
            "4",
            flag=KeyFlag(WHAT, "GPUS", only=NO_CAMPAIGN, why="`gpurun scale` has no flag `--min-gpus`"),
        ),
    ]
    command: Annotated[
        Command,
        means(
            "the command of every rank: a list of arguments, or a text that gpurun splits as a shell does",
            "[python3, train.py]",
            flag="give the command after --",
        ),
    ]
    workdir: Annotated[
        Text,
        means(
            "copy this folder when you submit the job; every rank finds the copy at `/workspace`",
            ".",
            more="gpurun does not copy files that `.gitignore` excludes. New files at `/workspace` become outputs in "
            "the folder `@workspace`",
            flag=KeyFlag(FILES, "FOLDER", complete="folders"),
        ),
    ]
    workdir_read_only: Annotated[
        bool, means("make the copy at `/workspace` read-only for ranks", "true", flag=KeyFlag(FILES))
    ]
    workdir_limit: Annotated[
        Size,
        means(
            "the largest total size of files at `/workspace` that ranks wrote and that gpurun copies to the head",
            "50GiB",
            default="10GiB",
            more="A restarted job does not find files beyond the limit",
            flag=KeyFlag(FILES, "SIZE"),
        ),
    ]
    outputs: Annotated[
        OutputsPath,
        means(
            "a folder in the container; gpurun copies the folder to the head, and restores the folder after a restart",
            "/checkpoints",
            more="`$GPURUN_OUTPUTS` is the folder's path. Each host has its own folder. If hosts write different "
            "files with the same name, the head keeps the file of the first host in rank order as `NAME`, and the "
            "other files as `NAME.HOST`. gpurun restores the folder on all hosts, or with `horovod` only on rank 0's "
            "host. Because a host may fail during a save, write each checkpoint under another name "
            "and then rename the file, or call `gpurun_runtime.checkpointed(step)` after each save",
            flag=KeyFlag(FILES, "PATH"),
        ),
    ]
    outputs_every: Annotated[
        Duration,
        means(
            "how often gpurun copies new outputs to the head",
            "60s",
            more="If a host fails, its outputs since the last complete copy are lost",
            flag=KeyFlag(FILES, "TIME"),
        ),
    ]
    outputs_limit: Annotated[
        Size,
        means(
            "the largest size of the job's outputs on the head; outputs beyond this size stay on the hosts",
            "200GiB",
            flag=KeyFlag(FILES, "SIZE"),
        ),
    ]
    log_limit: Annotated[
        Size,
        means(
            "the largest size of the job's log on the head, at least 64MiB; of a longer log, gpurun keeps the "
            "beginning and the end",
            "10GiB",
            default="2GiB",
            flag=KeyFlag(FILES, "SIZE"),
        ),
    ]
    env: Annotated[
        dict[EnvName, Text],
        means(
            "environment variables of every rank",
            '{LR: "0.1"}',
            more="gpurun and launchers add variables, such as `GPURUN_RANK` and `WORLD_SIZE`. Do not put secrets into "
            "`env`: all Docker users of a host can read the variables. With `horovodrun`, all users of a host can "
            "read the variables",
            flag=KeyFlag(WHAT, "NAME=VALUE", ("-e", "--env"), more="Do not give secrets with --env; use --secret"),
        ),
    ]
    secrets: Annotated[
        dict[SecretName, Text],
        means(
            "secret files that every rank can read at `/run/secrets/NAME`; gpurun never writes secrets to command "
            "lines or logs",
            "{token: token.txt}",
            flag=KeyFlag(FILES, "NAME=FILE", ("--secret",), complete="files"),
        ),
    ]
    data: Annotated[
        dict[DataName, Data],
        means(
            "data sets that ranks read at `/data/NAME`; a source is a folder on the head, a folder on each host "
            "(`host:/path`), or a folder in a job's outputs (`JOB:outputs/path`)",
            "{fashion: host:/nfs/fashion}",
            flag=KeyFlag(FILES, "NAME=SOURCE", complete="data_sources"),
        ),
    ]
    mounts: Annotated[
        tuple[Mount, ...],
        means(
            "mount folders of the hosts into the container, read-only (`ro`) or writable (`rw`)",
            '["/data:/data:ro"]',
            flag=KeyFlag(FILES, "FOLDER:PATH[:rw]", ("--mount",)),
        ),
    ]
    launcher: Annotated[
        Name,
        means(
            "the launcher that starts the ranks: `horovod`, `mpirun`, `torchrun`, `deepspeed`, `jax`, `tensorflow`, "
            "`srun` or `tasks`",
            "torchrun",
            default="gpurun finds the launcher in the command or in the program",
            flag=KeyFlag(
                WHAT,
                "LAUNCHER",
                complete="launchers",
                only=NO_CAMPAIGN,
                why="In `gpurun scale`, `--launcher` lists all launchers to compare",
            ),
        ),
    ]
    one_per_host: Annotated[
        bool,
        means(
            "start one rank for each host instead of one rank for each GPU; each rank uses all of the job's GPUs on "
            "its host",
            "true",
            more="Set `one_per_host` for a program that itself uses several GPUs or starts a launcher",
            flag=KeyFlag(WHAT),
        ),
    ]
    controller: Annotated[
        Controller, means("how horovodrun starts ranks: with Gloo or with MPI", "gloo", flag=KeyFlag(WHAT))
    ]
    pool: Annotated[
        PoolName,
        means(
            "charge the job's GPUs to this pool, a team's share of the cluster",
            "research",
            flag=KeyFlag(WHERE, "POOL", complete="pools"),
        ),
    ]
    project: Annotated[
        ProjectName,
        means(
            "count the job under this name in `gpurun report`",
            "cats",
            flag=KeyFlag(WHERE, "PROJECT", complete="projects"),
        ),
    ]
    notify: Annotated[
        tuple[Notify, ...],
        means(
            "notify this target when the job starts, ends, fails, is preempted or is idle",
            '["end=mail:me@example.com"]',
            flag=KeyFlag(
                FAILS,
                "TARGET",
                more="TARGET is mail:ADDRESS, slack:FILE, webhook:FILE or command:LINE. A prefix such as end=TARGET "
                "or failure=TARGET limits the notification to one event",
            ),
        ),
    ]
    priority: Annotated[
        int,
        Meta(ge=-1000, le=1000),
        means(
            "start the job before jobs of the same pool that have a lower priority",
            "10",
            flag=KeyFlag(WHERE, "NUMBER"),
        ),
    ]
    preemptible: Annotated[
        bool,
        means(
            "let the job borrow GPUs of other pools; gpurun preempts the job when those pools need their GPUs",
            "true",
            flag=KeyFlag(WHERE),
        ),
    ]
    time_limit: Annotated[
        Duration,
        means(
            "stop the job after this time in the state RUNNING",
            "12h",
            more="If jobs have time limits, gpurun can start waiting jobs earlier",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000),
        means(
            "how many times gpurun restarts the job after a fault of a host",
            "3",
            more="`retry` counts failures of the program itself",
            flag=KeyFlag(FAILS, "NUMBER"),
        ),
    ]
    retry: Annotated[
        RetryKeys,
        short_for("times"),
        means(
            "how many times gpurun starts the job again, with its outputs, after its program fails or hangs",
            "3",
            "{times: 3, on: [failure, time_limit], wait: 30s}",
            more="A number is `times`. `max_restarts` counts faults of hosts",
            flag=KeyFlag(FAILS, "NUMBER"),
        ),
    ]
    sweep: Annotated[
        SweepKeys,
        means(
            "the parameters for `gpurun sweep`; `gpurun submit` ignores these parameters",
            "{grid: {lr: [0.1, 0.01]}}",
            flag="the keys of `sweep` are options of `gpurun sweep run`",
        ),
    ]
    rehearse: Annotated[
        Duration,
        means(
            "before the job, run the command with one rank on one GPU, for this long or until the rank reports a step",
            "60s",
            more="gpurun then discards the outputs of the rehearsal, and queues the job",
            flag=KeyFlag(FAILS, "TIME", only=NO_CAMPAIGN, why="`gpurun scale` has no flag `--rehearse`"),
        ),
    ]
    hang_timeout: Annotated[
        Duration,
        means(
            "stop the job if no rank prints, reports progress or writes outputs for this long",
            "30m",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    idle_timeout: Annotated[
        Duration,
        means(
            "notify the owner when all GPUs were less than 5 % busy for this long, then end or preempt the job",
            "2h",
            default="as the job's pool says",
            more="A job without a pool ends 10 minutes after the notification. The value must not exceed the pool's "
            "`idle_timeout`, unless the pool has `idle_longer`",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    grace: Annotated[
        Duration,
        means(
            "kill a rank this long after its SIGTERM, or this long after the job's other ranks have ended",
            "15s",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    memory: Annotated[
        Size,
        means(
            "memory of the job on each host, including `/dev/shm`",
            "64GiB",
            default="in proportion to the job's GPUs, such as 1/8 of the host's memory for 1 of 8 GPUs",
            more="If the host runs out of memory, the kernel first kills jobs that asked for more than the default",
            flag=KeyFlag(WHAT, "SIZE"),
        ),
    ]
    cpus: Annotated[
        float,
        Meta(ge=0.1, le=4096, title="a number of cores from 0.1 to 4096"),
        means(
            "number of CPU cores for the job on each host while other jobs run on that host",
            "12",
            default="in proportion to the job's GPUs, such as 1/8 of the host's cores for 1 of 8 GPUs",
            flag=KeyFlag(WHAT, "NUMBER"),
        ),
    ]
    shm_size: Annotated[
        Size,
        means(
            "size of `/dev/shm` in each container; `memory` includes this size",
            "8GiB",
            default="half of `memory`",
            flag=KeyFlag(WHAT, "SIZE"),
        ),
    ]
    constraints: Annotated[
        ConstraintKeys,
        means("where the job may run", "{locality: rack}", flag="each key of `constraints` has its own flag"),
    ]
    horovod: Annotated[
        HorovodKeys,
        means(
            "settings that gpurun passes to horovodrun",
            "{cycle_time_ms: 1}",
            flag="begin the command with horovodrun and its flags",
        ),
    ]
    roles: Annotated[
        RoleKeys,
        means(
            "the roles of the ranks, such as parameter servers, with the launcher `tensorflow`",
            "{ps: 2}",
            flag="set `roles` in a recipe",
        ),
    ]


RETRY_ = "retry_"
"""The settings of a retry begin so, because `on` and `wait` alone say nothing on a command line."""
_OF_RETRY = {
    RETRY_ + key: replace(each, key=RETRY_ + key)
    for key, each in settings_of(RetryKeys).items()
    if each.flag is not None
}
SETTINGS = {
    name: each
    for key, setting in settings_of(ConstraintKeys, RecipeKeys, SweepKeys).items()
    for name, each in {key: setting, **(_OF_RETRY if key == "retry" else {})}.items()
}
"""Each setting of a job, and of a sweep, by its key."""
FIELDS, CONSTRAINTS, HOROVOD = keys_of(RecipeKeys), keys_of(ConstraintKeys), keys_of(HorovodKeys)
ROLES, SWEEP, PYTHON, RETRY = keys_of(RoleKeys), keys_of(SweepKeys), keys_of(PythonKeys), keys_of(RetryKeys)
_SPEC_FIELDS = {field.name for kind in (JobSpec, Constraints, HorovodKnobs, Retry) for field in fields(kind)}
_WITH_UNIT = {key + unit for key in (*FIELDS, *CONSTRAINTS, *HOROVOD, *RETRY) for unit in ("_s", "_mib")} & _SPEC_FIELDS
FIELD_OF = {
    **{field.rpartition("_")[0]: field for field in _WITH_UNIT},
    "generation": "generations",
    "secrets": "secret_files",
}
"""The spec's field of a recipe's key, where their names differ: a field names its unit, a key's value does."""


# The JSON Schema of recipes, for editors that check while the user types. Pure.


_TEXT = ["string", "number", "boolean"]
"""YAML reads ``4`` and ``true`` as a number and a truth value; gpurun takes each as the text that it is."""


def recipe_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12. It describes single values; ``gpurun validate`` also checks how they agree."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpurun recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _described(kind) for key, kind in FIELDS.items()},
    }


def _described(kind: Kind) -> dict[str, Any]:
    about = {"description": kind.about} if kind.about else {}
    return {**_written(kind), **about, **({"examples": list(kind.examples)} if kind.examples else {})}


def _written(kind: Kind) -> dict[str, Any]:
    """Return the schema of what a person may write, as the converter of `gpurun.documents.convert` reads it."""
    if kind.own_schema:
        return dict(kind.own_schema)
    if kind.keys is not None:
        below = {key: _described(each) for key, each in kind.keys.items()}
        whole = {"type": ["object", "null"], "additionalProperties": False, "properties": below}
        return {"anyOf": [_written(kind.keys[kind.short]), whole]} if kind.short else whole
    if kind.key is not None and kind.item is not None:
        return {"type": ["object", "null"], "additionalProperties": _written(kind.item)}
    if kind.item is not None:
        one = {"type": _TEXT} if kind.spelled else _written(kind.item)
        return {"anyOf": [{"type": "array", "items": _written(kind.item)}, one, {"type": "null"}]}
    return _text(kind)


def _text(kind: Kind) -> dict[str, Any]:
    if kind.spelled:
        return {"type": [*_TEXT, "null"] if kind.null_is_text else _TEXT}
    if kind.options:
        return {"enum": [True, False] if kind.options == ("true", "false") else list(kind.options)}
    made = of_type(kind)
    return {**made, "type": _TEXT} if made.get("type") == "string" else made

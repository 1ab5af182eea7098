"""Every key of a recipe: its type, an example and what it means. The reader and docs/recipes.md are made from this."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, TypedDict

from msgspec import Meta

from gpurun.documents.convert import keys_of
from gpurun.jobs.mounted import Data, DataName, Mount, OutputsPath
from gpurun.jobs.recipe_values import (
    MAX_GPUS,
    Command,
    Duration,
    EnvName,
    Gpus,
    HostOrLabel,
    Image,
    JobName,
    Knob,
    Name,
    Notify,
    PoolName,
    ProjectName,
    SecretName,
    Size,
    Text,
    TimeLimit,
    WholeSeconds,
)
from gpurun.jobs.spec import MOST_GPUS, Constraints, Controller, HorovodKnobs, JobSpec, Locality


def means(meaning: str, *examples: str) -> Meta:
    """What a key means, and values of it as people write them."""
    return Meta(description=meaning, examples=list(examples))


class ConstraintKeys(TypedDict, total=False):
    """The keys of a recipe's constraints."""

    generation: Annotated[
        tuple[Name, ...], means("allowed GPU generations; a gang never mixes them", "pascal", "[pascal, volta]")
    ]
    gpu_model: Annotated[Text, means("only this model, as the inventory writes it", "Tesla-P100")]
    min_gpu_memory: Annotated[Size, means("memory that each GPU has at least", "16GiB")]
    gpus_per_host: Annotated[int, Meta(ge=1, le=MOST_GPUS), means("exactly this many GPUs on each host", "4")]
    locality: Annotated[Locality, means("keep the gang on one `host` or in one `rack`; `any`: no limit", "rack")]
    prefer: Annotated[Locality, means("wait up to `locality_wait` for this locality, then accept any", "rack")]
    locality_wait: Annotated[Duration, means("see `prefer`", "10m")]
    hosts: Annotated[tuple[Name, ...], means("only these hosts", "[gpu-r1-01, gpu-r1-02]")]
    avoid: Annotated[tuple[Name, ...], means("not these hosts", "[gpu-r1-07]")]
    nvlink: Annotated[bool, means("on each host, only GPUs that one NVLink island connects", "true")]


class HorovodKeys(TypedDict, total=False):
    """The keys of a recipe's horovod section: flags of horovodrun."""

    fusion_threshold_mb: Annotated[Knob, means("size of the buffer in which Horovod joins tensors, in MB", "64")]
    cycle_time_ms: Annotated[
        float,
        Meta(ge=0, title="a number that is not negative"),
        means("time between two rounds of communication, in ms", "1"),
    ]
    cache_capacity: Annotated[Knob, means("number of tensors whose negotiation Horovod remembers", "1024")]
    hierarchical_allreduce: Annotated[bool, means("reduce within each host first", "true")]
    hierarchical_allgather: Annotated[bool, means("gather within each host first", "true")]
    torus_allreduce: Annotated[bool, means("reduce in a torus: within each host, then between hosts", "true")]
    autotune: Annotated[
        bool, means("let Horovod search for good settings; the next attempt uses what it found", "true")
    ]
    timeline: Annotated[
        bool, means("write what Horovod does, and when, to `horovod-timeline.json` in the outputs", "true")
    ]
    stall_check_warning: Annotated[WholeSeconds, means("warn about a rank that is missing for this long", "60s")]
    stall_check_shutdown: Annotated[WholeSeconds, means("end the job if a rank is missing for this long", "10m")]
    thread_affinity: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=4096)], ...],
        means("the core of each local rank's background thread", "[0, 8]"),
    ]
    num_nccl_streams: Annotated[Knob, means("number of NCCL streams", "2")]
    gloo_timeout: Annotated[
        WholeSeconds, means("how long Gloo waits for other ranks; gpurun sets 1m for elastic jobs", "5m")
    ]
    start_timeout: Annotated[WholeSeconds, means("how long all ranks may take to start", "120s")]


class RoleKeys(TypedDict, total=False):
    """The keys of a recipe's roles."""

    ps: Annotated[
        int,
        Meta(ge=0, le=MAX_GPUS),
        means(
            "number of parameter servers; they have no GPU. At most as many as workers, unless `ps_hosts` says where "
            "they run",
            "2",
        ),
    ]
    ps_hosts: Annotated[
        tuple[HostOrLabel, ...],
        means(
            "run the servers on these hosts, given by name or label; in the inventory these hosts have `gpus: 0`",
            "[cpu-01, cpu-02]",
            "[role=ps]",
        ),
    ]
    workers: Annotated[
        Gpus,
        means("number of workers. Each worker has one GPU, so this must equal `gpus`; you can leave it out", "8"),
    ]
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
            "start one more rank without a GPU to evaluate checkpoints; it runs on the host that has the outputs",
            "true",
        ),
    ]
    flags: Annotated[
        bool, means("append `--ps_hosts --worker_hosts --job_name --task_index` to each rank's command", "true")
    ]


class SweepKeys(TypedDict, total=False):
    """The keys of a recipe's sweep. What stands in them is read as on the command line (`gpurun.sweeps`)."""

    grid: Annotated[
        dict[Text, tuple[Text, ...]],
        means(
            "lists of values. Without `random` and `tpe`, gpurun tries each combination",
            "{lr: [0.1, 0.01], optimizer: [adam, sgd]}",
        ),
    ]
    space: Annotated[dict[Text, Text], means("ranges for `random` and `tpe`", '{lr: "log:1e-5..1e-1", layers: 2..8}')]
    random: Annotated[Gpus, means("try this many random points", "50")]
    tpe: Annotated[Gpus, means("try this many points, chosen near the best so far", "50")]
    metric: Annotated[
        Text, means("the metric that trials report, and whether `max` or `min` is better", "accuracy:max")
    ]
    stop: Annotated[Text, means("how gpurun stops weak trials early", "asha:min=1,factor=3")]
    max_parallel: Annotated[Gpus, means("run at most this many trials at a time", "8")]
    seed: Annotated[Knob, means("seed of the random points", "7")]
    as_flags: Annotated[bool, means("append parameters to the command, as `--lr=0.1`", "true")]


class PythonKeys(TypedDict, total=False):
    """The keys of a recipe's python: packages on top of the image (`gpurun.environments`)."""

    requirements: Annotated[Text, means("a requirements file, as pip reads it", "requirements.txt")]
    lock: Annotated[
        Text,
        means("the packages and hashes that uv has locked; needs `pip install 'gpurun[lock]'` on the head", "uv.lock"),
    ]
    project: Annotated[
        Text,
        means("the `dependencies` of the `pyproject.toml` in this folder; not its code, which `workdir` sends", "."),
    ]
    index: Annotated[
        Text,
        means(
            "the only index: a folder of wheels, or a URL. Without it, gpurun asks the indexes that your own pip asks",
            "./wheels",
        ),
    ]
    secret: Annotated[Text, means("a netrc file with the index's password; only the build reads it", "netrc")]


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe."""

    name: Annotated[JobName, means("name of the job", "resnet-a")]
    image: Annotated[
        Image,
        means("a Docker image on the head; gpurun sends each host the layers it lacks", "gpurun/train:tf2.15"),
    ]
    python: Annotated[PythonKeys, means("Python packages on top of the image", "{requirements: requirements.txt}")]
    gpus: Annotated[Gpus, means("how many GPUs; each has a rank, unless `one_per_host` says otherwise", "8")]
    min_gpus: Annotated[
        Gpus,
        means(
            "elastic: start and continue with at least this many GPUs; grow back while no job waits for them. With "
            "Horovod, the other ranks continue, by its elastic API. With other launchers, gpurun stops the gang and "
            "starts it again from its checkpoint",
            "4",
        ),
    ]
    command: Annotated[
        Command,
        means("the argv of every rank, byte for byte; gpurun splits a text as a shell does", "[python3, train.py]"),
    ]
    workdir: Annotated[
        Text,
        means(
            "gpurun copies this folder at submit. Every rank has the copy at `/workspace`. What ranks write there is "
            "treated as outputs are, below `@workspace`; the copy of your code never changes. gpurun leaves out what "
            "`.gitignore` excludes",
            ".",
        ),
    ]
    workdir_read_only: Annotated[bool, means("no rank can write into the folder of its code", "true")]
    workdir_limit: Annotated[
        Size,
        means(
            "how much gpurun copies to the head of what ranks write at `/workspace`. Default: 10GiB. A restart begins "
            "without the rest, and gpurun says so while the job runs. gpurun copies no `__pycache__`",
            "50GiB",
        ),
    ]
    outputs: Annotated[
        OutputsPath,
        means(
            "a folder in the container that survives restarts (`$GPURUN_OUTPUTS`). Each host has its own, and every "
            "rank may write to it. gpurun copies all of them to the head. If files of one name differ, the first host "
            "in rank order has the name, and the others' are kept as `NAME.HOST`. The next attempt gets the folder "
            "back: on all hosts, with `horovod` on rank 0's; each host gets its own version of such files, and a new "
            "host the first one's. Write a checkpoint beside its name and rename it, or call "
            "`gpurun_runtime.checkpointed(step)` after each save: a host may fail in the middle of a save. gpurun does "
            "not copy pipes, sockets and devices, and names them",
            "/checkpoints",
        ),
    ]
    outputs_every: Annotated[
        Duration,
        means(
            "how often gpurun copies new outputs to the head. If a host fails, outputs since the last whole copy are "
            "lost",
            "60s",
        ),
    ]
    outputs_limit: Annotated[
        Size, means("how much gpurun copies to the head at most; the rest stays on its hosts", "200GiB")
    ]
    log_limit: Annotated[
        Size,
        means(
            "how large the job's log gets on the head, at least 64MiB; its beginning and its end are kept. "
            "Default: 2GiB",
            "10GiB",
        ),
    ]
    env: Annotated[
        dict[EnvName, Text],
        means(
            "environment of every rank. gpurun sets the names that begin with `GPURUN_`; you may set "
            "`GPURUN_PARAMETERS` only. Launchers set `RANK`, `WORLD_SIZE` and their like. Not for secrets: `docker "
            "inspect` shows it to everybody who may use Docker on a host, and `horovodrun` to every user there. So "
            "`submit` warns about names like `HF_TOKEN`",
            '{LR: "0.1"}',
        ),
    ]
    secrets: Annotated[
        dict[SecretName, Text],
        means(
            "files that every rank can read at `/run/secrets/NAME`; gpurun writes them into no argv and no log",
            "{token: token.txt}",
        ),
    ]
    data: Annotated[
        dict[DataName, Data],
        means(
            "data sets as `/data/NAME`, read-only: a folder of the head, `host:/path` or `JOB:outputs/path`",
            "{fashion: host:/nfs/fashion}",
        ),
    ]
    mounts: Annotated[
        tuple[Mount, ...], means("folders of the hosts in the container, `ro` or `rw`", '["/data:/data:ro"]')
    ]
    launcher: Annotated[
        Name,
        means(
            "what starts the ranks: `horovod`, `mpirun`, `torchrun`, `deepspeed`, `jax`, `tensorflow`, `srun` or "
            "`tasks`. Default: the launcher in the command, or what the program uses",
            "torchrun",
        ),
    ]
    one_per_host: Annotated[
        bool,
        means(
            "start one process on each host, which sees all of the job's GPUs there, instead of one for each GPU: for "
            "a program that uses several GPUs itself, or calls a launcher itself",
            "true",
        ),
    ]
    controller: Annotated[Controller, means("how horovodrun starts ranks", "gloo")]
    pool: Annotated[PoolName, means("charge the job to this pool", "research")]
    project: Annotated[ProjectName, means("`gpurun report` counts the job under this name", "cats")]
    notify: Annotated[
        tuple[Notify, ...],
        means("whom gpurun notifies when the job starts, ends, fails or is preempted", '["end=mail:me@example.com"]'),
    ]
    priority: Annotated[
        int,
        Meta(ge=-1000, le=1000),
        means("jobs with a higher number start earlier, among jobs within their pools' entitlement", "10"),
    ]
    preemptible: Annotated[
        bool, means("the job may borrow GPUs of other pools; gpurun preempts it when they need the GPUs", "true")
    ]
    time_limit: Annotated[
        TimeLimit,
        means(
            "gpurun stops the job after this long in RUNNING. With known limits, gpurun can start other jobs earlier",
            "12h",
        ),
    ]
    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000),
        means("how often gpurun restarts the job after a host's fault. If the program itself fails, the job ends", "3"),
    ]
    sweep: Annotated[
        SweepKeys,
        means("the parameters for `gpurun sweep`; `gpurun submit` ignores them", "{grid: {lr: [0.1, 0.01]}}"),
    ]
    rehearse: Annotated[
        Duration,
        means(
            "gpurun first runs the command with one rank on one GPU, for this long or until it reports a step. So a "
            "typo costs one GPU for a minute. gpurun discards the outputs of this rehearsal, then queues the gang",
            "60s",
        ),
    ]
    hang_timeout: Annotated[
        Duration,
        means("gpurun stops the job if no rank prints, reports progress or uses its GPU for this long", "30m"),
    ]
    grace: Annotated[
        Duration,
        means("time between SIGTERM and SIGKILL, for each rank; also after other ranks have ended", "15s"),
    ]
    memory: Annotated[
        Size,
        means(
            "memory of the job on each host, with its `/dev/shm`. Default: the share of its GPUs, such as 1/8 for one "
            "of eight. If you ask for more than that and the host runs out of memory, this job is killed first",
            "64GiB",
        ),
    ]
    cpus: Annotated[
        float,
        Meta(ge=0.1, le=4096, title="a number of cores from 0.1 to 4096"),
        means("cores of the job on each host while other jobs run there. Default: the share of its GPUs", "12"),
    ]
    shm_size: Annotated[Size, means("`/dev/shm` of each container, part of its `memory`. Default: half of it", "8GiB")]
    constraints: Annotated[ConstraintKeys, means("where the job may run", "{locality: rack}")]
    horovod: Annotated[HorovodKeys, means("horovodrun's own settings", "{cycle_time_ms: 1}")]
    roles: Annotated[RoleKeys, means("what ranks do with the launcher `tensorflow`", "{ps: 2}")]


FIELDS, CONSTRAINTS, HOROVOD = keys_of(RecipeKeys), keys_of(ConstraintKeys), keys_of(HorovodKeys)
ROLES, SWEEP, PYTHON = keys_of(RoleKeys), keys_of(SweepKeys), keys_of(PythonKeys)
_SPEC_FIELDS = {field.name for kind in (JobSpec, Constraints, HorovodKnobs) for field in fields(kind)}
_WITH_UNIT = {key + unit for key in (*FIELDS, *CONSTRAINTS, *HOROVOD) for unit in ("_s", "_mib")} & _SPEC_FIELDS
FIELD_OF = {
    **{field.rpartition("_")[0]: field for field in _WITH_UNIT},
    "generation": "generations",
    "secrets": "secret_files",
}
"""The spec's field of a recipe's key, where their names differ: a field names its unit, a key's value does."""

"""Every key of a recipe: its type, examples, what it means, and its flag. `gpurun.jobs.settings` says what reads it."""

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
    WholeSeconds,
)
from gpurun.jobs.settings import KeyFlag, means, settings_of
from gpurun.jobs.spec import MOST_GPUS, Constraints, Controller, HorovodKnobs, JobSpec, Locality

WHAT, WHERE, FAILS, FILES = "What to run", "Where and when it runs", "When it fails", "Files"
SWEEPS = "What to try"
GROUPS = (SWEEPS, WHAT, WHERE, FAILS, FILES)
"""The groups of options in the help."""
HOST_SET = "HOSTS is a host set, such as @rack:r1 or 'gpu-[01-04]'"
NO_CAMPAIGN = ("submit", "sweep run")
ONE_SIZE = "`gpurun scale` does not have this flag"


class ConstraintKeys(TypedDict, total=False):
    """The keys of a recipe's constraints."""

    generation: Annotated[
        tuple[Name, ...],
        means(
            "allowed GPU generations; a gang never mixes them",
            "pascal",
            "[pascal, volta]",
            flag=KeyFlag(WHERE, "GENERATION", complete="generations"),
        ),
    ]
    gpu_model: Annotated[
        Text,
        means(
            "use only GPUs of this model, as named in the inventory",
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
        means("keep the gang on one `host` or in one `rack`; `any` sets no limit", "rack", flag=KeyFlag(WHERE)),
    ]
    prefer: Annotated[
        Locality,
        means(
            "wait up to `locality_wait` for one `host` or one `rack`, then accept any hosts",
            "rack",
            flag=KeyFlag(WHERE),
        ),
    ]
    locality_wait: Annotated[
        Duration, means("how long to wait for the locality that `prefer` names", "10m", flag=KeyFlag(WHERE, "TIME"))
    ]
    hosts: Annotated[
        tuple[Name, ...],
        means(
            "use only these hosts",
            "[gpu-r1-01, gpu-r1-02]",
            flag=KeyFlag(WHERE, "HOSTS", ("--host",), complete="hosts", more=HOST_SET),
        ),
    ]
    avoid: Annotated[
        tuple[Name, ...],
        means("do not use these hosts", "[gpu-r1-07]", flag=KeyFlag(WHERE, "HOSTS", complete="hosts", more=HOST_SET)),
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
        WholeSeconds, means("how long Gloo waits for other ranks; gpurun sets 1m for elastic jobs", "5m")
    ]
    start_timeout: Annotated[WholeSeconds, means("how long all ranks may take to start", "120s")]


class RoleKeys(TypedDict, total=False):
    """The keys of a recipe's roles."""

    ps: Annotated[
        int,
        Meta(ge=0, le=MAX_GPUS),
        means(
            "number of parameter servers, which use no GPU. Without `ps_hosts`, at most the number of workers",
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
    workers: Annotated[Gpus, means("number of workers; it must equal `gpus`, and may be left out", "8")]
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
    """The keys of a recipe's sweep. What stands in them is read as on the command line (`gpurun.sweeps`)."""

    grid: Annotated[
        dict[Text, tuple[Text, ...]],
        means(
            "a list of values for each parameter",
            "{lr: [0.1, 0.01], optimizer: [adam, sgd]}",
            more="Without `random` and `tpe`, gpurun tries each combination",
            flag=_swept("NAME=A,B", more="Without --random and --tpe, gpurun tries each combination"),
        ),
    ]
    space: Annotated[
        dict[Text, Text],
        means(
            "a range for each parameter, with `random` and `tpe`",
            '{lr: "log:1e-5..1e-1", layers: 2..8}',
            flag="give NAME=RANGE as words of the command",
        ),
    ]
    random: Annotated[Gpus, means("try this many random combinations", "50", flag=_swept("NUMBER"))]
    tpe: Annotated[
        Gpus, means("try this many combinations, chosen near the best results so far", "50", flag=_swept("NUMBER"))
    ]
    metric: Annotated[
        Text,
        means(
            "the metric that trials report, and whether `max` or `min` is better",
            "accuracy:max",
            flag=_swept("NAME:max|min"),
        ),
    ]
    stop: Annotated[
        Text,
        means(
            "how gpurun stops weak trials early",
            "asha:min=1,factor=3",
            flag=_swept("RULE", more="Example: asha:min=1,factor=3"),
        ),
    ]
    max_parallel: Annotated[Gpus, means("run at most this many trials at a time", "8", flag=_swept("NUMBER"))]
    seed: Annotated[Seed, means("seed for random combinations", "7", flag=_swept("NUMBER"))]
    as_flags: Annotated[bool, means("append parameters to the command, as `--lr=0.1`", "true", flag=_swept())]


class PythonKeys(TypedDict, total=False):
    """The keys of a recipe's python: packages on top of the image (`gpurun.environments`)."""

    requirements: Annotated[Text, means("a requirements file for pip", "requirements.txt")]
    lock: Annotated[
        Text,
        means("a lock file of uv; to read the file, the head needs `pip install 'gpurun[lock]'`", "uv.lock"),
    ]
    project: Annotated[
        Text,
        means("a folder: install the `dependencies` in its `pyproject.toml`, but not the project itself", "."),
    ]
    index: Annotated[
        Text,
        means(
            "the only package index: a folder of wheels, or a URL. Default: the indexes of your own pip",
            "./wheels",
        ),
    ]
    secret: Annotated[Text, means("a netrc file with the index's password; only the build reads it", "netrc")]


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe."""

    name: Annotated[
        JobName,
        means(
            "name of the job, or of the sweep",
            "resnet-a",
            flag=KeyFlag(
                WHAT,
                "NAME",
                only=NO_CAMPAIGN,
                why="`--name` of `gpurun scale` names the campaign",
            ),
        ),
    ]
    image: Annotated[
        Image,
        means(
            "a Docker image on the head; gpurun sends each host the layers it lacks",
            "gpurun/train:tf2.15",
            flag=KeyFlag(WHAT, "IMAGE", complete="images"),
        ),
    ]
    python: Annotated[
        PythonKeys,
        means(
            "Python packages on top of the image",
            "{requirements: requirements.txt}",
            flag=KeyFlag(
                WHAT, "FILE", ("--requirements",), complete="files", more="FILE is a requirements file for pip"
            ),
        ),
    ]
    gpus: Annotated[
        Gpus,
        means(
            "number of GPUs; gpurun starts one rank for each GPU, unless you set `one_per_host`",
            "8",
            flag=KeyFlag(
                WHAT,
                "GPUS",
                ("-n", "--gpus"),
                only=NO_CAMPAIGN,
                why="`--gpus` of `gpurun scale` lists all sizes to run",
                more="auto:80% takes the largest number with at least 80 % efficiency in `gpurun scale`",
            ),
        ),
    ]
    min_gpus: Annotated[
        Gpus,
        means(
            "make the job elastic: run with at least this many GPUs, and with more while no other job waits",
            "4",
            flag=KeyFlag(WHAT, "GPUS", only=NO_CAMPAIGN, why=ONE_SIZE),
        ),
    ]
    command: Annotated[
        Command,
        means(
            "the command of every rank: a list of arguments, or a text that gpurun splits as a shell does",
            "[python3, train.py]",
            flag="the words after --",
        ),
    ]
    workdir: Annotated[
        Text,
        means(
            "copy this folder at submit; every rank has the copy at `/workspace`",
            ".",
            more="gpurun does not copy files that `.gitignore` excludes. New files at `/workspace` become outputs, "
            "below `@workspace`",
            flag=KeyFlag(FILES, "FOLDER", complete="folders"),
        ),
    ]
    workdir_read_only: Annotated[
        bool, means("make the copy at `/workspace` read-only for ranks", "true", flag=KeyFlag(FILES))
    ]
    workdir_limit: Annotated[
        Size,
        means(
            "copy the files that ranks write at `/workspace` to the head, up to this total size",
            "50GiB",
            default="10GiB",
            more="A restarted job does not find files beyond this limit",
            flag=KeyFlag(FILES, "SIZE"),
        ),
    ]
    outputs: Annotated[
        OutputsPath,
        means(
            "a folder in the container that survives restarts and that gpurun copies to the head",
            "/checkpoints",
            more="`$GPURUN_OUTPUTS` is the folder's path. Each host has its own folder. If hosts write different files "
            "with the same name, the head keeps the file of the first host, in rank order, and the other files as "
            "`NAME.HOST`. The next attempt gets the folder back: on all hosts, or with `horovod` on rank 0's host. "
            "A host may fail during a save: write each checkpoint under another name and then rename the file, or call "
            "`gpurun_runtime.checkpointed(step)` after each save",
            flag=KeyFlag(FILES, "PATH"),
        ),
    ]
    outputs_every: Annotated[
        Duration,
        means(
            "how often gpurun copies new outputs to the head",
            "60s",
            more="If a host fails, the outputs since the last complete copy are lost",
            flag=KeyFlag(FILES, "TIME"),
        ),
    ]
    outputs_limit: Annotated[
        Size,
        means(
            "largest size of the outputs on the head; the rest stays on the hosts",
            "200GiB",
            flag=KeyFlag(FILES, "SIZE"),
        ),
    ]
    log_limit: Annotated[
        Size,
        means(
            "largest size of the job's log on the head, 64MiB or more; gpurun keeps the beginning and the end",
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
            more="gpurun and launchers add variables, such as `GPURUN_RANK` and `WORLD_SIZE`. Not for secrets: all "
            "users of Docker on a host can read the variables; with `horovodrun`, all users of the host can",
            flag=KeyFlag(WHAT, "NAME=VALUE", ("-e", "--env"), more="Not for secrets"),
        ),
    ]
    secrets: Annotated[
        dict[SecretName, Text],
        means(
            "files that every rank can read at `/run/secrets/NAME`; gpurun never writes them to command lines or logs",
            "{token: token.txt}",
            flag=KeyFlag(FILES, "NAME=FILE", ("--secret",), complete="files"),
        ),
    ]
    data: Annotated[
        dict[DataName, Data],
        means(
            "data sets that ranks read at `/data/NAME`: a folder on the head, on each host (`host:/path`), or in a "
            "job's outputs (`JOB:outputs/path`)",
            "{fashion: host:/nfs/fashion}",
            flag=KeyFlag(FILES, "NAME=SOURCE", complete="data_sources"),
        ),
    ]
    mounts: Annotated[
        tuple[Mount, ...],
        means(
            "mount folders of the hosts into the container, `ro` or `rw`",
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
            default="the launcher that the command or the program names",
            flag=KeyFlag(
                WHAT,
                "LAUNCHER",
                complete="launchers",
                only=NO_CAMPAIGN,
                why="`--launcher` of `gpurun scale` lists all launchers to compare",
            ),
        ),
    ]
    one_per_host: Annotated[
        bool,
        means(
            "start one process on each host, for all of the job's GPUs there, instead of one process for each GPU",
            "true",
            more="For a program that itself uses several GPUs or starts a launcher",
            flag=KeyFlag(WHAT),
        ),
    ]
    controller: Annotated[Controller, means("how horovodrun starts ranks", "gloo", flag=KeyFlag(WHAT))]
    pool: Annotated[
        PoolName, means("charge the job to this pool", "research", flag=KeyFlag(WHERE, "POOL", complete="pools"))
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
            "notify this target when the job starts, ends, fails or is preempted",
            '["end=mail:me@example.com"]',
            flag=KeyFlag(
                FAILS,
                "TARGET",
                more="TARGET is mail:ADDRESS, slack:FILE, webhook:FILE or command:LINE; "
                "end=TARGET or failure=TARGET notifies only at this event",
            ),
        ),
    ]
    priority: Annotated[
        int,
        Meta(ge=-1000, le=1000),
        means(
            "start the job before jobs with a lower number; the entitlements of pools count first",
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
            more="gpurun can start other jobs earlier if jobs have limits",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000),
        means(
            "how often gpurun restarts the job after a host's fault",
            "3",
            more="If the program itself fails, the job ends",
            flag=KeyFlag(FAILS, "NUMBER"),
        ),
    ]
    sweep: Annotated[
        SweepKeys,
        means(
            "the parameters for `gpurun sweep`; `gpurun submit` ignores them",
            "{grid: {lr: [0.1, 0.01]}}",
            flag="the keys of `sweep` are options of `gpurun sweep run`",
        ),
    ]
    rehearse: Annotated[
        Duration,
        means(
            "first run the command with one rank on one GPU, for this long or until the rank reports a step",
            "60s",
            more="gpurun then discards the outputs of this run, and queues the job",
            flag=KeyFlag(FAILS, "TIME", only=NO_CAMPAIGN, why=ONE_SIZE),
        ),
    ]
    hang_timeout: Annotated[
        Duration,
        means(
            "stop the job if no rank prints, reports progress or uses its GPU for this long",
            "30m",
            flag=KeyFlag(FAILS, "TIME"),
        ),
    ]
    grace: Annotated[
        Duration,
        means(
            "kill a rank this long after SIGTERM, or after the other ranks have ended",
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
            more="If the host runs out of memory, the kernel first kills a job that asked for more than this",
            flag=KeyFlag(WHAT, "SIZE"),
        ),
    ]
    cpus: Annotated[
        float,
        Meta(ge=0.1, le=4096, title="a number of cores from 0.1 to 4096"),
        means(
            "CPU cores of the job on each host while other jobs run on the host",
            "12",
            default="in proportion to the job's GPUs, such as 1/8 of the host's cores for 1 of 8 GPUs",
            flag=KeyFlag(WHAT, "NUMBER"),
        ),
    ]
    shm_size: Annotated[
        Size,
        means(
            "size of `/dev/shm` in each container, a part of `memory`",
            "8GiB",
            default="half of `memory`",
            flag=KeyFlag(WHAT, "SIZE"),
        ),
    ]
    constraints: Annotated[
        ConstraintKeys, means("where the job may run", "{locality: rack}", flag="each key of `constraints` has a flag")
    ]
    horovod: Annotated[
        HorovodKeys,
        means(
            "horovodrun's own settings",
            "{cycle_time_ms: 1}",
            flag="begin the command with horovodrun and its flags",
        ),
    ]
    roles: Annotated[
        RoleKeys,
        means("what ranks do with the launcher `tensorflow`", "{ps: 2}", flag="set `roles` in a recipe"),
    ]


SETTINGS = settings_of(ConstraintKeys, RecipeKeys, SweepKeys)
"""Each setting of a job, and of a sweep, by its key."""
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

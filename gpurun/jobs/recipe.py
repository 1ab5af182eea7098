"""Recipes: a YAML file (or a folder with a ``recipe.yaml``) and the flags of ``submit`` become a JobSpec.

Every value is checked where it is written; all that is wrong is said at once, with line and column.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from gpurun.documents.convert import convert, keys_of, mapping, written
from gpurun.documents.nodes import ProblemReport, compose
from gpurun.errors import BadInput
from gpurun.inventory.load import read as read_bytes
from gpurun.jobs.environment import environment_of
from gpurun.jobs.mounted import Data, DataName, Mount, OutputsPath, check_data, mode_of, sources_below
from gpurun.jobs.notify_files import check_notify, notify_below
from gpurun.jobs.notify_wish import NotifyWish, notify_wish
from gpurun.jobs.spec import MOST_GPUS, Constraints, Controller, HorovodKnobs, JobSpec, Locality, Roles

RECIPE_FILE = "recipe.yaml"
MAX_GPUS = 1_000_000
MAX_BYTES = 1 << 20
MAX_COMMAND_BYTES, MOST_QUOTED_BYTES = 64 << 10, 96 << 10
RANK_NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
"""What launchers tell a rank its number by, besides gpurun's own variables."""
MAX_CHARS = 40
"""Longer, no time or size is meant; patterns are not tried on it."""
MAX_TIME_S = 10 * 365 * 86400.0
MAX_SIZE_MIB = 1 << 40
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)\s*d)?\s*(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*m(?:in)?)?"
                      r"\s*(?:(\d+(?:\.\d+)?)\s*s?)?")  # fmt: skip
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB|M|G|T|m|g)")
_MIB = {"m": 1, "mib": 1, "g": 1024, "gib": 1024, "t": 1024 * 1024, "tib": 1024 * 1024}

_OPERATOR = re.compile(r"""&&?|\|[|&]?|[^\\'"]*;|[0-9]*(>>?|<<?<?)(&[0-9-])?""")


def duration_s(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``1h30m`` or ``2d`` in seconds, above 0, at most ten years. Raises ValueError."""
    found = DURATION.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if not found or not any(found.groups()):
        raise ValueError
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise ValueError("is not more than 0")
    if total > MAX_TIME_S:
        raise ValueError("is more than 3650d")
    return total


def size_mib(text: str) -> int:
    """``512MiB``, ``16GiB`` or ``80G`` in MiB. Raises ValueError."""
    found = SIZE.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if not found:
        raise ValueError
    mib = float(found[1]) * _MIB[found[2].lower()]
    if mib > MAX_SIZE_MIB:
        raise ValueError(f"is more than {MAX_SIZE_MIB >> 20}TiB")
    return int(mib)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character")
    return text


def _words(line: str) -> list[str]:
    """One line as a shell splits words; no shell ever runs it.

    Raises:
        ValueError: it cannot be split, or has an operator that only a shell carries out.
    """
    try:
        words, quoted = shlex.split(_without_nul(line)), shlex.split(line, posix=False)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}") from error
    if operator := next((word for word in quoted if _OPERATOR.fullmatch(word)), None):
        raise ValueError(f"has {operator}, which only a shell carries out; write [bash, -c, 'FIRST {operator} SECOND']")
    return words


def _limit_s(text: str) -> float:
    """`duration_s` of a text with a unit: Slurm's limits without one are minutes. Raises ValueError."""
    limit_s = duration_s(text)
    if text.strip().replace(".", "", 1).isdigit():
        raise ValueError(f"has no unit; write {text.strip()}s, {text.strip()}m or {text.strip()}h")
    return limit_s


_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z"
Name = Annotated[str, Meta(pattern=_NAME_PATTERN, title="a name (letters, digits, '.', '_', '-')")]
HostOrLabel = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}(=[^\x00-\x1f\x7f]{1,200})?\Z",
        title="a host's name, or a label as name=value",
    ),
]
JobName = Annotated[
    str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z", title="1 to 200 characters without control characters")
]
Image = Annotated[  # docker's reference grammar, loosely: never a flag, never white space
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,254}\Z", title="a Docker image reference such as gpurun/train:tf2.15"
    ),
]
PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a pool's name")]
ProjectName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a project's name")]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", title="a variable's name")]
SecretName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a file name")]
Text = Annotated[str, written(_without_nul, "a text", null=True)]
Command = Annotated[tuple[Text, ...], Meta(min_length=1), written(_words, "a command that names a program")]
Notify = Annotated[NotifyWish, written(notify_wish, "a target such as mail:alice@example.com or failure=slack:FILE")]
Duration = Annotated[float, written(duration_s, "a time such as 90s, 15m, 1h30m or 2d")]
WholeSeconds = Annotated[int, written(lambda text: round(duration_s(text)), "a time such as 90s, 15m, 1h30m or 2d")]
Size = Annotated[int, written(size_mib, "a size such as 512MiB or 16GiB")]
Gpus = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
TimeLimit = Annotated[float, written(_limit_s, "a time such as 15m, 1h30m or 2d")]
Knob = Annotated[int, Meta(ge=0, le=1_000_000)]


class ConstraintKeys(TypedDict, total=False):
    """The keys of a recipe's constraints."""

    generation: tuple[Name, ...]
    gpu_model: Text
    min_gpu_memory: Size
    gpus_per_host: Annotated[int, Meta(ge=1, le=MOST_GPUS)]
    locality: Locality
    hosts: tuple[Name, ...]
    avoid: tuple[Name, ...]
    nvlink: bool
    prefer: Locality
    locality_wait: Duration


class HorovodKeys(TypedDict, total=False):
    """The keys of a recipe's horovod section."""

    fusion_threshold_mb: Knob
    cycle_time_ms: Annotated[float, Meta(ge=0, title="a number that is not negative")]
    cache_capacity: Knob
    hierarchical_allreduce: bool
    hierarchical_allgather: bool
    torus_allreduce: bool
    autotune: bool
    timeline: bool
    stall_check_warning: WholeSeconds
    stall_check_shutdown: WholeSeconds
    thread_affinity: tuple[Annotated[int, Meta(ge=0, le=4096)], ...]
    num_nccl_streams: Knob
    gloo_timeout: WholeSeconds
    start_timeout: WholeSeconds


class RoleKeys(TypedDict, total=False):
    """The keys of a recipe's roles."""

    ps: Annotated[int, Meta(ge=0, le=MAX_GPUS)]
    workers: Gpus
    chief: bool
    evaluator: bool
    flags: bool
    ps_hosts: tuple[HostOrLabel, ...]


class SweepKeys(TypedDict, total=False):
    """The keys of a recipe's sweep. What stands in them is read as on the command line (`gpurun.sweeps`)."""

    grid: dict[Text, tuple[Text, ...]]
    random: Gpus
    tpe: Gpus
    space: dict[Text, Text]
    metric: Text
    stop: Text
    max_parallel: Gpus
    seed: Knob
    as_flags: bool


class PythonKeys(TypedDict, total=False):
    """The keys of a recipe's python: packages on top of the image (`gpurun.environments`)."""

    requirements: Text
    lock: Text
    project: Text
    index: Text
    secret: Text


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe. docs/recipes.md says what each means."""

    name: JobName
    image: Image
    gpus: Gpus
    min_gpus: Gpus
    command: Command
    workdir: Text
    outputs: OutputsPath
    outputs_every: Duration
    outputs_limit: Size
    env: dict[EnvName, Text]
    secrets: dict[SecretName, Text]
    constraints: ConstraintKeys
    horovod: HorovodKeys
    launcher: Name
    roles: RoleKeys
    controller: Controller
    pool: PoolName
    project: ProjectName
    notify: tuple[Notify, ...]
    priority: Annotated[int, Meta(ge=-1000, le=1000)]
    preemptible: bool
    max_restarts: Annotated[int, Meta(ge=0, le=1000)]
    time_limit: TimeLimit
    hang_timeout: Duration
    rehearse: Duration
    grace: Duration
    shm_size: Size
    mounts: tuple[Mount, ...]
    data: dict[DataName, Data]
    sweep: SweepKeys
    python: PythonKeys


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


@dataclass(frozen=True)
class Recipe:
    """A recipe as read: JobSpec fields that were given, with nested constraints and knobs complete.

    Attributes:
        sweep: the keys of its sweep; what `gpurun submit` does not look at.
    """

    source: Path
    given: Mapping[str, Any]
    sweep: Mapping[str, Any] = field(default_factory=dict)


def read(path: Path) -> Recipe:
    """Read and check a recipe file, or the ``recipe.yaml`` of a folder.

    Raises:
        BadInput: there is none; or it is wrong, with every problem's line and column.
    """
    file = path / RECIPE_FILE if stat.S_ISDIR(mode_of(path)) else path
    data = read_bytes(file, "the recipe", most_bytes=MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the recipe is larger than {MAX_BYTES >> 20} MiB", where=str(file))
    report = ProblemReport(str(file))
    root = compose(data, str(file))
    if root is None:
        raise BadInput("the recipe is empty", where=str(file), hint="it needs image, gpus and command")
    given = _by_field(mapping(root, FIELDS, report, "the recipe"))
    report.raise_if_any()
    if "workdir" in given:
        given["workdir"] = str((file.parent / given["workdir"]).absolute())
    if "secret_files" in given:
        given["secret_files"] = {k: str((file.parent / v).absolute()) for k, v in given["secret_files"].items()}
    if "data" in given:
        given["data"] = sources_below(file.parent, given["data"])
    given |= notify_below(given, file.parent)
    if "constraints" in given:
        given["constraints"] = Constraints(**_by_field(given["constraints"]))
    if "horovod" in given:
        given["horovod"] = HorovodKnobs(**_by_field(given["horovod"]))
    if "roles" in given:
        given["roles"] = Roles(**given["roles"])
    if "python" in given:
        given["python"] = environment_of(given["python"], file.absolute().parent)
    sweep = given.pop("sweep", {})
    return Recipe(file, {"name": file.absolute().parent.name, **given}, sweep)


def _by_field(given: Mapping[str, Any]) -> dict[str, Any]:
    return {FIELD_OF.get(key, key): value for key, value in given.items()}


def convert_flag(flag: str, key: str, value: object) -> tuple[str, Any]:
    """A command-line flag by the same rule as the recipe key `key`: the spec's field and its value.

    Raises:
        BadInput: naming the flag.
    """
    converted = convert(value, {**FIELDS, **CONSTRAINTS}[key], flag)
    return FIELD_OF.get(key, key), environment_of(converted, Path.cwd()) if key == "python" else converted


def build(recipe: Recipe | None, overrides: Mapping[str, Any], constraints: Mapping[str, Any]) -> JobSpec:
    """Recipe and flags as one frozen spec; flags win. Variables and secrets are merged, everything else replaced.

    Args:
        overrides: JobSpec fields given as flags, already converted.
        constraints: Constraints fields given as flags.

    Raises:
        BadInput: something a job needs is missing, or two things contradict each other.
    """
    given = dict(recipe.given) if recipe else {}
    merged = {field: {**given.get(field, {}), **overrides.get(field, {})} for field in ("env", "secret_files", "data")}
    given |= {**overrides, **merged}
    given["data"] = sources_below(Path.cwd(), given["data"])
    given |= notify_below(given, Path.cwd())
    given["constraints"] = replace(given.get("constraints", Constraints()), **constraints)
    given.setdefault("name", given["command"][0].rsplit("/", 1)[-1] if "command" in given else "job")
    missing = [name for name in ("image", "gpus", "command") if name not in given]
    if missing:
        raise BadInput(
            f"the job has no {' and no '.join(missing)}", where=str(recipe.source) if recipe else None,
            hint="give them in a recipe, or: gpurun submit -n GPUS --image IMAGE -- COMMAND",
        )  # fmt: skip
    assert set(given) <= {field.name for field in fields(JobSpec)}
    spec = JobSpec(**given)
    _check(spec)
    return spec


def _check(spec: JobSpec) -> None:
    try:
        msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise BadInput(f"{error.object!r} is not UTF-8 text") from error
    if not spec.command[0] or spec.command[0].startswith("-"):
        raise BadInput(f"command: {spec.command[0]!r} is no program")
    _check_env(spec)
    check_length(spec)
    per_host = spec.constraints.gpus_per_host
    if per_host and spec.gpus % per_host:
        raise BadInput(f"{spec.gpus} GPUs cannot be split into hosts of exactly {per_host}")
    if spec.min_gpus and spec.min_gpus > spec.gpus:
        raise BadInput(f"min_gpus ({spec.min_gpus}) is more than gpus ({spec.gpus})")
    if spec.workdir is not None and not stat.S_ISDIR(mode_of(Path(spec.workdir))):
        raise BadInput("workdir is not a folder", where=spec.workdir)
    check_data(spec)
    check_notify(spec)
    for name, file in spec.secret_files.items():
        if not stat.S_ISREG(mode_of(Path(file))):
            raise BadInput(f"the secret {name!r} is not a file", where=file)
    if spec.python is not None and spec.python.secret and not stat.S_ISREG(mode_of(Path(spec.python.secret))):
        raise BadInput("python: the secret is not a file", where=spec.python.secret)


def _check_env(spec: JobSpec) -> None:
    """A rank that is told another job, folder or number than its own cannot say how it ends."""
    wrong = [name for name in spec.env if name in RANK_NUMBERS or name.startswith("GPURUN_")]
    if wrong := sorted({*wrong} - {"GPURUN_PARAMETERS"}):
        raise BadInput(f"env: gpurun itself sets {', '.join(wrong)}", hint="choose other names")


def check_length(spec: JobSpec) -> None:
    """Refuse what a launcher could not hand to a rank: it passes the command and the environment as one argument.

    Linux takes 128 KiB in one argument (execve(2), MAX_ARG_STRLEN). Launchers add words of their own, and Horovod
    quotes the whole a second time, so that each quote character takes five bytes. So a command may have half of the
    limit after the first quoting, and three quarters after the second.

    Raises:
        BadInput: says how long it may be.
    """
    joined = shlex.join([*(f"{name}={value}" for name, value in spec.env.items()), *spec.command])
    size, quoted = len(joined.encode()), len(shlex.quote(joined).encode())
    if size > MAX_COMMAND_BYTES or quoted > MOST_QUOTED_BYTES:
        raise BadInput(
            f"the command and its environment are {max(size, quoted)} bytes when quoted; at most {MAX_COMMAND_BYTES} "
            "reach the ranks",
            hint="put the long part into a file of the workdir or of the image",
        )

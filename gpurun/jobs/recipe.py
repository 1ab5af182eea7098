"""Recipes: a YAML file (or a folder with a ``recipe.yaml``) and the flags of ``submit`` become a JobSpec.

Every value is checked where it is written; all that is wrong is said at once, with line and column.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.errors import BadInput
from gpurun.inventory.document import Report, compose, entries
from gpurun.inventory.load import read as read_bytes
from gpurun.jobs.spec import Constraints, Controller, HorovodKnobs, JobSpec, Locality

RECIPE_FILE = "recipe.yaml"
MAX_GPUS = 1_000_000
MAX_BYTES = 1 << 20
MAX_CHARS = 40
"""Longer, no time or size is meant; patterns are not tried on it."""
MAX_TIME_S = 10 * 365 * 86400.0
MAX_SIZE_MIB = 1 << 40
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
# docker's reference grammar, loosely: never a flag, never white space.
IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,254}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)\s*d)?\s*(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*m(?:in)?)?"
                      r"\s*(?:(\d+(?:\.\d+)?)\s*s?)?")  # fmt: skip
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB|M|G|T|m|g)")
_MIB = {"m": 1, "mib": 1, "g": 1024, "gib": 1024, "t": 1024 * 1024, "tib": 1024 * 1024}


class Wrong(ValueError):
    """A value that cannot be; its text says what could."""


def whole(low: int, high: int) -> Callable[[Any], int]:
    """A converter for a whole number in low … high."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?\d{1,18}", str(value)):
            raise Wrong(f"must be a whole number from {low} to {high}")
        number = int(value)
        if not low <= number <= high:
            raise Wrong(f"must be a whole number from {low} to {high}")
        return number

    return convert


def number(value: Any) -> float:
    """A number that is not negative."""
    if len(str(value)) > MAX_CHARS or not re.fullmatch(r"\d+(\.\d+)?", str(value)):
        raise Wrong("must be a number that is not negative")
    return float(value)


def text(value: Any) -> str:
    """Any text without NUL."""
    if isinstance(value, list | dict):
        raise Wrong("must be text")
    if "\0" in str(value):
        raise Wrong("must not contain a NUL character")
    return str(value)


def matching(pattern: re.Pattern[str], what: str) -> Callable[[Any], str]:
    """A converter for text that `pattern` describes."""

    def convert(value: Any) -> str:
        if isinstance(value, list | dict) or not pattern.fullmatch(str(value)):
            raise Wrong(f"must be {what}")
        return str(value)

    return convert


def one_of(*allowed: str) -> Callable[[Any], str]:
    """A converter for one of a few words."""

    def convert(value: Any) -> str:
        if value not in allowed:
            raise Wrong(f"must be one of {', '.join(allowed)}")
        return str(value)

    return convert


def truth(value: Any) -> bool:
    """True or false."""
    if str(value).lower() not in ("true", "false"):
        raise Wrong("must be true or false")
    return str(value).lower() == "true"


def duration_s(value: Any) -> float:
    """``90``, ``90s``, ``15m``, ``1h30m`` or ``2d`` in seconds, more than 0 and at most ten years."""
    found = DURATION.fullmatch(str(value).strip()) if len(str(value)) <= MAX_CHARS else None
    if not found or not any(found.groups()):
        raise Wrong("must be a time such as 90s, 15m, 1h30m or 2d")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise Wrong("must be more than 0")
    if total > MAX_TIME_S:
        raise Wrong("must be at most 3650d")
    return total


def size_mib(value: Any) -> int:
    """``512MiB``, ``16GiB`` or ``80G`` in MiB."""
    found = SIZE.fullmatch(str(value).strip()) if len(str(value)) <= MAX_CHARS else None
    if not found:
        raise Wrong("must be a size such as 512MiB or 16GiB")
    mib = float(found[1]) * _MIB[found[2].lower()]
    if mib > MAX_SIZE_MIB:
        raise Wrong(f"must be at most {MAX_SIZE_MIB >> 20}TiB")
    return int(mib)


def container_path(value: Any) -> str:
    """An absolute path inside the container."""
    path = str(value)
    if not path.startswith("/") or "\0" in path or "\n" in path or ".." in path.split("/") or path.strip("/") == "":
        raise Wrong("must be an absolute path such as /checkpoints")
    return path


def list_of(item: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A converter for a list; one value alone is a list of one."""

    def convert(value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, list) else [value]
        return tuple(item(one) for one in values)

    return convert


def command(value: Any) -> tuple[str, ...]:
    """An argv: a list, or one line split as a shell splits words (never run by one)."""
    try:
        words = tuple(text(word) for word in value) if isinstance(value, list) else tuple(shlex.split(str(value)))
    except ValueError as error:
        raise Wrong(f"cannot be split into words: {error}") from error
    if not words or not words[0]:
        raise Wrong("must name a program")
    return words


def mapping(key: re.Pattern[str], what: str) -> Callable[[Any], dict[str, str]]:
    """A converter for a mapping of names to text."""

    def convert(value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise Wrong("must be a mapping (name: value)")
        for name in value:
            if not key.fullmatch(str(name)):
                raise Wrong(f"has the key {name!r}, which is not {what}")
        return {str(name): text(item) for name, item in value.items()}

    return convert


def mounts(value: Any) -> tuple[tuple[str, str, str], ...]:
    """``/host/path:/container/path[:ro|rw]``, read-only unless it says otherwise."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        source, _, rest = str(one).partition(":")
        target, _, mode = rest.partition(":")
        if mode not in ("", "ro", "rw"):
            raise Wrong("must look like /host/path:/container/path:ro")
        found.append((container_path(source), container_path(target), mode or "ro"))
    return tuple(found)


_NAMES = list_of(matching(re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"), "a name"))

CONSTRAINTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "generation": ("generations", _NAMES),
    "gpu_model": ("gpu_model", text),
    "min_gpu_memory": ("min_gpu_memory_mib", size_mib),
    "gpus_per_host": ("gpus_per_host", whole(1, 1024)),
    "locality": ("locality", one_of(*get_args(Locality))),
    "hosts": ("hosts", _NAMES),
    "avoid": ("avoid", _NAMES),
    "nvlink": ("nvlink", truth),
    "prefer": ("prefer", one_of(*get_args(Locality))),
    "locality_wait": ("locality_wait_s", duration_s),
}
HOROVOD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, whole(0, 1_000_000)) for name in ("fusion_threshold_mb", "cache_capacity", "num_nccl_streams")},
    **{name: (name, truth) for name in (
        "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "autotune", "timeline")},
    "cycle_time_ms": ("cycle_time_ms", number),
    "stall_check_warning": ("stall_check_warning_s", lambda value: round(duration_s(value))),
    "stall_check_shutdown": ("stall_check_shutdown_s", lambda value: round(duration_s(value))),
    "thread_affinity": ("thread_affinity", list_of(whole(0, 4096))),
    "gloo_timeout": ("gloo_timeout_s", lambda value: round(duration_s(value))),
    "start_timeout": ("start_timeout_s", lambda value: round(duration_s(value))),
}  # fmt: skip
FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", matching(NAME, "1 to 200 characters without control characters")),
    "image": ("image", matching(IMAGE, "a Docker image reference such as gpurun/train:tf2.15")),
    "gpus": ("gpus", whole(1, MAX_GPUS)),
    "min_gpus": ("min_gpus", whole(1, MAX_GPUS)),
    "command": ("command", command),
    "workdir": ("workdir", text),
    "outputs": ("outputs", container_path),
    "outputs_every": ("outputs_every_s", duration_s),
    "env": ("env", mapping(ENV_NAME, "a variable's name")),
    "secrets": ("secret_files", mapping(SECRET_NAME, "a file name")),
    "controller": ("controller", one_of(*get_args(Controller))),
    "pool": ("pool", matching(re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,252}"), "a pool's name")),
    "priority": ("priority", whole(-1000, 1000)),
    "preemptible": ("preemptible", truth),
    "max_restarts": ("max_restarts", whole(0, 1000)),
    "time_limit": ("time_limit_s", duration_s),
    "hang_timeout": ("hang_timeout_s", duration_s),
    "grace": ("grace_s", duration_s),
    "shm_size": ("shm_size_mib", size_mib),
    "mounts": ("mounts", mounts),
}
"""Each key of a recipe: the field of JobSpec it fills and how."""


@dataclass(frozen=True)
class Recipe:
    """A recipe as read: JobSpec fields that were given, with nested constraints and knobs complete."""

    source: Path
    given: Mapping[str, Any]


def read(path: Path) -> Recipe:
    """Read and check a recipe file, or the ``recipe.yaml`` of a folder.

    Raises:
        BadInput: there is none; or it is wrong, with every problem's line and column.
    """
    file = path / RECIPE_FILE if stat.S_ISDIR(_mode(path)) else path
    data = read_bytes(file, "the recipe", most_bytes=MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the recipe is larger than {MAX_BYTES >> 20} MiB", where=str(file))
    report = Report(str(file))
    root = compose(data, str(file))
    if root is None:
        raise BadInput("the recipe is empty", where=str(file), hint="it needs image, gpus and command")
    given = _section(root, FIELDS | {"constraints": ("", text), "horovod": ("", text)}, report, "a recipe")
    report.raise_if_any()
    if "workdir" in given:
        given["workdir"] = str((file.parent / given["workdir"]).absolute())
    if "secret_files" in given:
        given["secret_files"] = {k: str((file.parent / v).absolute()) for k, v in given["secret_files"].items()}
    return Recipe(file, {"name": file.absolute().parent.name, **given})


def _section(
    node: Node, known: Mapping[str, tuple[str, Callable[[Any], Any]]], report: Report, what: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (key_node, value_node) in entries(node, report, what).items():
        if key not in known:
            report.wrong(key_node, f"{what} has no key {key!r}", allowed=tuple(sorted(known)))
        elif key == "constraints":
            found["constraints"] = Constraints(**_section(value_node, CONSTRAINTS, report, "constraints"))
        elif key == "horovod":
            found["horovod"] = HorovodKnobs(**_section(value_node, HOROVOD, report, "horovod"))
        else:
            field, convert = known[key]
            try:
                found[field] = convert(_plain(value_node))
            except Wrong as error:
                report.wrong(value_node, f"{key} {error}")
    return found


def _plain(node: Node) -> Any:
    """A node as str, list or dict of str: types are the converters' business, not YAML's."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, SequenceNode):
        return [_plain(child) for child in node.value]
    if isinstance(node, MappingNode):
        return _plain_mapping(node)
    raise Wrong("cannot be read")


def _plain_mapping(node: MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise Wrong("has a key that is no plain word")
        if key.value in found:
            raise Wrong(f"has the key {key.value!r} twice")
        found[key.value] = _plain(value)
    return found


def convert_flag(flag: str, key: str, value: object) -> tuple[str, Any]:
    """A command-line flag by the same rule as the recipe key `key`: the spec's field and its value.

    Raises:
        BadInput: naming the flag.
    """
    field, convert = (FIELDS | CONSTRAINTS)[key]
    try:
        return field, convert(value)
    except Wrong as error:
        raise BadInput(f"{flag} {error}, not {value!r}") from error


def build(recipe: Recipe | None, overrides: Mapping[str, Any], constraints: Mapping[str, Any]) -> JobSpec:
    """Recipe and flags as one frozen spec; flags win. `env` is merged, everything else replaced.

    Args:
        overrides: JobSpec fields given as flags, already converted.
        constraints: Constraints fields given as flags.

    Raises:
        BadInput: something a job needs is missing, or two things contradict each other.
    """
    given = dict(recipe.given) if recipe else {}
    given["env"] = {**given.get("env", {}), **overrides.get("env", {})}
    given |= {field: value for field, value in overrides.items() if field != "env"}
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
    per_host = spec.constraints.gpus_per_host
    if per_host and spec.gpus % per_host:
        raise BadInput(f"{spec.gpus} GPUs cannot be split into hosts of exactly {per_host}")
    if spec.min_gpus and spec.min_gpus > spec.gpus:
        raise BadInput(f"min_gpus ({spec.min_gpus}) is more than gpus ({spec.gpus})")
    if spec.min_gpus and spec.controller == "mpi":
        raise BadInput(
            "an elastic gang (min_gpus) cannot use the controller mpi", hint="Horovod's elastic mode is Gloo's"
        )
    if spec.workdir is not None and not stat.S_ISDIR(_mode(Path(spec.workdir))):
        raise BadInput("workdir is not a folder", where=spec.workdir)
    for name, file in spec.secret_files.items():
        if not stat.S_ISREG(_mode(Path(file))):
            raise BadInput(f"the secret {name!r} is not a file", where=file)


def _mode(path: Path) -> int:
    """What lies there, as stat(2) says; 0 if nothing, or nothing that can be looked at."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0

"""Read recipes: turn a YAML file (or a folder with a ``recipe.yaml``) and the flags of ``submit`` into a JobSpec.

Checks every value, and reports all problems at once, with line and column.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from yaml.nodes import Node

from gpurun.documents.convert import ProblemReport, compose_document, convert, mapping, place_of
from gpurun.documents.plain import DocumentError, Problem
from gpurun.errors import BadInput
from gpurun.inventory.read import read_inventory_bytes as read_bytes
from gpurun.jobs.recipe_keys import FIELD_OF, FIELDS, RETRY_, SETTINGS
from gpurun.jobs.recipe_values import check_data, check_notify, environment_of, mode_of, notify_below, sources_below
from gpurun.jobs.spec import (
    LEAST_MEMORY_MIB,
    Constraints,
    Disagreement,
    HorovodKnobs,
    JobSpec,
    Retry,
    Roles,
    as_bytes,
    as_text,
)
from gpurun.quantities import count

# What Slurm, SkyPilot, dstack, Ray, Docker and others call the settings of a job.


FOREIGN: Mapping[str, str] = {
    "gpus": "gres ntasks num_gpus accelerators gpu nproc entrypoint_num_gpus nodes num_nodes nnodes resources replicas",
    "gpus_per_host": "gpus_per_node nproc_per_node ntasks_per_node tasks_per_node",
    "command": "run cmd script commands entrypoint args", "python": "setup pip packages conda runtime_env",
    "pool": "partition queue account qos fleet", "project": "wckey comment tag",
    "time_limit": "time max_time max_duration walltime timeout", "memory": "mem mem_per_node entrypoint_memory",
    "cpus": "cpus_per_task num_cpus entrypoint_num_cpus", "name": "job_name submission_id run_name",
    "hosts": "nodelist host instance", "avoid": "exclude", "generation": "constraint", "gpu_model": "gpu_type",
    "workdir": "chdir working_dir cwd", "env": "export envs env_file env_vars environment runtime_env_json",
    "image": "container_image docker_image docker container image_id", "secrets": "env_secret secret_file",
    "mounts": "container_mounts volume volumes file_mounts", "notify": "mail_type mail_user", "priority": "nice",
    "max_restarts": "requeue restart", "retry": "retries max_retries backoffLimit max_restarts_on_errors max_failures",
    "preemptible": "spot use_spot", "data": "storage",
}  # fmt: skip
"""A setting of gpurun → words of other tools, as a recipe would have them."""
MEANT = {word: key for key, words in FOREIGN.items() for word in words.split()}


# The line of a recipe that an error is about: ``recipe.yaml:4:15``.


@dataclass(frozen=True)
class RecipeLines:
    """The lines of a recipe's keys.

    Attributes:
        root: the recipe's YAML; None = the job has no recipe.
        flags: settings that flags give, with their values: the recipe does not decide these.
    """

    file: str = ""
    root: Node | None = None
    flags: Mapping[str, object] = field(default_factory=dict)

    @contextmanager
    def named(self, *otherwise: str) -> Iterator[None]:
        """Name the line of its key in each BadInput that is raised within.

        Args:
            otherwise: the key of errors that name no key, or a key that the recipe lacks.
        """
        try:
            yield
        except BadInput as error:
            found = self.at_line(error, *otherwise)
            if found is error:
                raise
            raise found from error

    def at_line(self, error: BadInput, *otherwise: str) -> BadInput:
        """Return the error with the line of its key; the error itself if the recipe does not decide that key."""
        if isinstance(error, DocumentError):
            return error
        for key in filter(None, (error.key if isinstance(error, Disagreement) else (), otherwise)):
            if self._is_of_flags(key):
                break
            if place := place_of(self.root, key):
                return DocumentError([Problem(self.file, *place, str(error))], hint=error.hint)
        return error

    def _is_of_flags(self, key: tuple[str, ...]) -> bool:
        given = self.flags.get(key[-1] if key[0] == "constraints" else key[0])
        if isinstance(given, Mapping):
            return key[-1] in given or place_of(self.root, key) is None
        return given is not None


RECIPE_FILE = "recipe.yaml"
WITHOUT_RECIPE = "gpurun submit -n GPUS --image IMAGE -- COMMAND"
MAX_BYTES = 1 << 20
MOST_ENV_BYTES, MOST_QUOTED_BYTES = 64 << 10, 96 << 10
MOST_WORD_BYTES, MOST_COMMAND_BYTES = (128 << 10) - 1, 512 << 10
MERGED = ("env", "secret_files", "data", "retry")
"""Fields of which a flag gives a part; the rest is the recipe's."""
_SCRIPT = re.compile(r"^[^\s:=;&|]*[^\s:=;&|/]\.(py|sh|bash|R|jl)\Z")
_PYTHON = re.compile(r"(^|/)python[0-9.]*\Z")


@dataclass(frozen=True)
class Recipe:
    """A recipe as read: the given JobSpec fields, with complete nested constraints and Horovod settings.

    Attributes:
        sweep: the keys of its sweep, which `gpurun submit` ignores.
        root: its YAML, for the lines of its keys.
    """

    source: Path
    given: Mapping[str, Any]
    sweep: Mapping[str, Any] = field(default_factory=dict)
    root: Node | None = field(default=None, compare=False, repr=False)


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file, or the ``recipe.yaml`` of a folder.

    Raises:
        BadInput: there is no recipe; or it has problems, each reported with line and column.
    """
    is_folder = stat.S_ISDIR(mode_of(path))
    file = path / RECIPE_FILE if is_folder else path
    try:
        data = read_bytes(file, "the recipe", most_bytes=MAX_BYTES)
    except BadInput as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        what = f"the folder has no {RECIPE_FILE}" if is_folder else "the recipe does not exist"
        raise BadInput(what, where=str(path), hint=f"give the path of a recipe, or run: {WITHOUT_RECIPE}") from None
    if path.suffix in (".py", ".sh"):
        program = shlex.join(("python3" if path.suffix == ".py" else "sh", str(path)))
        hint = f"submit the program with: {WITHOUT_RECIPE.replace('COMMAND', program)}"
        raise BadInput("the file is a program, not a recipe", where=str(path), hint=hint)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the recipe is larger than {MAX_BYTES >> 20} MiB", where=str(file))
    report = ProblemReport(str(file))
    root = compose_document(data, str(file))
    if root is None:
        raise BadInput("the recipe is empty", where=str(file), hint="add the keys image, gpus and command")
    keys = mapping(root, FIELDS, report, "the recipe", MEANT)
    report.raise_if_any()
    with RecipeLines(str(file), root).named():
        given = _fields(keys, file.absolute().parent)
    sweep = given.pop("sweep", {})
    return Recipe(file, {"name": file.absolute().parent.name, **given}, sweep, root)


def lines_of(recipe: Recipe | None, flags: Mapping[str, object]) -> RecipeLines:
    """Return the lines of a recipe's keys, but for settings that flags give."""
    return RecipeLines() if recipe is None else RecipeLines(str(recipe.source), recipe.root, flags)


def _fields(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a spec that converted keys give. Relative paths become absolute, below a folder."""
    given = _by_field(keys)
    given |= {"retry": _by_field(given["retry"])} if "retry" in given else {}
    if "constraints" in given:
        given["constraints"] = Constraints(**_by_field(given["constraints"]))
    if "horovod" in given:
        given["horovod"] = HorovodKnobs(**_by_field(given["horovod"]))
    if "roles" in given:
        given["roles"] = Roles(**given["roles"])
    if "python" in given:
        given["python"] = environment_of(given["python"], folder)
    return _rooted(given, folder)


def name_of(command: Sequence[str]) -> str:
    """Return the name of a job that nobody named: its script's, such as ``train`` of ``python3 src/train.py``.

    Without a script, the module behind ``-m`` or the program's own name.
    """
    script = next((word for word in command if _SCRIPT.search(word)), None)
    if script is not None:
        return Path(script).stem
    words = [*command, ""]
    module = words[words.index("-m") + 1] if "-m" in words and _PYTHON.search(words[0]) else ""
    return module.rsplit(".", 1)[-1] or command[0].rsplit("/", 1)[-1]


def _by_field(given: Mapping[str, Any]) -> dict[str, Any]:
    return {FIELD_OF.get(key, key): value for key, value in given.items()}


def _rooted(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    rooted = {**given, **notify_below(given, folder)}
    if "workdir" in given:
        rooted["workdir"] = str((folder / given["workdir"]).absolute())
    if "secret_files" in given:
        rooted["secret_files"] = {name: str((folder / file).absolute()) for name, file in given["secret_files"].items()}
    if "data" in given:
        rooted["data"] = sources_below(folder, given["data"])
    return rooted


def convert_flag(flag: str, key: str, value: object) -> tuple[str, Any]:
    """Convert a command-line flag by the rule of the recipe key `key`; return the spec's field and its value.

    Raises:
        BadInput: names the flag.
    """
    converted = convert(value, SETTINGS[key].kind, flag)
    if key.startswith(RETRY_):
        key, converted = "retry", {key.removeprefix(RETRY_): converted}
    ((field, found),) = _fields({key: converted}, Path.cwd()).items()
    return field, found


def build_spec(recipe: Recipe | None, overrides: Mapping[str, Any], constraints: Mapping[str, Any]) -> JobSpec:
    """Combine recipe and flags into one frozen spec. Flags override the recipe; variables and secrets are merged.

    Args:
        overrides: JobSpec fields given as flags, already converted; `retry` as a mapping of those of its fields that
            flags give. Relative paths are relative to the current folder.
        constraints: Constraints fields given as flags.

    Raises:
        BadInput: a required setting is missing, or two settings contradict each other.
    """
    given = dict(recipe.given) if recipe else {}
    merged = {field: {**given.get(field, {}), **overrides.get(field, {})} for field in MERGED}
    given = _rooted({**given, **overrides, **merged}, Path.cwd())
    given["constraints"] = replace(given.get("constraints", Constraints()), **constraints)
    given["retry"] = _retry_of(given["retry"])
    given.setdefault("name", name_of(given["command"]) if "command" in given else "job")
    missing = [name for name in ("image", "gpus", "command") if name not in given]
    if missing:
        raise BadInput(
            f"the job has no {' and no '.join(missing)}", where=str(recipe.source) if recipe else None,
            hint=f"add the missing keys to a recipe, or run: {WITHOUT_RECIPE}",
        )  # fmt: skip
    if "workdir" in given:
        given.setdefault("workdir_read_only", False)
    assert set(given) <= {field.name for field in fields(JobSpec)}
    spec = JobSpec(**{**given, "command": tuple(map(as_text, given["command"]))})
    _check(spec)
    return spec


def _retry_of(given: Mapping[str, Any]) -> Retry | None:
    if given and "times" not in given:
        raise Disagreement(
            "retry says when to retry the job, but not how often", "retry",
            hint="add `times: 3` to `retry` in the recipe, or --retry 3",
        )  # fmt: skip
    return Retry(**given) if given else None


def _check(spec: JobSpec) -> None:
    try:
        msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise BadInput(f"{error.object!r} is not UTF-8 text") from error
    if not spec.command[0] or spec.command[0].startswith("-"):
        raise Disagreement(f"command: {spec.command[0]!r} is not a program", "command")
    _check_env(spec)
    check_length(spec)
    _check_memory(spec)
    per_host = spec.constraints.gpus_per_host
    if per_host and spec.gpus % per_host:
        message = f"{count(spec.gpus, 'GPU')} cannot be split over hosts with exactly {count(per_host, 'GPU')} each"
        raise Disagreement(message, "constraints", "gpus_per_host")
    if spec.min_gpus and spec.min_gpus > spec.gpus:
        raise Disagreement(f"min_gpus ({spec.min_gpus}) is more than gpus ({spec.gpus})", "min_gpus")
    if spec.workdir is not None and not stat.S_ISDIR(mode := mode_of(Path(spec.workdir))):
        why = "the path is not a folder" if mode else "the folder does not exist, or you may not read it"
        raise Disagreement(f"workdir: {why}", "workdir", where=spec.workdir)
    check_data(spec)
    check_notify(spec)
    for name, file in spec.secret_files.items():
        if not stat.S_ISREG(mode_of(Path(file))):
            raise Disagreement(f"the secret {name!r} is not a file", "secrets", name, where=file)
    if spec.python is not None and spec.python.secret and not stat.S_ISREG(mode_of(Path(spec.python.secret))):
        raise Disagreement("python: the secret is not a file", "python", "secret", where=spec.python.secret)


def _check_memory(spec: JobSpec) -> None:
    memory_mib, shm_mib = spec.memory_mib, spec.shm_size_mib
    if memory_mib is not None and memory_mib < LEAST_MEMORY_MIB:
        raise Disagreement(f"memory is {memory_mib} MiB; at least {LEAST_MEMORY_MIB} MiB are needed", "memory")
    if memory_mib is not None and shm_mib is not None and shm_mib > memory_mib:
        raise Disagreement(
            f"shm_size ({shm_mib} MiB) is more than memory ({memory_mib} MiB)", "shm_size",
            hint="files in /dev/shm count as memory: make memory at least as large as shm_size",
        )  # fmt: skip


def _check_env(spec: JobSpec) -> None:
    """Refuse gpurun's own variables: a rank would have the wrong job, folder or number, and gpurun could not detect its
    end. `gpurun.launch.launchers.launcher` refuses those of launchers.
    """
    wrong = [name for name in spec.env if name.startswith("GPURUN_")]
    if wrong := sorted({*wrong} - {"GPURUN_PARAMETERS"}):
        raise Disagreement(
            f"env: gpurun itself sets {', '.join(wrong)}", "env", wrong[0], hint="choose other names for your variables"
        )


def check_length(spec: JobSpec) -> None:
    """Refuse a command or environment that is too long.

    Linux limits one argument to 128 KiB (execve(2), MAX_ARG_STRLEN), and all of them to a quarter of the stack.
    horovodrun passes the environment to another host as one argument, with words of its own, and quotes it twice, so
    that each quote character takes five bytes. So gpurun allows half of the limit after the first quoting, and three
    quarters after the second.

    Raises:
        Disagreement: says how long it may be.
    """
    joined = shlex.join(f"{name}={value}" for name, value in spec.env.items())
    size, quoted = len(joined.encode()), len(shlex.quote(joined).encode())
    hint = "put the long part into a file of the workdir or of the image"
    if size > MOST_ENV_BYTES or quoted > MOST_QUOTED_BYTES:
        raise Disagreement(
            f"the environment has {max(size, quoted)} bytes when quoted; at most {MOST_ENV_BYTES} are allowed",
            "env", hint=hint,
        )  # fmt: skip
    sizes = [len(as_bytes(word)) for word in spec.command]
    if max(sizes) > MOST_WORD_BYTES:
        message = f"a word of the command has {max(sizes)} bytes; Linux allows at most {MOST_WORD_BYTES}"
        raise Disagreement(message, "command", hint=hint)
    if sum(sizes) > MOST_COMMAND_BYTES:
        message = f"the command has {sum(sizes)} bytes; at most {MOST_COMMAND_BYTES} are allowed"
        raise Disagreement(message, "command", hint=hint)

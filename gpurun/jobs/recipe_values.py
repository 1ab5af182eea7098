"""How people write the values of a recipe: times, sizes, commands, names. Each type says its own rule."""

from __future__ import annotations

import re
import shlex
import stat
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from gpurun.documents.convert import Kind, kind_of, written
from gpurun.errors import BadInput
from gpurun.jobs.spec import DATA, DataSource, Disagreement, Environment, JobSpec, NotifyWish, notify_wish
from gpurun.quantities import duration_s, size_mib

# How a key of a recipe is written on the command line: the flag, its group in the help, and the words for its value.


Words = Literal[
    "data_sources", "files", "folders", "generations", "gpu_models", "hosts", "images", "launchers", "pools", "projects"
]
"""What a shell offers for a value: a function of `gpurun.cli.completion`. Shells offer files and folders themselves."""
_KEY = re.compile(r"`([a-z_]+)`")


@dataclass(frozen=True)
class KeyFlag:
    """How people give a setting on the command line.

    Attributes:
        group: the heading that the option has in the help.
        value: the word for its value in the help, such as ``FILE``; empty for a switch or a choice.
        names: the option's names, if they are not ``--`` and the key.
        complete: the words that a shell offers; None = the choices, if the setting has choices.
        more: a sentence of the help, after what the key means.
        only: the commands that have this flag; the others have a flag of that name with another meaning, or cannot
            have it.
        why: why the others cannot have it.
    """

    group: str
    value: str = ""
    names: tuple[str, ...] = ()
    complete: Words | None = None
    more: str = ""
    only: tuple[str, ...] = ("submit", "sweep run", "scale run")
    why: str = ""


@dataclass(frozen=True)
class JobSetting:
    """One setting of a job.

    Attributes:
        key: its key in a recipe, and the name of its argument in Python.
        kind: its type, what it means, and examples as a recipe writes them.
        flag: None = only recipes have it, and `no_flag` says why.
        help: the option's help: the first sentence of what the key means, with keys as the flags they are here.
    """

    key: str
    kind: Kind
    flag: KeyFlag | None
    no_flag: str = ""
    help: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the option's names; the last one is the long one."""
        named = self.flag.names if self.flag is not None else ()
        return named or (f"--{self.key.replace('_', '-')}",)

    @property
    def is_switch(self) -> bool:
        """Return whether the option has no value, but an opposite: ``--nvlink/--not-nvlink``."""
        return self.kind.options == ("true", "false")

    @property
    def is_named(self) -> bool:
        """Return whether each value is ``NAME=VALUE``."""
        return self.kind.key is not None

    @property
    def is_many(self) -> bool:
        """Return whether the option may be repeated."""
        return self.is_named or (self.kind.item is not None and not self.kind.spelled)

    @property
    def value(self) -> str | None:
        """Return the word for the option's value; None for a switch."""
        if self.is_switch or self.flag is None:
            return None
        return self.flag.value or "|".join(self.kind.options)


def means(meaning: str, *examples: str, default: str = "", more: str = "", flag: KeyFlag | str | None = None) -> Meta:
    """What a key means, and values of it as people write them.

    Args:
        meaning: the first sentence. It is the help of the flag, too, with the default.
        more: further sentences, for the documentation.
        flag: the key's flag, or why it has none; None for a key below another one that has no flags.
    """
    first = ". Default: ".join(filter(None, (meaning, default)))
    about = ". ".join(filter(None, (first, more)))
    return Meta(description=about, examples=list(examples), extra={"means": first, "flag": flag})


def settings_of(*tables: type) -> dict[str, JobSetting]:
    """Return the settings that TypedDicts of keys declare with `means`, in their order."""
    found, said = {}, {}
    for table in tables:
        for key, hint in typing.get_type_hints(table, include_extras=True).items():
            said[key] = _said(hint)
            flag = said[key]["flag"]
            has = isinstance(flag, KeyFlag)
            found[key] = JobSetting(key, kind_of(hint), flag if has else None, "" if has else flag or "")
    names = {key: setting.names[-1] for key, setting in found.items() if setting.flag is not None}
    return {key: replace(setting, help=_help(setting, said[key]["means"], names)) for key, setting in found.items()}


def _said(hint: Any) -> Mapping[str, Any]:
    """Return what `means` said in a type hint."""
    metas = (meta.extra or {} for meta in hint.__metadata__ if isinstance(meta, Meta))
    return next(extra for extra in metas if "means" in extra)


def _help(setting: JobSetting, meaning: str, names: Mapping[str, str]) -> str:
    text = _KEY.sub(lambda found: names.get(found[1], found[0]), meaning)
    more = setting.flag.more if setting.flag is not None else ""
    example = f"Example: {setting.kind.examples[0]}" if setting.value in ("TIME", "SIZE") else ""
    repeated = f"You can repeat {setting.names[-1]}" if setting.is_many else ""
    return ". ".join(filter(None, (text[:1].upper() + text[1:], more, example, repeated))) + "."


MAX_GPUS = 1_000_000
MOST_WAIT_S = 24 * 3600.0
"""No job waits longer for its retry."""
_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\r?\n")
_OPERATOR = re.compile(r"""&&?|\|[|&]?|[^\\'"]*;|[0-9]*(>>?|<<?<?)(&[0-9-])?""")


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character")
    return text


def _words(line: str) -> list[str]:
    """One line as a shell splits words; no shell ever runs it. A backslash at the end of a line continues it.

    Raises:
        ValueError: it cannot be split, or has an operator that only a shell carries out.
    """
    try:
        line = _CONTINUED.sub(r"\1", _without_nul(line))
        words, quoted = shlex.split(line), shlex.split(line, posix=False)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}") from error
    if operator := next((word for word in quoted if _OPERATOR.fullmatch(word)), None):
        raise ValueError(
            f"has {operator}, but only a shell understands {operator}; write [bash, -c, 'FIRST {operator} SECOND']"
        )
    return words


def _whole_seconds(text: str) -> int:
    """Return the seconds of a time, rounded. Raises ValueError for less than one."""
    seconds = duration_s(text)
    if seconds < 1:
        raise ValueError("is less than 1s")
    return round(seconds)


def _pause(text: str) -> float:
    """Return the seconds of a wait. Raises ValueError for more than a day."""
    seconds = duration_s(text)
    if seconds > MOST_WAIT_S:
        raise ValueError("is more than 24h")
    return seconds


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
    str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z", title="a text of 1 to 200 characters without control characters")
]
Image = Annotated[  # Docker's reference grammar, loosely: never a flag, never white space; a registry may have capitals
    str,
    Meta(
        pattern=r"^([a-zA-Z0-9][a-zA-Z0-9.:-]*/)?[a-z0-9][a-z0-9._/-]*(:[\w.-]+)?(@[\w.:-]+)?\Z", max_length=255,
        title="a Docker image reference in lower case such as gpurun/train:tf2.15",
    ),
]  # fmt: skip
PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a pool's name")]
ProjectName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}\Z", title="a project's name")]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", title="a variable's name")]
SecretName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a file name")]
Text = Annotated[str, written(_without_nul, "a text", null=True)]
Command = Annotated[tuple[Text, ...], Meta(min_length=1), written(_words, "a command that names a program")]
Notify = Annotated[NotifyWish, written(notify_wish, "a target such as mail:alice@example.com or failure=slack:FILE")]
Duration = Annotated[float, written(duration_s, "a time such as 90s, 15m, 1h30m or 2d")]
Pause = Annotated[float, written(_pause, "a time of at most 24h, such as 30s or 5m")]
WholeSeconds = Annotated[int, written(_whole_seconds, "a time such as 90s, 15m, 1h30m or 2d")]
Size = Annotated[int, written(size_mib, "a size such as 512MiB or 16GiB")]
Gpus = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
Knob = Annotated[int, Meta(ge=0, le=1_000_000)]


# A recipe's folders in the containers: mounts, outputs and data sets.


_JOB_OUTPUTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*:outputs((?:/.*)?)\Z")

_KERNEL = ("proc", "sys", "dev", "gpurun", "workspace")
_SYSTEM = ("bin", "boot", "etc", "lib", "lib32", "lib64", "run", "sbin", "usr", "var")


def _container_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path or "\n" in path or ".." in path.split("/"):
        raise ValueError
    if not path.strip("/"):
        raise ValueError("must be a folder below /, such as /checkpoints")
    return path


def _outputs_path(path: str) -> str:
    """Check a folder for outputs. An empty folder of the host hides the image's folder, so the container must not need
    it.
    """
    top, *below = _container_path(path).strip("/").split("/")
    if top in _KERNEL or (top in _SYSTEM and not any(below)):
        copied = "; leave out this key: gpurun copies new files at /workspace in any case" if top == "workspace" else ""
        raise ValueError(f"hides the container's own /{top}{copied}")
    return path


def _mount(text: str) -> tuple[str, str, str]:
    """Parse ``/host/path:/container/path[:ro|rw]``; default: read-only. Raises ValueError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw"):
        raise ValueError
    return _container_path(source), _container_path(target), mode or "ro"


def _data_source(text: str) -> dict[str, str]:
    """Parse ``./folder``, ``host:/path`` or ``JOB:outputs/path``. Raises ValueError."""
    if not text or "\0" in text or "\n" in text:
        raise ValueError
    if text.startswith("host:"):
        return {"kind": "host", "path": _container_path(text.removeprefix("host:"))}
    found = _JOB_OUTPUTS.match(text)
    if found is None:
        return {"kind": "folder", "path": text}
    if ".." in found[1].split("/"):
        raise ValueError("has '..', which leads out of the job's outputs")
    return {"kind": "job", "path": text}


OutputsPath = Annotated[str, written(_outputs_path, "an absolute path such as /checkpoints")]
ContainerPath = Annotated[str, written(_container_path, "an absolute path such as /checkpoints")]
Mount = Annotated[tuple[str, str, str], written(_mount, "a mount such as /host/path:/container/path:ro")]
DataName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a name (letters, digits, '.', '_', '-')")
]
Data = Annotated[
    DataSource,
    written(
        _data_source, "a source of data such as ./data, host:/nfs/data or JOB:outputs/data",
        schema={"type": "string", "minLength": 1},
    ),
]  # fmt: skip


def sources_below(folder: Path, data: Mapping[str, DataSource]) -> dict[str, DataSource]:
    """Return sources of data, with relative paths resolved against `folder`."""
    return {
        name: replace(source, path=str((folder / source.path).absolute())) if source.kind == "folder" else source
        for name, source in data.items()
    }


def check_data(spec: JobSpec) -> None:
    """Refuse a data set whose path in the container is already used, or whose source is not a folder.

    Raises:
        Disagreement: names the data set.
    """
    taken = {target.rstrip("/"): "a mount" for _, target, _ in spec.mounts}
    taken |= {spec.outputs.rstrip("/"): "outputs"} if spec.outputs is not None else {}
    for name, source in spec.data.items():
        if f"{DATA}/{name}" in taken:
            both = f"both {taken[f'{DATA}/{name}']} and the data set {name!r}"
            raise Disagreement(f"{DATA}/{name} is {both}", "data", name)
        if source.kind == "folder" and not stat.S_ISDIR(mode_of(Path(source.path))):
            raise Disagreement(f"the data set {name!r} is not a folder", "data", name, where=source.path)


def mode_of(path: Path) -> int:
    """Return the mode of the file at a path, as stat(2) reports it; 0 if there is none or it cannot be read."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


# A recipe's ``python`` section as a value.


_WEB = re.compile(r"https?://[^\s\x00-\x1f]+\Z")
_WITH_PASSWORD = re.compile(r"[a-z+]+://[^/]*@", re.IGNORECASE)


def environment_of(keys: Mapping[str, str], folder: Path) -> Environment:
    """Return the environment that `PythonKeys` describe, with paths relative to `folder` made absolute.

    Raises:
        BadInput: there is not exactly one source of packages, or a URL has a password.
    """
    kinds: list[Literal["requirements", "lock", "project"]] = ["requirements", "lock", "project"]
    named = [kind for kind in kinds if kind in keys]
    if len(named) != 1:
        raise BadInput(
            f"python must name one source of packages, but names {' and '.join(named) or 'none'}",
            hint=f"give exactly one of the keys {', '.join(kinds)}",
        )
    index = keys.get("index")
    if index is not None and _WITH_PASSWORD.match(index):
        hint = "put the password into a netrc file, and write the file's path into the recipe: `python: {secret: FILE}`"
        raise Disagreement("python: the index has a password in its URL", "python", "index", hint=hint)
    if index is not None and not _WEB.match(index):
        index = str(folder / index)
    secret = str(folder / keys["secret"]) if "secret" in keys else None
    return Environment(named[0], str(folder / keys[named[0]]), index, secret)


# Resolve and check the files that a job's notifications name.


def notify_below(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the `notify` field of a spec, if given, with files relative to `folder`."""
    return {"notify": tuple(_below(wish, folder) for wish in given["notify"])} if "notify" in given else {}


def _below(wish: NotifyWish, folder: Path) -> NotifyWish:
    if not wish.is_file:
        return wish
    return replace(wish, target=str((folder / Path(wish.target).expanduser()).absolute()))


def check_notify(spec: JobSpec) -> None:
    """Raise Disagreement if a file with a URL is missing."""
    for wish in spec.notify:
        if wish.is_file and not stat.S_ISREG(mode_of(Path(wish.target))):
            hint = "put the URL into the file, and protect the file with chmod 600"
            raise Disagreement("notify: the file with the URL does not exist", "notify", where=wish.target, hint=hint)

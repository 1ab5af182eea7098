"""Compute what an environment consists of, and the key that names it, before the build."""

from __future__ import annotations

import configparser
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gpurun.content.images import HeadImage
from gpurun.content.inside import ENVIRONMENT, PLACE
from gpurun.errors import BadInput
from gpurun.inventory.read import read_inventory_bytes
from gpurun.jobs.spec import Environment

# Read requirement files on the head, check each line, and join them into the one list for pip.


MAX_BYTES = 1 << 20
MOST_FILES = 64
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")
_NAMED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?=$|[\s<>=!~;@(\[])")
_PLAIN = ("--pre", "--prefer-binary", "--require-hashes")
_VALUED = ("--only-binary", "--no-binary")
_INDEX = {"-i": "--index-url", "-f": "--find-links"}
_INDEXES = ("--index-url", "--extra-index-url", "--find-links")
_INCLUDES = {"-r": "--requirement", "-c": "--constraint"}
_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z-]*)(?:[=\s]\s*|(?=[^\sA-Za-z=-]))?(.*)")
_URL = re.compile(r"@\s*(\S+)")
_CREDENTIALS = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[^/\s@]*@", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_WHEELS_HINT = "name a folder of wheels in the recipe: `python: {index: FOLDER}`"
_REMOTE = re.compile(r"(?:git\+)?https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Requirements:
    """Requirements for pip.

    Attributes:
        lines: requirements and options, without comments, as pip reads them.
        constraints: the lines of constraint files.
        locked: the list is complete: pip resolves nothing and installs exactly these packages.
    """

    lines: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    locked: bool = False

    @property
    def has_index(self) -> bool:
        """Return whether a line names an index."""
        return any(line.startswith(_INDEXES) for line in (*self.lines, *self.constraints))


def read_requirements(path: Path) -> Requirements:
    """Return the requirements of a file and of the files it includes, which must be in its folder or below.

    Raises:
        BadInput: a file cannot be read, is too large, or has a line that gpurun does not pass on.
    """
    real = path.resolve()
    found = _Reading(real.parent)
    found.add(real, into=found.lines)
    return checked_requirements(Requirements(tuple(found.lines), tuple(found.constraints)), str(path))


def checked_requirements(requirements: Requirements, where: str) -> Requirements:
    """Return the requirements. Raises BadInput if they name no package."""
    if not any(not line.startswith("-") for line in requirements.lines):
        raise BadInput(
            "the file names no package", where=where, hint="name a package, or remove `python` from the recipe"
        )
    return requirements


def parse_requirement_lines(text: str, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (place, option, value) of each line; a requirement has the option "".

    Raises:
        BadInput: for the first line that gpurun does not pass on.
    """
    for place, line in _logical_lines(text, where):
        if any((ord(letter) < 0x20 and letter != "\t") or ord(letter) == 0x7F for letter in line):
            raise BadInput("the line contains a control character", where=place)
        if "\\" in line:
            raise BadInput("the line has a backslash that is not at its end", where=place)
        if _CREDENTIALS.search(line):
            raise BadInput(
                "the line has a user name or password in a URL", where=place,
                hint="put the password into a netrc file, and write the file's path into the recipe: "
                "`python: {secret: FILE}`",
            )  # fmt: skip
        if _VARIABLE.search(line):
            raise BadInput(
                "the line uses an environment variable, but gpurun passes no environment variables to pip", where=place
            )
        yield (place, *(_option(line, place) if line.startswith("-") else ("", _requirement(line, place))))


class _Reading:
    """Reads requirement files: each once as requirements, and once as constraints."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._seen: set[tuple[Path, bool]] = set()
        self.lines: list[str] = []
        self.constraints: list[str] = []

    def add(self, path: Path, *, into: list[str]) -> None:
        """Add a file and the files it includes."""
        if (read := (path, into is self.constraints)) in self._seen:
            return
        self._seen.add(read)
        if len(self._seen) > MOST_FILES:
            raise BadInput(f"the requirements consist of more than {MOST_FILES} files", where=str(path))
        for place, option, value in parse_requirement_lines(text_of(path), str(path)):
            if option in _INCLUDES.values():
                within = self._included(path, value, place)
                self.add(within, into=self.constraints if option == "--constraint" else into)
            else:
                into.append(f"{option} {value}".strip() if option else value)

    def _included(self, path: Path, value: str, place: str) -> Path:
        found = (path.parent / value).resolve()
        if Path(value).is_absolute() or not found.is_relative_to(self._top):
            raise BadInput(
                f"the line includes the file {value!r}, which is outside the folder {self._top}",
                where=place,
                hint=f"copy the included file into the folder {self._top}",
            )
        return found


def text_of(path: Path) -> str:
    """Read a user's text file. Raises BadInput if it is not a text file, or too large."""
    data = read_inventory_bytes(path, "the requirements", most_bytes=MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the file is larger than {MAX_BYTES >> 20} MiB", where=str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput("the file is not UTF-8 text", where=str(path)) from None


def _logical_lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield lines joined at backslashes, without comments, as defined by pip's requirements file format."""
    begun: list[str] = []
    place = where
    for number, raw in enumerate(text.splitlines(), 1):
        place = place if begun else f"{where}:{number}"
        comment = _COMMENT.search(raw)
        line = raw if comment is None else raw[: comment.start()].rstrip()
        if line.endswith("\\") and line == raw:
            begun.append(line[:-1])
            continue
        whole = "".join([*begun, line]).strip()
        begun = []
        if whole:
            yield place, whole
    if begun and (whole := "".join(begun).strip()):
        yield place, whole


def _option(line: str, place: str) -> tuple[str, str]:
    match = _OPTION.fullmatch(line)
    option, value = (match[1], match[2].strip()) if match else (line, "")
    option = {**_INDEX, **_INCLUDES}.get(option, option)
    if option in ("-e", "--editable"):
        raise BadInput(
            "gpurun cannot install an editable package (-e) into an environment", where=place,
            hint="send the package's code with the job: name its folder under `workdir` in the recipe",
        )  # fmt: skip
    if option in _PLAIN and not value:
        return option, ""
    if value and (option in _VALUED or option in _INCLUDES.values()):
        return option, value
    if option in _INDEXES:
        if not _REMOTE.match(value):
            raise BadInput(
                f"the value of {option} is not a URL with http or https", where=place,
                hint=_WHEELS_HINT,
            )  # fmt: skip
        return option, value
    raise BadInput(f"{option[:80]!r} is not an option that gpurun passes to pip", where=place)


def _requirement(line: str, place: str) -> str:
    """Check a requirement. A requirement with a URL must use the network."""
    bare, _, _ = line.partition(" --hash")
    if not _NAMED.match(bare):
        is_url = "://" in bare or bare.startswith((".", "/"))
        raise BadInput(
            f"{line[:80]!r} does not begin with the name of a package", where=place,
            hint=f"write NAME @ https://…, or {_WHEELS_HINT}" if is_url else None,
        )  # fmt: skip
    requirement, _, _ = bare.partition(";")
    if "/" in requirement and "@" not in requirement:
        raise BadInput(f"{line[:80]!r} is a path, not the name of a package", where=place, hint=_WHEELS_HINT)
    url = _URL.search(requirement)
    if url and not _REMOTE.match(url[1]):
        raise BadInput(f"{url[1][:80]!r} is not a URL with http or https", where=place, hint=_WHEELS_HINT)
    return line


# Read a project's dependencies from its ``pyproject.toml`` or ``uv.lock``, without running code of the project.


LOCK, PROJECT = "uv.lock", "pyproject.toml"
_UV_LIMIT_S = 60.0
_EXPORT = (
    "export", "--frozen", "--offline", "--no-config", "--no-dev", "--no-emit-project", "--no-emit-workspace",
    "--no-header", "--no-annotate", "--color", "never", "--format", "requirements-txt",
)  # fmt: skip


def read_project(folder: Path) -> Requirements:
    """Return the dependencies that a project's ``pyproject.toml`` lists (PEP 621).

    Raises:
        BadInput: the file is missing or not TOML, or a build must compute the dependencies.
    """
    path = folder / PROJECT
    document = _toml(text_of(path), path)
    project = document.get("project")
    if not isinstance(project, dict):
        raise BadInput(
            "the file has no table [project]", where=str(path), hint="list the packages in a requirements file"
        )
    if "dependencies" in (project.get("dynamic") or ()):
        raise BadInput(
            "the project computes its dependencies only during its build", where=str(path),
            hint="list the dependencies in a requirements file",
        )  # fmt: skip
    listed = project.get("dependencies", [])
    if not isinstance(listed, list) or not all(isinstance(each, str) and each.strip() for each in listed):
        raise BadInput("the key 'dependencies' must be a list of strings", where=str(path))
    where = f"{path}: dependencies"
    lines = tuple(value for each in listed for _, option, value in _requirements(each, where))
    return checked_requirements(Requirements(lines), where)


def read_lock(path: Path) -> Requirements:
    """Return the packages that a ``uv.lock`` pins, with hashes, without development packages. ``uv`` reads it and runs
    nothing.

    Raises:
        BadInput: uv is not installed, or cannot read the lock.
    """
    if path.name != LOCK:
        raise BadInput(f"the lock file must have the name {LOCK}", where=str(path))
    if not path.is_file():
        raise BadInput("the lock file does not exist, or is not a file", where=str(path))
    try:
        done = subprocess.run(
            [_uv(), *_EXPORT, "--directory", str(path.parent)],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=_UV_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BadInput(f"uv did not read the lock file within {_UV_LIMIT_S:g} s", where=str(path)) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BadInput(f"uv cannot read the lock file: {' '.join(said[-3:])[:400]}", where=str(path))
    lines = tuple(value for _, option, value in _requirements(done.stdout.decode(errors="replace"), str(path)))
    return checked_requirements(Requirements(lines, locked=True), str(path))


def _requirements(text: str, where: str) -> list[tuple[str, str, str]]:
    found = list(parse_requirement_lines(text, where))
    for place, option, _ in found:
        if option:
            raise BadInput(
                f"the list of dependencies contains the option {option}, which is not a package", where=place
            )
    return found


def _uv() -> str:
    try:
        return str(importlib.import_module("uv").find_uv_bin())
    except (ImportError, FileNotFoundError):
        pass
    found = shutil.which("uv")
    if found is None:
        raise BadInput("gpurun needs uv on the head to read a uv.lock", hint="install uv: pip install 'gpurun[lock]'")
    return found


def _toml(text: str, path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document: dict[str, Any] = toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the file is not TOML: {str(error)[:200]}", where=str(path)) from None
    return document


# Find out where pip gets packages: from the recipe, else from the settings of the submitting user's pip.


INDEX_KEYS = ("index-url", "extra-index-url", "find-links", "no-index", "constraint")
WAY_KEYS = ("trusted-host", "proxy", "cert", "client-cert", "timeout", "retries")
OF_THE_MACHINE = Path("/etc/pip.conf")
_RENAMED = {"default-timeout": "timeout"}
_PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY")
_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")


@dataclass(frozen=True)
class PipSettings:
    """pip's settings of indexes. URLs may contain passwords, so gpurun writes them only to a file that the build reads.

    Attributes:
        values: pip's key → its words.
    """

    values: Mapping[str, tuple[str, ...]]

    @property
    def is_offline(self) -> bool:
        """Return whether pip needs no network."""
        return self.values.get("no-index", ("false",))[0].lower() in ("1", "true", "yes", "on")

    @property
    def named(self) -> dict[str, list[str]]:
        """Return the indexes without passwords. They are part of the environment's key."""
        return {
            key: [_USER_INFO.sub("", word) for word in self.values[key]]
            for key in INDEX_KEYS
            if key in self.values and key != "constraint"
        }

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return passwords and user names of the URLs, both encoded and decoded. Call `check` before."""
        found = [urlsplit(url) for _, url in self._urls() if _USER_INFO.search(url)]
        parts = [part for url in found for part in (url.password or url.username,) if part]
        return tuple(dict.fromkeys((*parts, *map(unquote, parts))))

    def check(self) -> None:
        """Check that every URL can be read, so that gpurun knows its password.

        Raises:
            BadInput: one cannot. The error does not repeat the URL.
        """
        for key, url in self._urls():
            try:
                _ = urlsplit(url).port
            except ValueError:  # its message can contain the password
                raise BadInput(
                    f"gpurun cannot read the URL in pip's setting {key}",
                    hint="correct the URL in the recipe, in pip.conf or in PIP_…; in a password, write %2F for /",
                ) from None

    def _urls(self) -> Iterator[tuple[str, str]]:
        """Yield each URL with its key. pip takes a proxy without a scheme, too."""
        for key, words in self.values.items():
            for word in words:
                if "://" in word:
                    yield key, word
                elif key == "proxy":
                    yield key, f"http://{word}"

    def as_file(self) -> str:
        """Return the settings as a configuration file for pip."""
        lines = ["[global]"]
        for key, words in self.values.items():
            lines.append(f"{key} = {words[0]}" if words else f"{key} =")
            lines.extend(f"    {word}" for word in words[1:])
        return "\n".join([*lines, ""])


def users_settings(environ: Mapping[str, str], roots: Iterable[Path] | None = None) -> PipSettings:
    """Return the settings of the user's own pip.

    Args:
        roots: the configuration files, the last of which wins; None = pip's own places.
    """
    values: dict[str, tuple[str, ...]] = {}
    for path in _places(environ) if roots is None else roots:
        values.update(_of_file(path))
    for key in (*INDEX_KEYS, *WAY_KEYS, *_RENAMED):
        variable = environ.get(f"PIP_{key.upper().replace('-', '_')}")
        if variable:
            values[_RENAMED.get(key, key)] = tuple(variable.split())
    proxy = next((environ[name] for name in _PROXIES if environ.get(name)), "")
    if proxy:
        values.setdefault("proxy", (proxy,))
    return PipSettings(values)


def with_index(users: PipSettings, url: str) -> PipSettings:
    """Return settings with this index only, and the user's connection settings."""
    way = {key: words for key, words in users.values.items() if key in WAY_KEYS}
    return PipSettings({"index-url": (url,), **way})


def with_folder(folder: str) -> PipSettings:
    """Return settings with a folder of wheels as the only index."""
    return PipSettings({"no-index": ("true",), "find-links": (folder,)})


def secrets_of(netrc: Path | None) -> tuple[str, ...]:
    """Return every password in a netrc file, whatever its line breaks; none if the file cannot be read."""
    try:
        words = [] if netrc is None else netrc.read_text(errors="replace").split()
    except OSError:
        return ()
    return tuple(after.strip('"') for word, after in itertools.pairwise(words) if word == "password")


def _places(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's configuration files; the last one wins."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield Path(folder) / "pip/pip.conf"
    yield OF_THE_MACHINE
    home = Path(environ.get("HOME") or Path.home())
    if not (named and Path(named).exists()):
        yield home / ".pip/pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if named:
        yield Path(named)


def _of_file(path: Path) -> dict[str, tuple[str, ...]]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}  # pip itself says what is wrong with it
    found: dict[str, tuple[str, ...]] = {}
    for section in ("global", "install"):
        for key, value in parser.items(section) if parser.has_section(section) else ():
            name = _RENAMED.get(key.replace("_", "-"), key.replace("_", "-"))
            if name in (*INDEX_KEYS, *WAY_KEYS) and value.split():
                found[name] = tuple(value.split())
    return found


NAME = "gpurun/environment"
LABEL, PACKAGES, BASE = "gpurun.environment", "gpurun.environment.packages", "gpurun.environment.base"
WHEELS = f"{PLACE}/wheels"
_FORMAT = 1
"""Counted up when other bytes come of the same key."""


@dataclass(frozen=True)
class EnvironmentPlan:
    """One environment, not yet built.

    Attributes:
        constraints: constraints of the recipe and of the user's pip.
        wheels: a folder on the head that is the only index; None = the network.
    """

    base: HeadImage
    requirements: Requirements
    settings: PipSettings
    constraints: tuple[str, ...]
    wheels: Path | None
    secret: Path | None
    key: str

    @property
    def reference(self) -> str:
        """Return the name of the image."""
        return f"{NAME}:{self.key[:16]}"

    @property
    def options(self) -> tuple[str, ...]:
        """Return pip's options after the requirements. If one requirement has a hash, pip requires a hash for each."""
        locked = ("--no-deps",) if self.requirements.locked else ()
        return (*locked, *(("-c", f"{PLACE}/in/constraints.txt") if self.constraints else ()))


def plan_environment(
    wanted: Environment, base: HeadImage, architecture: str, environ: Mapping[str, str]
) -> EnvironmentPlan:
    """Read the user's input and compute the environment's name.

    Raises:
        BadInput: a file cannot be read, or contains something that gpurun does not pass on.
    """
    requirements = requirements_of(wanted)
    users = users_settings(environ)
    wheels: Path | None = None
    named: object = None
    if wanted.index is None:
        settings = users
    elif re.match("https?://", wanted.index):
        settings = with_index(users, wanted.index)
    else:
        wheels = Path(wanted.index)
        named, settings = _wheels(wheels), with_folder(WHEELS)
    settings.check()
    if wanted.index is not None and requirements.has_index:
        raise BadInput(
            "both the requirements file and the recipe name a package index", where=wanted.path,
            hint="remove the index from the requirements file or from the recipe",
        )  # fmt: skip
    constraints = (*requirements.constraints, *(_users_constraints(users) if wanted.index is None else ()))
    if requirements.locked:
        constraints = ()
    told = {
        "format": _FORMAT, "base": base.id, "architecture": architecture, "place": ENVIRONMENT,
        "requirements": requirements.lines, "locked": requirements.locked, "constraints": constraints,
        "index": settings.named, "wheels": named,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return EnvironmentPlan(
        base, requirements, replace(settings, values=_without_constraints(settings)), constraints, wheels,
        None if wanted.secret is None else Path(wanted.secret), key,
    )  # fmt: skip


def requirements_of(wanted: Environment) -> Requirements:
    """Read what the user wants installed. Raises BadInput if a file cannot be used."""
    path = Path(wanted.path)
    if wanted.kind == "lock":
        return read_lock(path)
    return read_project(path) if wanted.kind == "project" else read_requirements(path)


def _wheels(folder: Path) -> list[tuple[str, str]]:
    """Return name and digest of each file that pip may read."""
    if not folder.is_dir():
        raise BadInput("the package index is neither a folder nor an http URL", where=str(folder))
    try:
        with os.scandir(folder) as scanned:
            names = sorted(entry.name for entry in scanned if entry.is_file(follow_symlinks=False))
        return [(name, _digest(folder / name)) for name in names]
    except OSError as error:
        raise BadInput(
            f"gpurun cannot read the package index: {error.strerror}", where=str(error.filename or folder)
        ) from None


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()


def _users_constraints(users: PipSettings) -> tuple[str, ...]:
    paths = [Path(word) for word in users.values.get("constraint", ()) if Path(word).is_absolute()]
    return tuple(line for path in paths if path.is_file() for line in text_of(path).splitlines())


def _without_constraints(settings: PipSettings) -> dict[str, tuple[str, ...]]:
    """Return the settings for pip's file. Constraints go into another file."""
    return {key: words for key, words in settings.values.items() if key != "constraint"}

"""Read requirement files on the head, check each line, and join them into the one list for pip.

pip reads no other file. This module refuses a line that names a file outside the folder, a path of the head, or a
password.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.inventory.load import read

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
    return checked(Requirements(tuple(found.lines), tuple(found.constraints)), str(path))


def checked(requirements: Requirements, where: str) -> Requirements:
    """Return the requirements. Raises BadInput if they name no package."""
    if not any(not line.startswith("-") for line in requirements.lines):
        raise BadInput(
            "the file names no package", where=where, hint="name a package, or remove `python` from the recipe"
        )
    return requirements


def parse(text: str, where: str) -> Iterator[tuple[str, str, str]]:
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
        for place, option, value in parse(text_of(path), str(path)):
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
    data = read(path, "the requirements", most_bytes=MAX_BYTES)
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

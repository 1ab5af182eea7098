"""Find out where pip gets packages: from the recipe, else from the settings of the submitting user's pip.

Uses only settings of the index and the connection to it. gpurun reads pip's configuration files and variables itself,
in pip's order (pip.pypa.io, "Configuration"), so the head needs no pip.
"""

from __future__ import annotations

import configparser
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpurun.errors import BadInput

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

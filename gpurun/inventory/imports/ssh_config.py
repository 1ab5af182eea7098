"""Import an OpenSSH client configuration, with Include and jump hosts: each host that it names becomes a host.

The import does not copy connection settings: the inventory names the configuration, and gpurun reads it each time.
Source: ssh_config(5).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpurun.documents.problems import shown
from gpurun.errors import BadInput
from gpurun.inventory.hostset import fold
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.imports.jumps import IS_JUMP, hops, jumps_of_command

_KEYWORD = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*?)\s*\Z")
_MAX_DEPTH = 16  # as in OpenSSH

Included = Callable[[str], Iterator[tuple[str, str]]]
"""Returns the files of an Include pattern, each with its name and text."""


@dataclass
class _Named:
    where: str
    settings: dict[str, str] = field(default_factory=dict)

    def machine(self, name: str) -> tuple[str, ...]:
        """Return what leads to the machine: equal values are one machine, whatever its names."""
        address = self.settings.get("hostname", name).replace("%h", name).lower()
        return (address, *(self.settings.get(key, "") for key in ("port", "proxyjump", "proxycommand")))


def read(text: str, draft: Draft, file: str, included: Included) -> None:
    """Fill a draft. ``Host`` patterns are settings, not hosts; a jump host is not a host for gangs."""
    reader = _BlockReader(draft, included)
    reader.file(text, file, 0)
    known: dict[tuple[str, ...], str] = {}
    for name, named in reader.hosts.items():
        machine = named.machine(name)
        if {name, machine[0]} & reader.jumps:
            draft.leave(f"{name}: {IS_JUMP}", named.where)
        elif named.settings.get("user") == "git":
            draft.leave(f"{name}: left out, because SSH logs in as git", named.where)
        elif machine in known:
            draft.leave(f"{name}: another name of the host {known[machine]}", named.where)
        elif draft.host(name, named.where):
            known[machine] = name
    draft.leave_out_by_name(file)
    draft.ssh_config = file
    taken = fold(draft.values) if draft.values else "no host"
    draft.took.append(f"{taken}; the SSH settings stay in {file}")


class _BlockReader:
    """The named hosts and the jump hosts in the lines read so far."""

    def __init__(self, draft: Draft, included: Included) -> None:
        self.hosts: dict[str, _Named] = {}
        self.jumps: set[str] = set()
        self._draft, self._included = draft, included
        self._block: list[_Named] = []

    def file(self, text: str, file: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise BadInput(
                f"Include is nested more than {_MAX_DEPTH} files deep; does a file include itself?", where=file
            )
        self._block = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                self._line(line, f"{file}:{number}", depth)

    def _line(self, line: str, where: str, depth: int) -> None:
        found = _KEYWORD.match(line)
        if not found:
            raise BadInput(f"the line is not a keyword and a value: {shown(line)}", where=where)
        keyword, value = found.group(1).lower(), found.group(2)
        if keyword == "host":
            names = _names(value, self._draft, where)
            self._block = [self.hosts.setdefault(name, _Named(where)) for name in names]
        elif keyword == "match":
            self._block = []
            self._draft.leave(
                f"Match {value}: SSH uses the settings of this block, but gpurun cannot tell which hosts match", where
            )
        elif keyword == "include":
            block = self._block
            for inner_file, inner in self._included(value):
                self.file(inner, inner_file, depth + 1)
            self._block = block
        else:
            self._setting(keyword, value)

    def _setting(self, keyword: str, value: str) -> None:
        if keyword == "proxyjump":
            self.jumps.update(hops(value))
        elif keyword == "proxycommand":
            self.jumps |= jumps_of_command(value)
        for named in self._block:
            named.settings.setdefault(keyword, value.strip('"'))


def _names(value: str, draft: Draft, where: str) -> Iterator[str]:
    try:
        words = shlex.split(value, comments=True)
    except ValueError as error:
        raise BadInput(f"{shown(value)}: {error}", where=where) from error
    for word in words:
        if any(c in word for c in "*?!"):
            if word != "*":
                draft.leave(f"Host {word}: a pattern, not a host", where)
        else:
            yield word

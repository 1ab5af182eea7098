"""Import lists of hosts: ``/etc/hosts``, hostfiles of MPI and DeepSpeed, CSV, and OpenSSH's configuration.

The import does not copy connection settings: the inventory names the configuration, and gpurun reads it each time.
Source: ssh_config(5).
"""

from __future__ import annotations

import csv
import io
import ipaddress
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory import fields
from gpurun.inventory.folding import fold
from gpurun.inventory.imports.draft import IS_JUMP, Draft, hops, jumps_of_command
from gpurun.quantities import count

# Import ``/etc/hosts``: an address, a name and its aliases on each line. Source: hosts(5).


_OF_EVERY_MACHINE = re.compile(
    r"localhost.*|ip6-.*|broadcasthost|.*\.localdomain|(host|gateway|kubernetes)\.docker\..*"
)


def read_etc_hosts(text: str, draft: Draft, file: str) -> None:
    """Fill a draft. The first name on a line is the host's; a host with several addresses keeps the first one."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) < 2 or not is_one(words[0]):
            continue
        where = f"{file}:{number}"
        address, name = words[0], words[1]
        if not _is_of_hosts(address) or _OF_EVERY_MACHINE.fullmatch(name):
            continue
        if name in draft.values:
            draft.leave(f"{address}: gpurun uses only the first address of {name}", where)
        elif draft.host(name, where):
            draft.put(name, "address", address, where)
            if len(words) > 2:
                draft.leave(f"other names: {', '.join(words[2:])}", where, name)
    draft.leave_out_by_name(file)
    draft.took.append(count(len(draft.values), "host with its address", "hosts with their addresses"))


def is_one(word: str) -> bool:
    """Return whether a word is an IP address."""
    try:
        return bool(ipaddress.ip_address(word.partition("%")[0]))
    except ValueError:
        return False


def _is_of_hosts(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_multicast or found.is_unspecified or found.is_reserved)


# Import MPI and DeepSpeed hostfiles: ``host slots=4``, ``host:4``; PBS's lists of nodes: a line for each slot.


_COLON = re.compile(r"([^\s:]+):(\d+)\Z")
_GPU_OF_HOST = re.compile(r"(.+)-gpu(\d+)\Z", re.ASCII)
_COUNTS = ("slots", "gpus")


@dataclass
class _HostLines:
    """What the lines of one host say.

    Attributes:
        slots: their sum; None if no line has any.
        lines: how many lines name the host.
    """

    where: str
    slots: int | None = None
    lines: int = 0


def read_hostfile(text: str, draft: Draft, file: str) -> None:
    """Fill a draft; the slots of a host on several lines are summed."""
    found: dict[str, _HostLines] = {}
    lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    named = [(f"{file}:{number}", words) for number, words in lines if words]
    is_gpu_file = all(len(words) == 1 and _GPU_OF_HOST.match(words[0]) for _, words in named)
    for where, words in named:
        name, count = _slots(words, draft, where)
        if is_gpu_file and (one := _GPU_OF_HOST.match(name)):
            name = one.group(1)
        user, at, bare = name.rpartition("@")
        if draft.host(bare, where):
            if at:
                draft.put(bare, "user", user, where)
            host = found.setdefault(bare, _HostLines(where))
            host.lines += 1
            if count is not None:
                host.slots = (host.slots or 0) + count
    if any(word.startswith("gpus=") for _, words in named for word in words[1:]):  # Torque: the others have none
        for host in found.values():
            host.slots = host.slots or 0
    _count(found, draft, file)


def _count(found: dict[str, _HostLines], draft: Draft, file: str) -> None:
    """Give each host its slots, or else its lines. A file without any of both says no numbers."""
    has_slots = any(host.slots is not None for host in found.values())
    has_lines = any(host.lines > 1 for host in found.values())
    if has_slots or has_lines:
        by_line = [name for name, host in found.items() if host.slots is None]
        for name, host in found.items():
            if host.slots != 0:
                draft.put(name, "gpus", str(host.lines if host.slots is None else host.slots), host.where)
        if by_line:
            draft.guess(f"{fold(by_line)}: the lines have no slots, so each line counts as one GPU")
        draft.leave_out(
            [name for name, host in found.items() if host.slots == 0],
            "left out, because the file gives 0 slots or GPUs",
            file,
        )
    draft.took.append(count(len(draft.values), "host") + (", with slots as gpus" if has_slots or has_lines else ""))


def _slots(words: list[str], draft: Draft, where: str) -> tuple[str, int | None]:
    name, count = words[0], None
    colon = _COLON.match(name)
    if colon:
        name, count = colon.group(1), int(colon.group(2)[:6])
    if len(words) > 2 and words[1].isdecimal() and "@" in words[2]:  # Grid Engine: host, slots, queue, processors
        return name, int(words[1][:6])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key.lower() in _COUNTS and value.isascii() and value.isdigit():
            count = int(value[:6])
        else:
            draft.leave(word, where)
    return name, count


# Import CSV: one host per row. Columns have the names of inventory fields; other columns become labels if possible.


_NAMES = ("name", "host", "hostname", "node", "nodename")
_SAME = {
    "ip": "address",
    "ip_address": "address",
    "ssh_port": "port",
    "ssh_user": "user",
    "gpu_count": "gpus",
    "num_gpus": "gpus",
    "gpu": "gpu_type",
    "gpu_type": "gpu_type",
    "switch": "rack",
}


def read_table(text: str, draft: Draft, file: str) -> None:
    """Fill a draft. Raises BadInput if no column contains host names."""
    header = text.partition("\n")[0]
    delimiter = max(",;\t|", key=header.count)
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff")), delimiter=delimiter)
    try:
        columns = [column.strip().lower().replace(" ", "_") for column in next(rows, [])]
        at = next((columns.index(name) for name in _NAMES if name in columns), None)
        if at is None:
            raise BadInput(f"the CSV table has no column named {' or '.join(_NAMES)}", where=f"{file}:1")
        for row in rows:
            if any(row):
                _row(dict(zip(columns, row, strict=False)), columns[at], draft, f"{file}:{rows.line_num}")
    except csv.Error as error:
        raise BadInput(f"the file is not CSV: {error}", where=f"{file}:{rows.line_num}") from error
    draft.leave_out_without_gpus(file)
    taken = ", ".join(column for column in columns if column)
    draft.took.append(f"{count(len(draft.values), 'host')}; columns {taken}")


def _row(row: dict[str, str], name_column: str, draft: Draft, where: str) -> None:
    host = row[name_column].strip()
    if not draft.host(host, where):
        return
    for column, cell in row.items():
        value, key = cell.strip(), _SAME.get(column, column)
        if not value or column == name_column:
            continue
        if key == "gpu_type":
            draft.gpu_type(host, value, where)
        elif key == "rack" or (key in fields.HOST and key != "labels"):
            draft.put(host, key, value, where)
        else:
            draft.label(host, key.removeprefix("labels.").removeprefix("label."), value, where)


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


def read_ssh_config(text: str, draft: Draft, file: str, included: Included) -> None:
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

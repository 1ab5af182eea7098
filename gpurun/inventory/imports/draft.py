"""The result of an import: hosts with values, and notes about imported, guessed and skipped values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpurun.documents.problems import shown
from gpurun.errors import BadInput
from gpurun.inventory.fields import LABEL_PATTERN
from gpurun.inventory.hostset import MAX_HOSTS, is_host_name
from gpurun.inventory.imports.generations import generation_of
from gpurun.inventory.settings import HostSetting, parse

_RACK_IN_NAME = re.compile(r"(?:^|[-_.])(r(?:ack)?[-_]?\d+)(?=[-_.]|n|$)", re.IGNORECASE)
_NOT_LABEL = re.compile(r"[^A-Za-z0-9._-]+")

_NVML_NAME = re.compile(r"[A-Z].*[ -].*\d")
"""Such as Tesla V100-SXM2-16GB, A100-SXM4-40GB: never a single word, never only lower-case letters."""


@dataclass
class Draft:
    """An unfinished inventory.

    Attributes:
        racks: host → rack, for hosts whose rack is in the source.
        values: host → field (or ``labels.NAME``) → setting, in the source's order.
        ssh_config: the OpenSSH configuration for connections to the hosts.
        took, guessed, left: notes about imported, guessed and skipped values, one sentence each; `left` with the place.
    """

    source: str
    racks: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, HostSetting]] = field(default_factory=dict)
    ssh_config: str | None = None
    took: list[str] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    _noted: set[str] = field(default_factory=set)

    def host(self, name: str, where: str) -> bool:
        """Add a host; False, and a note, if the name is not a valid host name. Idempotent."""
        if name in self.values:
            return True
        if not is_host_name(name):
            self.leave(f"{shown(name)} is not a host name", where)
            return False
        if len(self.values) >= MAX_HOSTS:
            raise BadInput(f"more than {MAX_HOSTS} hosts", where=where)
        self.values[name] = {}
        return True

    def put(self, host: str, key: str, text: str, where: str) -> bool:
        """Set a value of a host; False, and a note, if the value is not valid in an inventory."""
        try:
            (setting,) = parse([f"{key}={text}"])
        except BadInput as error:
            self.leave(error.message, where)
            return False
        if setting.field == "rack":
            self.racks[host] = text
        elif setting.value is not None:
            self.values[host][key] = setting
        return True

    def label(self, host: str, name: str, text: str, where: str) -> bool:
        """Set a label of a host. Replaces characters that label names cannot have."""
        fitting = _NOT_LABEL.sub("-", name).strip("-._")
        if not re.match(LABEL_PATTERN, fitting):
            self.leave(f"{shown(name)} is not a label name", where)
            return False
        return self.put(host, f"labels.{fitting}", text, where)

    def gpu_type(self, host: str, kind: str, where: str) -> None:
        """Set a GPU's type. An NVML name is the model; a scheduler's name, such as v100, becomes a label."""
        if _NVML_NAME.search(kind):
            self.gpu_model(host, kind, where)
        else:
            self.put(host, "labels.gpu_type", kind, where)
            self._generation(host, kind, where)

    def gpu_model(self, host: str, model: str, where: str) -> None:
        """Set a GPU's model, and the generation of that model."""
        self.put(host, "gpu_model", model, where)
        self._generation(host, model, where)

    def _generation(self, host: str, kind: str, where: str) -> None:
        generation = generation_of(kind)
        if generation is None:
            generation = _NOT_LABEL.sub("-", kind.lower()).strip("-._")
            self.guess(f"GPU type {kind} is its own generation")
        self.put(host, "generation", generation, where)

    def leave(self, what: str, where: str) -> None:
        """Add a note about a skipped value, once."""
        note = f"{where}: {what}"
        if note not in self._noted:
            self._noted.add(note)
            self.left.append(note)

    def guess(self, what: str) -> None:
        """Add a note about a guessed value, once."""
        if what not in self.guessed:
            self.guessed.append(what)

    def guess_racks(self) -> Mapping[str, str]:
        """Return every host's rack: from the source, otherwise from the host's name, otherwise ``r1``."""
        racks = dict(self.racks)
        by_name: list[str] = []
        others: list[str] = []
        for host in self.values:
            if host not in racks:
                found = _RACK_IN_NAME.search(host)
                racks[host] = found.group(1).lower() if found else "r1"
                (by_name if found else others).append(host)
        if by_name:
            self.guess(f"the racks of {len(by_name)} hosts, from their names")
        if others:
            self.guess(f"rack r1 for {len(others)} hosts")
        return racks

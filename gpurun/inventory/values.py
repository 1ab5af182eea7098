"""The kinds of values an inventory has.

Each reads a YAML node, says what is allowed, and knows its JSON Schema.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from yaml.nodes import Node, ScalarNode, SequenceNode

from gpurun.inventory.document import Report, entries, is_null
from gpurun.inventory.hostset import is_host_name
from gpurun.inventory.problems import shown

_TAG = "tag:yaml.org,2002:"
_MEMORY = re.compile(r"(\d{1,9})\s*(MiB|GiB|TiB)?\Z", re.ASCII)
_MEMORY_MIB = {None: 1, "MiB": 1, "GiB": 1024, "TiB": 1024 * 1024}
_INDEX_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?\Z", re.ASCII)

LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z", re.ASCII)
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}\Z", re.ASCII)
HCA = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?::[1-9][0-9]{0,2})?\Z", re.ASCII)
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?\Z", re.ASCII)
DOCKER_HOST = re.compile(r"(?:unix:///|tcp://|ssh://)[\x21-\x7e]+\Z", re.ASCII)


class Kind(Protocol):
    """How one value is read."""

    def read(self, node: Node, report: Report, name: str) -> object:
        """The value, or None after noting in the report what is wrong with it."""

    def schema(self) -> dict[str, Any]:
        """The value's JSON Schema."""


def _scalar(node: Node, report: Report, name: str, expected: str, allowed: tuple[str, ...] = ()) -> str | None:
    if isinstance(node, ScalarNode) and not is_null(node):
        return str(node.value)
    got = "nothing" if isinstance(node, ScalarNode) else "a list or a mapping"
    report.wrong(node, f"{name} must be {expected}, not {got}", allowed=allowed)
    return None


@dataclass(frozen=True)
class Whole:
    """A whole number, written in decimal."""

    least: int
    most: int
    nullable: bool = False

    def read(self, node: Node, report: Report, name: str) -> int | None:
        """See Kind."""
        if self.nullable and is_null(node):
            return None
        allowed = (f"{self.least} to {self.most}",)
        text = _scalar(node, report, name, "a whole number", allowed)
        if text is None:
            return None
        decimal = text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")
        if not decimal or node.tag != _TAG + "int":
            report.wrong(node, f"{name}: {shown(text)} is not a whole number", allowed=allowed)
            return None
        if len(text) > 18 or not self.least <= int(text) <= self.most:
            report.wrong(node, f"{name}: {text[:40]} is out of range", allowed=allowed)
            return None
        return int(text)

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        kind = ["integer", "null"] if self.nullable else "integer"
        return {"type": kind, "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Positive:
    """A number above 0, with or without a fraction."""

    def read(self, node: Node, report: Report, name: str) -> float | None:
        """See Kind."""
        text = _scalar(node, report, name, "a number")
        if text is None:
            return None
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) and float(text) > 0:
            return float(text)
        report.wrong(node, f"{name}: {shown(text)} is not a number above 0", allowed=("such as 1 or 2.5",))
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": "number", "exclusiveMinimum": 0}


@dataclass(frozen=True)
class Flag:
    """``true`` or ``false``."""

    def read(self, node: Node, report: Report, name: str) -> bool | None:
        """See Kind."""
        if isinstance(node, ScalarNode) and node.tag == _TAG + "bool" and node.value in ("true", "false"):
            return bool(node.value == "true")
        text = shown(node.value) if isinstance(node, ScalarNode) else "a list or a mapping"
        report.wrong(node, f"{name}: {text} is not a truth value", allowed=("true", "false"))
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    options: tuple[str, ...]

    def read(self, node: Node, report: Report, name: str) -> str | None:
        """See Kind."""
        text = _scalar(node, report, name, "a word", self.options)
        if text is None or text in self.options:
            return text
        report.wrong(node, f"{name}: {shown(text)} is unknown", allowed=self.options)
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"enum": list(self.options)}


@dataclass(frozen=True)
class Word:
    """A text that matches a pattern as a whole."""

    pattern: re.Pattern[str]
    expected: str

    def read(self, node: Node, report: Report, name: str) -> str | None:
        """See Kind."""
        text = _scalar(node, report, name, self.expected)
        if text is None or self.pattern.match(text):
            return text
        report.wrong(node, f"{name}: {shown(text)} is not {self.expected}")
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": "string", "pattern": "^" + self.pattern.pattern.replace("\\Z", "$")}


@dataclass(frozen=True)
class Text:
    """Any printable text of one line."""

    longest: int = 200
    numbers: bool = False

    def read(self, node: Node, report: Report, name: str) -> str | None:
        """See Kind."""
        text = _scalar(node, report, name, "a text")
        if text is None:
            return None
        if not text.strip() or len(text) > self.longest or not text.isprintable():
            report.wrong(node, f"{name}: {shown(text)} is not a printable text of 1 to {self.longest} characters")
            return None
        return text

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        kind = ["string", "number", "boolean"] if self.numbers else "string"
        return {"type": kind, "minLength": 1, "maxLength": self.longest}


@dataclass(frozen=True)
class Memory:
    """An amount of memory in MiB: ``81920``, or with a unit, ``80GiB``."""

    def read(self, node: Node, report: Report, name: str) -> int | None:
        """See Kind."""
        text = _scalar(node, report, name, "an amount of memory", ("MiB, or such as 80GiB",))
        if text is None:
            return None
        found = _MEMORY.match(text)
        amount = int(found.group(1)) * _MEMORY_MIB[found.group(2)] if found else 0
        if amount:
            return amount
        allowed = ("MiB as a whole number, or such as 80GiB",)
        report.wrong(node, f"{name}: {shown(text)} is not an amount of memory", allowed=allowed)
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": ["integer", "string"], "minimum": 1, "pattern": r"^\d{1,9}\s*(MiB|GiB|TiB)?$"}


def is_address(text: str) -> bool:
    """Whether a text is a host name or an IP address."""
    if is_host_name(text):
        return True
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class Address:
    """A host name or an IP address, or a range of them for a range of hosts: ``10.0.1.[1-16]``."""

    def read(self, node: Node, report: Report, name: str) -> str | None:
        """See Kind. A range comes back as it is; `gpurun.inventory.validate` pairs it with the hosts."""
        text = _scalar(node, report, name, "a host name or an IP address")
        if text is None or is_address(text) or "[" in text:
            return text
        report.wrong(node, f"{name}: {shown(text)} is not a host name or an IP address")
        return None

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": "string", "pattern": r"^[A-Za-z0-9:\[][A-Za-z0-9.:_,\[\]-]*$"}


@dataclass(frozen=True)
class Many:
    """A list of values of one kind."""

    item: Kind

    def read(self, node: Node, report: Report, name: str) -> tuple[object, ...]:
        """See Kind."""
        if is_null(node):
            return ()
        if not isinstance(node, SequenceNode):
            report.wrong(node, f"{name} must be a list")
            return ()
        return tuple(self.item.read(child, report, name) for child in node.value)

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        return {"type": "array", "items": self.item.schema()}


@dataclass(frozen=True)
class GpuIndices:
    """GPU indices: a list of whole numbers, or a text such as ``0-3,6``."""

    def read(self, node: Node, report: Report, name: str) -> tuple[int, ...]:
        """See Kind."""
        if isinstance(node, SequenceNode):
            numbers = [_INDEX.read(child, report, name) for child in node.value]
            return tuple(number for number in numbers if number is not None)
        text = _scalar(node, report, name, "GPU indices")
        indices: list[int] = []
        for part in (text or "").replace(" ", "").split(","):
            found = _INDEX_RANGE.match(part)
            if not found:
                report.wrong(node, f"{name}: {shown(text or '')} is not GPU indices", allowed=("such as 0-3,6",))
                return ()
            first = int(found.group(1))
            indices.extend(range(first, int(found.group(2) or first) + 1))
        return tuple(indices)

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        text = {"type": "string", "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*$"}
        return {"oneOf": [{"type": "array", "items": _INDEX.schema()}, text, {"type": "integer", "minimum": 0}]}


@dataclass(frozen=True)
class Labels:
    """A mapping of label names to texts."""

    key: re.Pattern[str] = LABEL
    value: Kind = field(default_factory=lambda: Text(numbers=True))

    def read(self, node: Node, report: Report, name: str) -> dict[str, str]:
        """See Kind."""
        labels = {}
        for key, (key_node, value_node) in entries(node, report, name).items():
            if not self.key.match(key):
                report.wrong(key_node, f"{name}: {shown(key)} is not a label name (letters, digits, '.', '_', '-')")
            labels[key] = str(self.value.read(value_node, report, f"{name}.{key}"))
        return labels

    def schema(self) -> dict[str, Any]:
        """See Kind."""
        names = {"pattern": "^" + self.key.pattern.replace("\\Z", "$")}
        return {
            "type": ["object", "null"],
            "propertyNames": names,
            "additionalProperties": self.value.schema(),
        }


_INDEX = Whole(0, 1023)

"""``key=value`` words of a command line: checked as the inventory's own values are, ready to be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import yaml
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.errors import BadInput
from gpurun.inventory import fields, roundtrip
from gpurun.inventory.document import Report, compose
from gpurun.inventory.problems import InventoryError, shown
from gpurun.inventory.values import LABEL, GpuIndices, Kind, Labels, Many, Text

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Setting:
    """One value to set.

    Attributes:
        field: a key of a host, or ``rack``.
        label: which label, if the field is ``labels``.
        value: as the model has it; None = take the host's own value away, what it inherits counts.
        text: as it was typed.
    """

    field: str
    value: object
    text: str
    label: str | None = None

    @property
    def tree(self) -> object:
        """The value as roundtrip writes it."""
        if self.label is not None:
            return _scalar_tree(self.text, text_kind=False)
        kind = fields.HOST[self.field].kind
        if isinstance(kind, (Many, GpuIndices)):
            return _tree(_composed(self.text))
        return _scalar_tree(self.text, text_kind=not isinstance(self.value, (int, float)) or "B" in self.text)


def parse(words: Iterable[str]) -> tuple[Setting, ...]:
    """Settings from words such as ``gpus=8``, ``labels.team=vision``, ``port=`` (take away), ``rack=r2``.

    Raises BadInput: not ``key=value``, an unknown key, a value that is not allowed there, a key twice.
    """
    found: dict[str, Setting] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise BadInput(f"{shown(word)} is not key=value", hint="such as gpus=8 or labels.team=vision")
        if key in found:
            raise BadInput(f"{shown(key)} is given twice")
        found[key] = _setting(key, text)
    return tuple(found.values())


def parse_labels(words: Iterable[str]) -> tuple[Setting, ...]:
    """Settings from label words: ``team=vision`` sets one, ``team-`` takes it away. Raises BadInput."""
    return parse(
        f"labels.{word[:-1]}=" if word.endswith("-") and "=" not in word else f"labels.{word}" for word in words
    )


def from_mapping(values: Mapping[str, object]) -> tuple[Setting, ...]:
    """Settings of model values, as importers have them; labels as a mapping."""
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            words.extend(f"{key}.{name}={text}" for name, text in value.items())
        elif isinstance(value, tuple):
            words.append(f"{key}={[list(v) if isinstance(v, tuple) else v for v in value]}")
        else:
            words.append(f"{key}={value}")
    return parse(words)


def _setting(key: str, text: str) -> Setting:
    field, dot, label = key.partition(".")
    if field == "labels" and dot:
        if not LABEL.match(label):
            raise BadInput(f"{shown(label)} is not a label name (letters, digits, '.', '_', '-')")
        value = _read(Text(numbers=True), _node(text, text_kind=True), key) if text else None
        return Setting("labels", value, text, label)
    if key == "rack":
        return Setting("rack", _read(fields.NAME, _node(text, text_kind=True), key), text)
    if key not in fields.HOST or isinstance(fields.HOST[key].kind, Labels):
        allowed = ", ".join([*(name for name in fields.HOST if name != "labels"), "labels.NAME", "rack"])
        raise BadInput(f"unknown key {shown(key)} (allowed: {allowed})")
    if not text:
        return Setting(key, None, text)
    kind = fields.HOST[key].kind
    structured = isinstance(kind, (Many, GpuIndices))
    node = _composed(text) if structured else _node(text, text_kind=isinstance(kind, Text))
    return Setting(key, _read(kind, node, key), text)


def _read(kind: Kind, node: Node, name: str) -> object:
    report = Report("")
    value = kind.read(node, report, name)
    if report.problems:
        said = [p.message + (f" (allowed: {', '.join(p.allowed)})" if p.allowed else "") for p in report.problems]
        raise BadInput("; ".join(said))
    return value


def _resolved(text: str) -> str:
    resolver = yaml.SafeLoader("")
    return str(resolver.resolve(ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]


def _node(text: str, *, text_kind: bool) -> ScalarNode:
    nowhere = yaml.Mark("", 0, 0, 0, None, 0)
    return ScalarNode(_TAG + "str" if text_kind else _resolved(text), text, nowhere, nowhere)


def _composed(text: str) -> Node:
    """A value with structure, as YAML in one line: ``[0, 1]``, ``0-3``."""
    try:
        node = compose(text.encode(), "value")
    except InventoryError as error:
        raise BadInput(f"{shown(text)} is not a YAML value: {error.problems[0].message}") from error
    if node is None:
        raise BadInput(f"{shown(text)} is not a YAML value")
    return node


def _scalar_tree(text: str, *, text_kind: bool) -> str:
    """A text as it is written: quoted where YAML would take it for something else than it is."""
    tag = _resolved(text)
    if tag == _TAG + "null" or (text_kind and tag != _TAG + "str"):
        quoted: str = DoubleQuotedScalarString(text)
        return quoted
    return text


def _tree(node: Node) -> object:
    if isinstance(node, SequenceNode):
        return roundtrip.flow_list([_tree(child) for child in node.value])
    assert isinstance(node, ScalarNode) and not isinstance(node, MappingNode)
    return str(node.value)

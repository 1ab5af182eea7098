"""Parse ``key=value`` words of a command line and check them like the inventory's own values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import yaml
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.convert import convert, convert_node, did_you_mean
from gpurun.documents.nodes import compose
from gpurun.documents.problems import DocumentError, shown
from gpurun.errors import BadInput
from gpurun.inventory import fields, roundtrip

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class HostSetting:
    """One value to set.

    Attributes:
        field: a key of a host, or ``rack``.
        label: name of the label, if the field is ``labels``.
        value: the converted value; None = remove the host's own value, so that the inherited value applies.
        text: the text that the user typed.
    """

    field: str
    value: object
    text: str
    label: str | None = None

    @property
    def tree(self) -> object:
        """The value in the form that roundtrip writes."""
        if self.label is not None:
            return _scalar_tree(self.text, text_kind=False)
        if fields.HOST[self.field].item is not None:
            return _tree(_composed(self.text))
        return _scalar_tree(self.text, text_kind=not isinstance(self.value, (int, float)) or "B" in self.text)


def parse(words: Iterable[str]) -> tuple[HostSetting, ...]:
    """Parse settings such as ``gpus=8``, ``labels.team=vision``, ``port=`` (remove), ``rack=r2``.

    Raises BadInput: not ``key=value``, an unknown key, an invalid value, a repeated key.
    """
    found: dict[str, HostSetting] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise BadInput(
                f"{shown(word)} is not key=value", hint="write a setting such as gpus=8 or labels.team=vision"
            )
        if key in found:
            raise BadInput(f"{shown(key)} is given twice")
        found[key] = _setting(key, text)
    return tuple(found.values())


def parse_labels(words: Iterable[str]) -> tuple[HostSetting, ...]:
    """Parse label words: ``team=vision`` sets a label, ``team-`` removes it. Raises BadInput."""
    return parse(_label_setting(word) for word in words)


def _label_setting(word: str) -> str:
    if "=" in word:
        return f"labels.{word}"
    if not word.endswith("-"):
        raise BadInput(f"{shown(word)} sets no label", hint="NAME=VALUE sets a label, NAME- removes it")
    return f"labels.{word[:-1]}="


def from_mapping(values: Mapping[str, object]) -> tuple[HostSetting, ...]:
    """Return settings for the values of an importer; labels are a mapping."""
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            words.extend(f"{key}.{name}={text}" for name, text in value.items())
        elif isinstance(value, tuple):
            words.append(f"{key}={[list(v) if isinstance(v, tuple) else v for v in value]}")
        else:
            words.append(f"{key}={value}")
    return parse(words)


def _setting(key: str, text: str) -> HostSetting:
    field, dot, label = key.partition(".")
    if field == "labels" and dot:
        convert(label, fields.LABEL, "labels")
        return HostSetting("labels", convert(text, fields.LABEL_TEXT, key) if text else None, text, label)
    if key == "rack":
        return HostSetting("rack", convert(text, fields.NAME, key), text)
    if key not in fields.HOST or key == "labels":
        allowed = [*(name for name in fields.HOST if name != "labels"), "labels.NAME", "rack"]
        meant = did_you_mean(key, allowed) or f" (allowed: {', '.join(allowed)})"
        raise BadInput(f"unknown key {shown(key)}{meant}")
    kind = fields.HOST[key]
    if not text:
        return HostSetting(key, None, text)
    return HostSetting(key, convert_node(_composed(text), kind, key) if kind.item else convert(text, kind, key), text)


def _resolved(text: str) -> str:
    resolver = yaml.SafeLoader("")
    return str(resolver.resolve(ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]


def _composed(text: str) -> Node:
    """Parse a value with structure as one line of YAML: ``[0, 1]``, ``0-3``."""
    try:
        node = compose(text.encode(), "value")
    except DocumentError as error:
        raise BadInput(f"{shown(text)} is not a YAML value: {error.problems[0].message}") from error
    if node is None:
        raise BadInput(f"{shown(text)} is not a YAML value")
    return node


def _scalar_tree(text: str, *, text_kind: bool) -> str:
    """Return the text as YAML: in quotes if YAML would read it as another type."""
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

"""The YAML of an inventory as an editable tree: ruamel.yaml's round trip.

The tree keeps the text of every scalar (``0x6a``, ``yes``, ``~``) with its quotes, and anchors, aliases and flow or
block style. It drops comments and spacing: `gpurun.inventory.merge` merges the difference between two trees into the
text that a user wrote.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase, CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode, SequenceNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, ScalarString
from ruamel.yaml.tag import Tag

from gpurun.errors import BadInput

NOTHING = "gpurun-nothing-stands-here"  # the output for an omitted value, so that it has a place
_ENDLESS = 1_000_000_000
_COMMENT = re.compile("#[^\n]*")


class _TextResolver(VersionedResolver):
    """Reads every scalar as a text, so that the output has the same form as the input."""

    def resolve(self, kind: type, value: str | None, implicit: tuple[bool, bool]) -> Tag:
        if kind is ScalarNode:
            left_out = value == "" and implicit[0]
            return Tag(suffix="tag:yaml.org,2002:null" if left_out else "tag:yaml.org,2002:str")
        return Tag(suffix="tag:yaml.org,2002:seq" if kind is SequenceNode else "tag:yaml.org,2002:map")


class _Representer(RoundTripRepresenter):
    """Writes an omitted value as NOTHING."""


def _represent_nothing(representer: RoundTripRepresenter, _: None) -> ScalarNode:
    return representer.represent_scalar("tag:yaml.org,2002:str", NOTHING)


_Representer.add_representer(type(None), _represent_nothing)


def _yaml(indent: int) -> YAML:
    made = YAML()
    made.Resolver = _TextResolver
    made.Representer = _Representer
    made.preserve_quotes = True
    made.width = _ENDLESS
    made.map_indent = indent
    return made


def read(text: str) -> CommentedMap:
    """Return the tree of a document that `gpurun.documents.nodes.compose` accepted; an empty mapping for no document.

    Raises BadInput: ruamel.yaml does not read everything that libyaml reads.
    """
    try:
        loaded = _yaml(2).load(_without_comments(text))
    except YAMLError as error:
        raise not_editable() from error
    tree = loaded if isinstance(loaded, CommentedMap) else CommentedMap()
    for node in containers(tree):
        if hasattr(node, "_yaml_comment"):
            del node._yaml_comment
        if node.anchor.value:
            node.anchor.always_dump = True  # also an anchor without an alias
    return tree


def not_editable() -> BadInput:
    """Return the error for a valid file that ruamel.yaml cannot write again without changes."""
    return BadInput(
        "gpurun cannot change the inventory without a loss of a part of the text",
        hint="change the inventory by hand, with `gpurun inventory edit`",
    )


def _without_comments(text: str) -> str:
    """Return the same values without comments and tabs: libyaml accepts tabs where ruamel.yaml does not."""
    out, at = [], 0
    for token in yaml.scan(text, Loader=yaml.CSafeLoader):
        start, end = token.start_mark.index, token.end_mark.index
        out += [_COMMENT.sub("", text[at:start]).replace("\t", " "), text[start:end]]
        at = end
    return "".join(out)


def write(tree: CommentedMap, indent: int = 2) -> str:
    """Return the document of a tree, without comments."""
    stream = io.StringIO()
    _yaml(indent).dump(tree, stream)
    return stream.getvalue()


def containers(node: object, seen: set[int] | None = None) -> Iterator[CommentedMap | CommentedSeq]:
    """Return a node and all mappings and lists in it, each once."""
    seen = set() if seen is None else seen
    if not isinstance(node, (CommentedMap, CommentedSeq)) or id(node) in seen:
        return
    seen.add(id(node))
    yield node
    for child in node.values() if isinstance(node, CommentedMap) else node:
        yield from containers(child, seen)


def shared(tree: CommentedMap) -> dict[int, tuple[int, object]]:
    """Map the id of each container that appears in several places to the parent's id and the key of its first place."""
    first: dict[int, tuple[int, object]] = {}
    several: dict[int, tuple[int, object]] = {}

    def visit(node: object, parent: int, key: object) -> None:
        if not isinstance(node, (CommentedMap, CommentedSeq)):
            return
        if id(node) in first:
            several[id(node)] = first[id(node)]
            return
        first[id(node)] = (parent, key)
        for name, child in node.items() if isinstance(node, CommentedMap) else enumerate(node):
            visit(child, id(node), name)

    visit(tree, 0, None)
    return several


def twin(node: Any, several: dict[int, tuple[int, object]]) -> Any:
    """Return an independent copy. Aliases inside stay aliases; the copy has no anchor."""
    if isinstance(node, CommentedMap):
        mapping = flow_map() if node.fa.flow_style() else CommentedMap()
        for key, child in node.items():
            mapping[key] = child if id(child) in several else twin(child, several)
        return mapping
    if isinstance(node, CommentedSeq):
        sequence = CommentedSeq([child if id(child) in several else twin(child, several) for child in node])
        if node.fa.flow_style():
            sequence.fa.set_flow_style()
        return sequence
    if isinstance(node, ScalarString):
        return type(node)(str(node))
    return copy.copy(node)


def flow_map() -> CommentedMap:
    """Return an empty mapping in flow style, ``{…}``."""
    mapping = CommentedMap()
    mapping.fa.set_flow_style()
    return mapping


def flow_list(items: list[object]) -> CommentedSeq:
    """Return a list in flow style, ``[…]``."""
    sequence = CommentedSeq(items)
    sequence.fa.set_flow_style()
    return sequence


def is_flow(node: CommentedBase) -> bool:
    """Return True if a container is in flow style."""
    return bool(node.fa.flow_style())


def styled_like(text: str, example: object) -> str:
    """Return a text with the quotes of another; in double quotes if the other has none and the text has brackets."""
    if isinstance(example, ScalarString) and type(example).__name__.endswith("QuotedScalarString"):
        quoted: str = type(example)(text)
        return quoted
    return DoubleQuotedScalarString(text) if "[" in text or "," in text else text

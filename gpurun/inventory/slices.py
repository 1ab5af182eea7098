"""Find the lines of each rack in an inventory, so that an edit of one rack need not parse thousands of lines."""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode


def rack_lines(text: str) -> Mapping[str, tuple[int, int]]:
    """Return start and end of each rack's lines; the comments before the next rack belong to the previous one.

    Empty if racks cannot be parsed one by one: they are in flow style, or there are anchors and aliases.
    """
    if "&" in text or "*" in text:
        return {}
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    racks = _value(root, "racks")
    if not isinstance(racks, MappingNode) or racks.flow_style or not racks.value:
        return {}
    starts = [_line_start(text, key) for key, _ in racks.value]
    after = [_line_start(text, key) for key, _ in root.value if _line_start(text, key) > starts[-1]]  # type: ignore[union-attr]
    ends = [*starts[1:], min(after, default=len(text))]
    return {key.value: (start, end) for (key, _), start, end in zip(racks.value, starts, ends, strict=True)}


def _value(node: Node | None, name: str) -> Node | None:
    if not isinstance(node, MappingNode) or node.flow_style:
        return None
    return next((value for key, value in node.value if isinstance(key, ScalarNode) and key.value == name), None)


def _line_start(text: str, node: Node) -> int:
    mark = node.start_mark
    assert mark is not None  # the C composer always sets it
    return text.rfind("\n", 0, mark.index) + 1

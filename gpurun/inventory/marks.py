"""Edit YAML text between the marks of its nodes: all other text stays as the user wrote it, byte for byte.

`parse` returns the nodes with their places. A `TextEdit` collects replacements and makes them all at once:

    gpus: 4     # four      the scalar 4 is at 6..7: replace 6..7 by 8
    gpus: 8     # four

New pairs follow the style of their mapping: lines of their own in block style, behind a comma in braces. A caller must
parse the result and check its values, because YAML has more styles than this module knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import yaml

from gpurun.errors import BadInput

_COLON = re.compile(r"[ \t]*:")
_COMMA = re.compile(r"(?:[ \t]*#[^\n]*\n)?\s*,")
_ANCHOR = re.compile(r"&[A-Za-z0-9_-]+[ \t]*")
_OPENING = re.compile(r"(?:&[A-Za-z0-9_-]+)?(?:\s|#[^\n]*\n)*\{")
_END_OF_LINE = re.compile(r"[ \t]*(#[^\r\n]*)?(?=\r?\n|\Z)")
_SPACES = re.compile(r" *")
_COMMENT = re.compile(r"#[^\r\n]*")
_SIMPLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*\Z")


@dataclass(eq=False, slots=True)
class MarkedNode:
    """A node of a document, and its place in the text.

    Attributes:
        document: the whole text.
        start: the first character, of the anchor if there is one. An omitted value is behind the key's colon; in
            braces, behind the space after the colon.
        end: behind the last character of the last token.
        style: of a scalar: its quote, ``|`` or ``>``; empty = plain.
        children: items; keys and values in turn.
        target: the node that an alias repeats.
    """

    document: str
    start: int
    end: int
    kind: Literal["mapping", "sequence", "scalar", "alias"]
    value: str = ""
    anchor: str | None = None
    is_flow: bool = True
    style: str = ""
    children: list[MarkedNode] = field(default_factory=list)
    target: MarkedNode | None = None

    @property
    def text(self) -> str:
        """The text of the node, with its anchor."""
        return self.document[self.start : self.end]

    @property
    def pairs(self) -> list[tuple[MarkedNode, MarkedNode]]:
        """The keys and values of a mapping; empty for all other nodes."""
        return list(zip(self.children[::2], self.children[1::2], strict=True)) if self.kind == "mapping" else []

    @property
    def is_merge(self) -> bool:
        """True for the key of a merge."""
        return self.value == "<<" and not self.style

    def get(self, key: str) -> MarkedNode | None:
        """Return the value of a mapping's own key."""
        return next((value for name, value in self.pairs if name.value == key), None)

    def merged(self) -> Iterator[MarkedNode]:
        """Return the mapping, behind any alias, and all that it merges, highest precedence first."""
        node = self.target or self
        if node.kind != "mapping":
            return
        yield node
        for key, value in node.pairs:
            sources = value.target or value
            for source in (sources.children if sources.kind == "sequence" else [value]) if key.is_merge else []:
                yield from source.merged()

    def effective(self) -> dict[str, MarkedNode]:
        """Return the values of a mapping, with merges applied."""
        return {
            key.value: value
            for mapping in reversed(list(self.merged()))
            for key, value in mapping.pairs
            if not key.is_merge
        }

    def walk(self) -> Iterator[MarkedNode]:
        """Return the node and all nodes in it. Does not follow aliases."""
        yield self
        for child in self.children:
            yield from child.walk()


def parse(text: str, anchors: Mapping[str, MarkedNode] | None = None) -> MarkedNode:
    """Return the root of a document that `gpurun.documents.convert` accepted.

    Args:
        anchors: the nodes of anchors that are not in the text.
    """
    events = iter(yaml.parse(text, Loader=yaml.CSafeLoader))
    known = dict(anchors or {})
    try:
        for event in events:
            if isinstance(event, yaml.NodeEvent):
                return _built(text, event, events, known)
    except yaml.YAMLError as error:  # in the text of a pass before
        raise not_editable() from error
    raise not_editable()


def _built(text: str, event: yaml.Event, events: Iterator[yaml.Event], known: dict[str, MarkedNode]) -> MarkedNode:
    first, last = event.start_mark, event.end_mark
    assert first is not None and last is not None  # the C parser always sets them
    if isinstance(event, yaml.AliasEvent):
        target = known.get(event.anchor or "")
        value = target.value if target is not None else ""
        return MarkedNode(text, first.index, last.index, "alias", value, target=target)
    if isinstance(event, yaml.ScalarEvent):
        node = MarkedNode(text, first.index, last.index, "scalar", event.value, event.anchor, style=event.style or "")
        if node.style in ("|", ">"):  # ends before the next token, perhaps lines below
            node.end = node.start + len(node.text.rstrip())
        known |= {node.anchor: node} if node.anchor else {}
        return node
    assert isinstance(event, yaml.CollectionStartEvent)
    kind: Literal["mapping", "sequence"] = "mapping" if isinstance(event, yaml.MappingStartEvent) else "sequence"
    node = MarkedNode(text, first.index, last.index, kind, anchor=event.anchor, is_flow=bool(event.flow_style))
    known |= {node.anchor: node} if node.anchor else {}
    while not isinstance(event := next(events), yaml.CollectionEndEvent):
        child = _built(text, event, events, known)
        if kind == "mapping" and len(node.children) % 2 and child.start == child.end:
            colon = _COLON.match(text, node.children[-1].end)
            at = colon.end() if colon else node.children[-1].end
            child.start = child.end = at + (colon is not None and node.is_flow and text[at : at + 1] == " ")
        node.children.append(child)
    ends = [node.end, *(child.end for child in node.children[-2:])]
    node.end = event.end_mark.index if node.is_flow and event.end_mark is not None else max(ends)
    return node


def not_editable() -> BadInput:
    """Return the error for a valid document whose style gpurun cannot edit."""
    return BadInput(
        "gpurun cannot change the inventory without a loss of a part of the text",
        hint="change the inventory by hand, with `gpurun inventory edit`",
    )


# Nodes and texts as YAML.


def plain_or_quoted(text: str) -> str:
    """Return a text as a scalar, in quotes if YAML would not read the plain text as it is."""
    if _SIMPLE.match(text):
        return text
    try:
        root = yaml.compose(f"{{a: {text}}}", Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        root = None
    (_, value), *others = root.value if isinstance(root, yaml.MappingNode) else [(None, None)]
    is_plain = isinstance(value, yaml.ScalarNode) and not value.style and value.value == text and not others
    return text if is_plain else _in_style(text, '"' if "'" in text else "'")


def key_like(text: str, example: MarkedNode | None) -> str:
    """Return a key with the quotes of another; in double quotes if it has none and the text has brackets."""
    style = example.style if example is not None else ""
    return _in_style(text, style or ('"' if "[" in text or "," in text else ""))


def _in_style(text: str, style: str) -> str:
    if style == "'":
        return "'" + text.replace("'", "''") + "'"
    return in_double_quotes(text) if style == '"' else text


def in_double_quotes(text: str) -> str:
    """Return a text in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def flow(node: MarkedNode, resolved: Collection[int] = ()) -> str:
    """Return a node in one line, without comments and anchors.

    Args:
        resolved: ids of nodes: where an alias repeats such a node, the text repeats the node.
    """
    if node.kind == "alias":
        return flow(node.target, resolved) if node.target is not None and id(node.target) in resolved else node.text
    if node.kind == "scalar":
        return _flow_scalar(node)
    if node.kind == "sequence":
        return f"[{', '.join(flow(child, resolved) for child in node.children)}]"
    inner = [child for child in node.walk() if child is not node]
    if node.is_flow and "\n" not in node.text and not any(n.anchor or id(n.target) in resolved for n in inner):
        return _ANCHOR.sub("", node.text, count=1) if node.anchor else node.text
    if any(id(source) in resolved for source in node.merged() if source is not node):
        pairs = [f"{key}: {flow(value, resolved)}" for key, value in node.effective().items()]
    else:
        pairs = [f"{_flow_scalar(key)}: {flow(value, resolved)}" for key, value in node.pairs]
    return f"{{{', '.join(pairs)}}}"


def _flow_scalar(node: MarkedNode) -> str:
    text = node.text[len(node.anchor) + 1 :].strip() if node.anchor else node.text
    if node.style in ("|", ">") or "\n" in text:
        return in_double_quotes(node.value)
    return text if node.style else plain_or_quoted(text) if text else "null"


def comments_of(key: MarkedNode, value: MarkedNode, end: int) -> list[str]:
    """Return the comments between a key and `end`, which is behind the value, without ``#``."""
    leaves = [node for node in value.walk() if node.kind in ("scalar", "alias")]
    ends, starts = [key.end, *(leaf.end for leaf in leaves)], [*(leaf.start for leaf in leaves), end]
    gaps = [key.document[before:after] for before, after in zip(ends, starts, strict=True)]
    comments = [found.group().lstrip("# \t").rstrip() for gap in gaps for found in _COMMENT.finditer(gap)]
    return [comment for comment in comments if comment]


@dataclass(frozen=True)
class NewPair:
    """A new key and value.

    Attributes:
        lines: the pair in block style; the key is in the first column.
        flow: the pair in one line, without comments.
        comments: what to write above the line that gets `flow`.
    """

    lines: tuple[str, ...]
    flow: str
    comments: tuple[str, ...] = ()


def pair_of(text: str, anchors: Mapping[str, MarkedNode] | None = None) -> NewPair:
    """Return the pair in a text. `anchors` as for `parse`."""
    if "\n" not in text:
        return NewPair((text,), text)
    ((key, value),) = parse(text, anchors).pairs
    return NewPair(tuple(text.splitlines()), f"{flow(key)}: {flow(value)}")


def nested(key: str, pairs: Sequence[NewPair], indent: int, *, in_flow: bool) -> NewPair:
    """Return a key whose value is a new mapping."""
    comments = tuple(comment for pair in pairs for comment in pair.comments)
    text = f"{key}: {{{', '.join(pair.flow for pair in pairs)}}}"
    above = tuple(f"# {comment}" for comment in comments)
    below = _indented((line for pair in pairs for line in pair.lines), indent)
    return NewPair((*above, text) if in_flow else (f"{key}:", *below), text, comments)


def _indented(lines: Iterable[str], column: int) -> Iterator[str]:
    return (" " * column + line if line else line for line in lines)


Changes = Mapping[str, "str | Changes | None"]
"""Key → new value as YAML in one line, changes of the key's own mapping, or None = remove the key."""


class TextEdit:
    """Edits of one document. All places are places in the old text."""

    def __init__(self, text: str, anchors: Mapping[str, MarkedNode] | None = None) -> None:
        self.text = text
        self.root = parse(text, anchors)
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._replacements: list[tuple[int, int, str]] = []

    def result(self) -> str:
        """Return the new text. Where removed parts overlap, it has none of them."""
        out, at = [], 0
        for start, end, new in sorted(self._replacements, key=lambda each: each[0]):
            out += [self.text[at:start], new]
            at = max(at, end)
        return "".join([*out, self.text[at:]])

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace a part of the text; insert, if the part is empty."""
        self._replacements.append((start, end, new))

    def drop_anchor(self, node: MarkedNode) -> None:
        """Remove the anchor of a node."""
        found = _ANCHOR.match(self.text, node.start)
        assert found is not None
        self.replace(node.start, found.end(), "")

    def change(self, key: MarkedNode, value: MarkedNode, changes: Changes) -> None:
        """Change a mapping, which is the value of a key. Changes nothing else, even if the value is an alias."""
        own = {name.value: (name, each) for name, each in value.pairs}
        sources = [source for source in value.merged() if source is not value]
        if any(new is None and source.get(name) is not None for name, new in changes.items() for source in sources):
            inherited = {name: flow(each) for name, each in value.effective().items() if name not in own}
            changes = {"<<": None, **inherited, **changes}
        if not value.children:
            self._fill(key, value, changes)
            return
        for name, new in changes.items():
            if name in own and isinstance(new, str):
                self._write(*own[name], new)
            elif name in own and isinstance(new, Mapping):
                self.change(*own[name], new)
        gone = [own[name] for name, new in changes.items() if new is None and name in own]
        kept = [pair for pair in value.pairs if pair not in gone]
        added = [pair_of(f"{name}: {new}") for name, new in changes.items() if name not in own and new is not None]
        if added and kept:
            self.add_after(value, *kept[-1], added)
        elif added:
            old_key, old_value = gone.pop(0)
            between = ", " if value.is_flow else self._newline + " " * self.column(old_key)
            self.replace(old_key.start, max(old_key.end, old_value.end), between.join(pair.flow for pair in added))
        for pair in gone:
            self.delete(value, *pair)

    def _fill(self, key: MarkedNode, value: MarkedNode, changes: Changes) -> None:
        """Change an omitted value, an empty mapping or an alias."""
        base = {"<<": value.text} if value.kind == "alias" else {}
        pairs = {name: new for name, new in {**base, **changes}.items() if new is not None}
        if pairs != base:
            anchor = f"&{value.anchor} " if value.anchor else ""
            self._write(key, value, f"{anchor}{{{', '.join(f'{name}: {new}' for name, new in pairs.items())}}}")

    def _write(self, key: MarkedNode, value: MarkedNode, new: str) -> None:
        """Replace a value; a plain text gets the quotes of the old value."""
        if value.style in ("'", '"') and new[0] not in "'\"[{":
            new = _in_style(new, value.style)
        colon = _COLON.match(self.text, key.end)
        if colon is None and value.start > key.end:
            raise not_editable()  # "? key"
        if not value.is_flow and self._line(value.start) != self._line(key.start) and colon is not None:
            self.replace(colon.end(), colon.end(), f" {new}")
            self.replace(self._line(value.start), self._next_line(value.end), "")
        else:
            has_space = value.end > value.start or self.text[value.start - 1] == " "
            lead = "" if has_space else " " if colon else ": "
            self.replace(value.start, value.end, lead + new)

    def append(self, mapping: MarkedNode, pairs: Sequence[NewPair]) -> None:
        """Add pairs at the end of a mapping."""
        if mapping.children:
            self.add_after(mapping, *mapping.pairs[-1], pairs)
            return
        opening = _OPENING.match(self.text, mapping.start)
        assert opening is not None  # an empty mapping is always in braces
        inside = opening.end()
        self.replace(inside, inside, ", ".join(pair.flow for pair in pairs))
        self._comment_above(mapping, pairs)

    def add_after(self, mapping: MarkedNode, key: MarkedNode, value: MarkedNode, pairs: Sequence[NewPair]) -> None:
        """Add pairs after a pair."""
        end = max(key.end, value.end)
        if mapping.is_flow:
            self._add_in_flow(key, end, [pair.flow for pair in pairs])
            self._comment_above(mapping, pairs)
        else:
            self._insert_lines(end, self.column(key), [line for pair in pairs for line in pair.lines])

    def _add_in_flow(self, key: MarkedNode, end: int, texts: Sequence[str]) -> None:
        """Add texts after a pair in braces: on lines of their own if the pairs are."""
        comma = _COMMA.match(self.text, end)
        rest = _END_OF_LINE.match(self.text, comma.end() if comma else end)
        between = f",{self._newline}{' ' * (key.start - self._line(key.start))}"
        if comma and rest:
            self.replace(rest.end(), rest.end(), f"{between[1:]}{between.join(texts)},")
        elif comma or not self._begins_line(key):
            self.replace(end, end, "".join(f", {text}" for text in texts))
        else:
            at = rest.end() if rest else end
            self.replace(end, end, ",")
            self.replace(at, at, between[1:] + between.join(texts))

    def fill_with(
        self, key: MarkedNode, value: MarkedNode, pairs: Sequence[NewPair], indent: int, *, in_flow: bool
    ) -> None:
        """Give an omitted value, null, an empty mapping or an alias its own first pairs."""
        if in_flow or value.end > value.start:
            merge = [f"<<: {value.text}"] if value.kind == "alias" else []
            self._write(key, value, f"{{{', '.join([*merge, *(pair.flow for pair in pairs)])}}}")
            self._comment_above(key, pairs)
        else:
            self._insert_lines(value.end, self.column(key) + indent, [line for pair in pairs for line in pair.lines])

    def _insert_lines(self, after: int, column: int, lines: Iterable[str]) -> None:
        at = self._next_line(after)
        start = "" if self.text[at - 1] == "\n" else self._newline
        self.replace(at, at, start + "".join(line + self._newline for line in _indented(lines, column)))

    def _comment_above(self, node: MarkedNode, pairs: Sequence[NewPair]) -> None:
        """Write the comments of pairs above the line in block style that contains a node."""
        comments = [comment for pair in pairs for comment in pair.comments]
        if not comments:
            return
        line, value = self._line(self.root.start), self.root
        while not value.is_flow:
            parts = value.pairs or [(item, item) for item in value.children]
            key, value = next(pair for pair in parts if node.start < max(pair[0].end, pair[1].end))
            line = self._line(key.start)
        spaces = _SPACES.match(self.text, line)
        indent = spaces.group() if spaces else ""
        self.replace(line, line, "".join(f"{indent}# {comment}{self._newline}" for comment in comments))

    def delete(self, mapping: MarkedNode, key: MarkedNode, value: MarkedNode) -> None:
        """Remove a pair with its comments. Comment lines at the level of the pair stay."""
        end = max(key.end, value.end)
        if mapping.is_flow:
            self._delete_in_flow(mapping, key, end)
            return
        column, start, stop = self.column(key), self._line(key.start), self._next_line(end)
        lines = self.text[start:stop].splitlines(keepends=True)
        kept = [line for line in lines if line.lstrip()[:1] in ("#", "") and len(line) - len(line.lstrip()) <= column]
        self.replace(start, stop, "".join(kept))

    def _delete_in_flow(self, mapping: MarkedNode, key: MarkedNode, end: int) -> None:
        comma = _COMMA.match(self.text, end)
        if comma is None:
            before = max((each.end for each in mapping.children if each.end <= key.start), default=None)
            if before is not None and "\n" not in self.text[before : key.start]:
                self.replace(before, end, "")
                return
        end = comma.end() if comma else end
        rest = _END_OF_LINE.match(self.text, end)
        if rest and self._begins_line(key):
            self.replace(self._line(key.start), self._next_line(end), "")
        elif rest:
            self.replace(key.start, rest.end(), "")
        else:
            spaces = _SPACES.match(self.text, end) if comma else None
            self.replace(key.start, spaces.end() if spaces else end, "")

    def taken(self, mapping: MarkedNode, key: MarkedNode, value: MarkedNode) -> tuple[list[str], list[str]]:
        """Remove a pair. Returns its lines without the indentation, empty if it was in braces, and its comments."""
        end = max(key.end, value.end)
        if mapping.is_flow:
            comma = _COMMA.match(self.text, end)
            rest = _END_OF_LINE.match(self.text, comma.end() if comma else end)
            self._delete_in_flow(mapping, key, end)
            last = rest or comma
            return [], comments_of(key, value, last.end() if last else end)
        start, stop, column = self._line(key.start), self._next_line(end), self.column(key)
        self.replace(start, stop, "")
        lines = self.text[start:stop].splitlines()
        comments = comments_of(key, value, stop)
        return [line[min(column, len(line) - len(line.lstrip())) :] for line in lines], comments

    # Places in the text.

    def _line(self, at: int) -> int:
        """Return where the line of a place begins."""
        return self.text.rfind("\n", 0, at) + 1

    def _next_line(self, at: int) -> int:
        """Return where the line after a place begins."""
        return self.text.find("\n", at) + 1 or len(self.text)

    def _begins_line(self, node: MarkedNode) -> bool:
        return not self.text[self._line(node.start) : node.start].strip()

    def column(self, key: MarkedNode) -> int:
        """Return the column of a key in block style."""
        if not self._begins_line(key):
            raise not_editable()  # "? key" and "- key: value"
        return key.start - self._line(key.start)

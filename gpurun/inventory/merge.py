"""Merge changed values into the text that a user wrote: a three-way merge on YAML tokens.

There are three texts: the user's text (`original`), the library's output for its values (`base`), and the library's
output for the changed values (`changed`). `original` and `base` have the same tokens; only spacing and comments differ.
`base` and `changed` differ only in the change. The result has the tokens of `changed`. Everything else comes, line by
line, from `original`:

    original   gpus: 4     # four       base   gpus: 4       changed   gpus: 8
    result     gpus: 8     # four

A row is one line of the library's output. The merge copies unchanged rows from the user's text, and merges a changed
row token by token. It inserts a new row after its predecessor, and removes the line of a removed row. Comment lines
stay. The rows of a host that moves to another rack keep their text there; a host that leaves braces takes its comments
with it.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
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

# The YAML of an inventory as an editable tree: ruamel.yaml's round trip.


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


def read_tree(text: str) -> CommentedMap:
    """Return the tree of a document that `gpurun.documents.convert` accepted; an empty mapping for no document.

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


def write_tree(tree: CommentedMap, indent: int = 2) -> str:
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


# A document as rows of tokens. A row is one line of the YAML library's output; its name does not change with edits.


COMMA = "FlowEntryToken"
CLOSING = ("FlowMappingEndToken", "FlowSequenceEndToken")
_INVISIBLE = (yaml.DocumentStartToken, yaml.DocumentEndToken)


@dataclass(frozen=True)
class Token:
    """A visible token: its kind, its text, and its place (`end` is exclusive)."""

    kind: str
    value: str
    start: int
    end: int

    @property
    def key(self) -> tuple[str, str]:
        """The kind and the text, independent of the place."""
        return (self.kind, self.value)

    @property
    def is_last_comma(self) -> bool:
        """True for a comma before a closing bracket, which the library does not write."""
        return self.kind == COMMA and self.start == self.end


@dataclass(frozen=True)
class Row:
    """The tokens of one line of the library's output, and the lines that they take in the text."""

    tokens: tuple[Token, ...]
    start: int
    end: int
    column: int

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The tokens of the row, independent of the spacing."""
        return [token.key for token in self.tokens]


def scanned(text: str) -> list[Token]:
    """Return the visible tokens, without the placeholders for omitted values."""
    found = []
    for token in yaml.scan(text, Loader=yaml.CSafeLoader):
        start, end = token.start_mark.index, token.end_mark.index
        if end > start and not isinstance(token, _INVISIBLE):
            value = getattr(token, "value", None)
            if value != NOTHING:
                kind = type(token).__name__ + (getattr(token, "style", None) or "")
                found.append(Token(kind, str(value), start, end))
    return found


def grouped(text: str, tokens: list[Token]) -> Iterator[Row]:
    """Group tokens by the line on which they begin."""
    starts = [0, *(at + 1 for at, character in enumerate(text) if character == "\n")]
    line, group = 0, list[Token]()
    for token in tokens:
        if line + 1 < len(starts) and token.start >= starts[line + 1]:
            if group:
                yield _row(text, group)
            group = []
            while line + 1 < len(starts) and token.start >= starts[line + 1]:
                line += 1
        group.append(token)
    if group:
        yield _row(text, group)


def grouped_like(text: str, tokens: list[Token], rows: list[Row]) -> Iterator[Row]:
    """Group the same tokens in the same way as other rows."""
    at = 0
    found = []
    for row in rows:
        found.append(_row(text, tokens[at : at + len(row.tokens)]))
        at += len(row.tokens)
    if any(before.end > after.start for before, after in pairwise(found)):
        raise not_editable()
    return iter(found)


def _row(text: str, tokens: list[Token]) -> Row:
    start = text.rfind("\n", 0, tokens[0].start) + 1
    last = tokens[-1].end
    end = last if last and text[last - 1] == "\n" else text.find("\n", last) + 1
    return Row(tuple(tokens), start, end or len(text), tokens[0].start - start)


def row_paths(rows: Sequence[Row], renamed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return for each row the path of keys to it. The path names the row, whatever changes around it."""
    paths: list[tuple[str, ...]] = []
    above: list[tuple[int, str]] = []
    for row in rows:
        while above and above[-1][0] >= row.column:
            above.pop()
        first = row.tokens[0].value
        above.append((row.column, renamed.get(first, first)))
        paths.append(tuple(key for _, key in above))
    return paths


def token_places(tokens: Sequence[Token], renamed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the role of each token of a row: the path of keys to it, and its part there."""
    places: list[tuple[str, ...]] = []
    path = [""]  # the key, or the number, at each level of brackets
    for at, token in enumerate(tokens):
        part = token.kind
        if part in CLOSING and len(path) > 1:
            path.pop()
        elif part.startswith("Scalar"):
            is_key = at + 1 < len(tokens) and tokens[at + 1].kind == "ValueToken"
            part = "key" if is_key else "value"
            if is_key:
                path[-1] = renamed.get(token.value, token.value)
        places.append((*path, part))
        if part == "FlowMappingStartToken":
            path.append("")
        elif part == "FlowSequenceStartToken":
            path.append("0")
        elif part == COMMA and path[-1].isdigit():
            path[-1] = str(int(path[-1]) + 1)
    return places


def with_last_commas(base: Sequence[Token], tokens: Sequence[Token]) -> list[Token]:
    """Return the library's tokens, with a comma before each closing bracket where the user wrote a comma."""
    found: list[Token] = []
    rest = iter(base)
    upcoming = next(rest, None)
    for token in tokens:
        if upcoming is not None and token.kind == COMMA and upcoming.kind in CLOSING:
            found.append(Token(COMMA, token.value, upcoming.start, upcoming.start))
        elif upcoming is not None:
            found.append(upcoming)
            upcoming = next(rest, None)
    return found if upcoming is None else [*found, upcoming, *rest]


def keeping_last_commas(rows: Sequence[Row], renamed: Mapping[str, str], base_rows: Sequence[Row]) -> Iterator[Row]:
    """Return the new rows, with the trailing commas that the same brackets have in the base."""
    wanted = set()
    for row, path in zip(base_rows, row_paths(base_rows, {}), strict=True):
        for (comma, closing), place in zip(pairwise(row.tokens), token_places(row.tokens, {})[1:], strict=True):
            if comma.is_last_comma and closing.kind in CLOSING:
                wanted.add((path, place))
    for row, path in zip(rows, row_paths(rows, renamed), strict=True):
        tokens: list[Token] = []
        for token, place in zip(row.tokens, token_places(row.tokens, renamed), strict=True):
            if (path, place) in wanted and tokens and not tokens[-1].kind.endswith("StartToken"):
                tokens.append(Token(COMMA, "None", token.start, token.start))
            tokens.append(token)
        yield replace(row, tokens=tuple(tokens)) if len(tokens) > len(row.tokens) else row


_ENTRY = 3
"""The place of a host's key in a row's path: racks, RACK, hosts, KEY."""


def merge_trees(original: str, base: str, changed: str, renamed: Mapping[str, str], moved: Collection[str] = ()) -> str:
    """Return `original` with the difference between `base` and `changed`.

    Args:
        renamed: keys of `changed` that had another name in `base`, with that name.
        moved: keys of hosts that are in another rack of `changed` than of `base`.
    Raises BadInput if `original` and `base` have different tokens. This is a fault of the library, not of the file.
    """
    if base == changed:
        return original
    return _Merge(original, base, changed, renamed, moved).result()


class _Merge:
    def __init__(
        self, original: str, base: str, changed: str, renamed: Mapping[str, str], moved: Collection[str]
    ) -> None:
        self._original, self._changed, self._renamed, self._hosts = original, changed, renamed, moved
        tokens = scanned(original)
        base_tokens = with_last_commas(scanned(base), tokens)
        if [token.key for token in tokens] != [token.key for token in base_tokens]:
            raise not_editable()
        self._base_rows = list(grouped(base, base_tokens))
        self._rows = list(grouped_like(original, tokens, self._base_rows))
        new_rows = list(grouped(changed, scanned(changed)))
        self._new_rows = list(keeping_last_commas(new_rows, renamed, self._base_rows))
        self._paths = row_paths(self._new_rows, {})
        self._moved = {
            path[_ENTRY:]: i
            for i, path in enumerate(row_paths(self._base_rows, {}))
            if path[0] == "racks" and path[_ENTRY : _ENTRY + 1] and path[_ENTRY] in moved
        }
        self._inner = {i for path, i in self._moved.items() if len(path) > 1}
        there = {path[_ENTRY:] for path in self._paths}
        self._homeless = {path: i for path, i in self._moved.items() if path[:1] not in there}
        self._lost: dict[str, list[str]] = {}  # moved host in braces → its comments
        self._newline = "\r\n" if "\r\n" in original else "\n"
        self._out: list[str] = []
        self._shift: dict[int, int] = {}  # new row → columns that the user indents it further

    def result(self) -> str:
        old, new = row_paths(self._base_rows, {}), row_paths(self._new_rows, self._renamed)
        matches = list(_matches(old, new))
        for same, i1, i2, j1, _ in matches:
            for step in range(i2 - i1 if same and self._hosts else 0):
                self._lost |= self._lost_comments(i1 + step, j1 + step, old[i1 + step])
        for same, i1, i2, j1, j2 in matches:
            if same:
                for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                    unchanged = self._base_rows[i].keys == self._new_rows[j].keys
                    (self._keep if unchanged else self._change)(i, j)
                continue
            for i in range(i1, i2):
                self._drop(i)
            for j in range(j1, j2):
                self._insert(j)
        self._out.append(self._original[self._gap_start(len(self._rows)) :])
        return "".join(self._out)

    def _lost_comments(self, i: int, j: int, path: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the comments of moved hosts that stood in the braces of a row, and are not in its new text."""
        tokens, found = self._rows[i].tokens, dict[str, list[str]]()
        for at, place in enumerate(token_places(tokens, {})[:-1]):
            whole = (*path[:-1], *place)
            if whole[0] == "racks" and len(whole) > _ENTRY + 1 and whole[_ENTRY] in self._hosts:
                behind = self._original[tokens[at].end : tokens[at + 1].start].partition("\n")[0].strip()
                found.setdefault(whole[_ENTRY], []).extend([behind] if behind else [])
        lines = [line.rstrip() for line in self._changed_row(i, j).splitlines()] if any(found.values()) else []
        lost = {host: [each for each in comments if not any(line.endswith(each) for line in lines)]
                for host, comments in found.items()}  # fmt: skip
        return {host: [_bare(each) for each in comments] for host, comments in lost.items() if comments}

    def _gap_start(self, i: int) -> int:
        return self._rows[i - 1].end if i else 0

    def _gap(self, i: int) -> str:
        """Return the comment lines and empty lines before a row."""
        end = self._rows[i].start if i < len(self._rows) else len(self._original)
        return self._original[self._gap_start(i) : end]

    def _keep(self, i: int, j: int) -> None:
        self._shift[j] = self._rows[i].column - self._new_rows[j].column
        self._out.append(self._original[self._gap_start(i) : self._rows[i].end])

    def _drop(self, i: int) -> None:
        """Leave out a row. Removes the comments inside its block; keeps comments at its own level."""
        for line in () if i in self._inner else self._gap(i).splitlines(keepends=True):
            outside = len(line) - len(line.lstrip()) <= self._rows[i].column
            if outside or not line.strip():
                self._out.append(line)

    def _insert(self, j: int) -> None:
        row = self._new_rows[j]
        shift = self._shift[j] = self._neighbours_shift(j)
        if self._out and not self._out[-1].endswith("\n"):
            self._out.append(self._newline)
        comment = self._own_comment(j, row.column + shift)
        self._give_comments(j, row.column + shift)
        was = self._moved.get(self._paths[j][_ENTRY:])
        if was is not None:
            self._out.append(self._shifted(self._inner_comments(was), row.column + shift - self._rows[was].column))
            if self._base_rows[was].keys == row.keys:
                text = self._original[self._rows[was].start : self._rows[was].end]
                self._out.append(self._shifted(text, row.column + shift - self._rows[was].column))
                return
            comment = self._original[self._rows[was].tokens[-1].end : self._rows[was].end].rstrip()
        lines = [line.replace(NOTHING, "").rstrip() for line in self._changed[row.start : row.end].splitlines()]
        for number, text in enumerate(lines, 1):
            end = comment if number == len(lines) else ""
            self._out.append(" " * max(shift, 0) + text[max(-shift, 0) :] + end + self._newline)

    def _own_comment(self, j: int, column: int) -> str:
        """Return the comment of a host that moved from braces into its own row; write several above that row."""
        entry = self._paths[j][_ENTRY:]
        comments = self._lost.pop(entry[0], []) if len(entry) == 1 else []
        if len(comments) == 1:
            return f"  # {comments[0]}"
        self._out += [f"{' ' * column}# {comment}{self._newline}" for comment in comments]
        return ""

    def _inner_comments(self, i: int) -> str:
        """Return the comment lines above a row of a moved host, if they are in the host's own block."""
        gap = self._gap(i).splitlines(keepends=True) if i in self._inner else []
        return "".join(line for line in gap if line.lstrip().startswith("#"))

    def _shifted(self, text: str, shift: int) -> str:
        """Return lines of the user's text with another indentation."""
        lines = text.splitlines(keepends=True)
        shifted = "".join(" " * max(shift, 0) + line[min(max(-shift, 0), _indent(line)) :] for line in lines)
        return shifted if shifted.endswith("\n") or not shifted else shifted + self._newline

    def _give_comments(self, j: int, column: int) -> None:
        """Write the comments of hosts that moved into a row with others, above that row, with the hosts' names."""
        if not self._homeless and not self._lost:
            return
        keys = {token.value for token in self._new_rows[j].tokens}
        for path in [path for path in self._homeless if path[0] in keys]:
            i = self._homeless.pop(path)
            above = [_bare(line) for line in self._inner_comments(i).splitlines()]
            self._lost.setdefault(path[0], []).extend((*above, *_comments(self._original, self._rows[i])))
        for host in [host for host in self._lost if host in keys]:
            for comment in self._lost.pop(host):
                self._out.append(f"{' ' * column}# {host}: {comment}{self._newline}")

    def _neighbours_shift(self, j: int) -> int:
        """Return the extra indentation of a row: that of the previous row on the same level, or of its parent."""
        for before in range(j - 1, -1, -1):
            if self._new_rows[before].column <= self._new_rows[j].column:
                return self._shift[before]
        return 0

    def _change(self, i: int, j: int) -> None:
        """Merge one row token by token, and keep the user's text between the tokens."""
        self._out.append(self._gap(i))
        self._give_comments(j, self._rows[i].column)
        self._shift[j] = self._rows[i].column - self._new_rows[j].column
        self._out.append(self._changed_row(i, j))

    def _changed_row(self, i: int, j: int) -> str:
        """Return the new text of a row that is in both documents."""
        mine, theirs = self._rows[i].tokens, self._new_rows[j].tokens
        kept: dict[int, int] = {}
        for same, a1, a2, b1, _ in _matches(token_places(mine, {}), token_places(theirs, self._renamed)):
            if same:
                kept.update({b1 + step: a1 + step for step in range(a2 - a1)})
        out = [self._original[self._rows[i].start : mine[0].start]]
        for position, token in enumerate(theirs):
            if position:
                out.append(self._between(mine, theirs, position, kept))
            at = kept.get(position)
            unchanged = at is not None and mine[at].key == token.key
            out.append(self._lexeme(mine[at]) if at is not None and unchanged else self._new_lexeme(token))
        out.append(self._original[mine[-1].end : self._rows[i].end])
        return "".join(out)

    def _lexeme(self, token: Token) -> str:
        return self._original[token.start : token.end]

    def _new_lexeme(self, token: Token) -> str:
        return "," if token.is_last_comma else self._changed[token.start : token.end]

    def _between(self, mine: Sequence[Token], theirs: Sequence[Token], position: int, kept: dict[int, int]) -> str:
        """Return the text between a token and its predecessor: the user's spacing if both are still neighbours."""
        before, here = kept.get(position - 1), kept.get(position)
        new = self._changed[theirs[position - 1].end : theirs[position].start].replace(NOTHING, "")
        if before is None and here:
            old = self._original[mine[here - 1].end : mine[here].start]
            return self._newline + old.partition("\n")[2] if "\n" in old else new
        if before is None or before + 1 >= len(mine):
            return new
        old = self._original[mine[before].end : mine[before + 1].start]
        if here == before + 1:
            return old
        if here is None:
            return self._before_new(mine, before, old, kept) if "\n" in old else new
        return self._after_gone(mine, before, here) or new

    def _before_new(self, mine: Sequence[Token], before: int, old: str, kept: dict[int, int]) -> str:
        """Return the line break before a new token, with the comment of the previous token.

        A comment line describes the token after it. So it goes after the new token, if the described token stays.
        """
        indent = old.rpartition("\n")[2]
        if mine[before + 1].kind in CLOSING:  # use the indentation of the previous token
            start = self._original.rfind("\n", 0, mine[before].start) + 1
            line = self._original[start : mine[before].start]
            indent = line[: len(line) - len(line.lstrip())]
        stays = before + 1 in kept.values()
        return (old.partition("\n") if stays else old.rpartition("\n"))[0] + "\n" + indent

    def _after_gone(self, mine: Sequence[Token], before: int, here: int) -> str | None:
        """Return the line breaks around removed tokens; None if there were none.

        The comment after the last kept token stays, even if a removed comma stood between them. The comments of removed
        tokens are removed too. Comment lines and empty lines stay.
        """
        gaps = [self._original[mine[at].end : mine[at + 1].start] for at in range(before, here)]
        broken = [at for at, gap in enumerate(gaps) if "\n" in gap]
        if not broken:
            return None
        front = broken[0] == 0 or (broken[0] == 1 and mine[before + 1].kind == COMMA)
        head = gaps[broken[0]].partition("\n")[0] if front else self._newline[:-1]
        bodies = [gaps[at].partition("\n")[2] for at in broken]
        whole_lines = "".join(body[: body.rfind("\n") + 1] for body in bodies)
        indent = bodies[-1].rpartition("\n")[2]
        return f"{head}\n{whole_lines}{indent}"


def _comments(text: str, row: Row) -> Iterator[str]:
    """Return the comments on the lines of a row, without ``#``."""
    ends = [*(token.start for token in row.tokens[1:]), row.end]
    for token, end in zip(row.tokens, ends, strict=True):
        for line in text[token.end : end].splitlines():
            if line.lstrip().startswith("#"):
                yield _bare(line)


def _bare(comment: str) -> str:
    """Return a comment without its ``#`` and spaces."""
    return comment.strip().lstrip("#").strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _matches(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[tuple[bool, int, int, int, int]]:
    """Return the opcodes of a diff as (same, i1, i2, j1, j2); difflib does not get the equal start and end."""
    limit = min(len(old), len(new))
    head = next((k for k in range(limit) if old[k] != new[k]), limit)
    tail = next((k for k in range(limit - head) if old[-1 - k] != new[-1 - k]), limit - head)
    if head:
        yield True, 0, head, 0, head
    matcher = SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        yield tag == "equal", head + i1, head + i2, head + j1, head + j2
    if tail:
        yield True, len(old) - tail, len(old), len(new) - tail, len(new)

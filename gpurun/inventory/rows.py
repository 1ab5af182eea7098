"""A document as rows of tokens. A row is one line of the YAML library's output; its name does not change with edits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import yaml

from gpurun.inventory.roundtrip import NOTHING, not_editable

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

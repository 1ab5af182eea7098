"""Brings a change of the values into the text that a person wrote: a three-way merge that knows YAML's tokens.

Three texts: the person's (`original`), what the library writes for its values (`base`), and what it writes for
the changed values (`changed`). `original` and `base` have the same tokens and differ in spacing and comments
only; `base` and `changed` differ in the change only. The result has the tokens of `changed`, and everything
else, line by line, from `original`:

    original   gpus: 4     # four       base   gpus: 4       changed   gpus: 8
    result     gpus: 8     # four

Rows are what the library writes on one line. Rows without a change are copied as the person wrote them, a
changed row is merged token by token, a new row is put behind the row it follows, and a row that is gone takes
its line with it. Comment lines stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

import yaml

from gpurun.inventory.roundtrip import NOTHING, not_editable

_INVISIBLE = (yaml.DocumentStartToken, yaml.DocumentEndToken)


@dataclass(frozen=True)
class _Token:
    kind: str
    value: str
    start: int
    end: int

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind, self.value)


@dataclass(frozen=True)
class _Row:
    """Tokens that the library writes on one line, and the lines they take."""

    tokens: tuple[_Token, ...]
    start: int
    end: int
    column: int

    @property
    def keys(self) -> list[tuple[str, str]]:
        return [token.key for token in self.tokens]


def merge(original: str, base: str, changed: str, renamed: Mapping[str, str]) -> str:
    """`original` with the difference between `base` and `changed`.

    Args:
        renamed: keys of `changed` that had another name in `base`, and that name.
    Raises BadInput if `original` and `base` do not say the same, which is the library's fault, not the file's.
    """
    if base == changed:
        return original
    return _Merge(original, base, changed, renamed).result()


class _Merge:
    def __init__(self, original: str, base: str, changed: str, renamed: Mapping[str, str]) -> None:
        self._original, self._changed, self._renamed = original, changed, renamed
        tokens, base_tokens = _tokens(original), _tokens(base)
        if [token.key for token in tokens] != [token.key for token in base_tokens]:
            raise not_editable()
        self._base_rows = list(_rows(base, base_tokens))
        self._rows = list(_rows_like(original, tokens, self._base_rows))
        self._new_rows = list(_rows(changed, _tokens(changed)))
        self._newline = "\r\n" if "\r\n" in original else "\n"
        self._out: list[str] = []
        self._shift: dict[int, int] = {}  # new row → how far to the right the person indents it

    def result(self) -> str:
        old, new = _paths(self._base_rows, {}), _paths(self._new_rows, self._renamed)
        for same, i1, i2, j1, j2 in _matches(old, new):
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

    def _gap_start(self, i: int) -> int:
        return self._rows[i - 1].end if i else 0

    def _gap(self, i: int) -> str:
        """The comment lines and empty lines in front of a row."""
        end = self._rows[i].start if i < len(self._rows) else len(self._original)
        return self._original[self._gap_start(i) : end]

    def _keep(self, i: int, j: int) -> None:
        self._shift[j] = self._rows[i].column - self._new_rows[j].column
        self._out.append(self._original[self._gap_start(i) : self._rows[i].end])

    def _drop(self, i: int) -> None:
        """Leaves out a row. Comments inside of what it belongs to go with it, those beside it stay."""
        for line in self._gap(i).splitlines(keepends=True):
            outside = len(line) - len(line.lstrip()) <= self._rows[i].column
            if outside or not line.strip():
                self._out.append(line)

    def _insert(self, j: int) -> None:
        row = self._new_rows[j]
        shift = self._shift[j] = self._neighbours_shift(j)
        if self._out and not self._out[-1].endswith("\n"):
            self._out.append(self._newline)
        for line in self._changed[row.start : row.end].splitlines():
            text = line.replace(NOTHING, "").rstrip()
            self._out.append(" " * max(shift, 0) + text[max(-shift, 0) :] + self._newline)

    def _neighbours_shift(self, j: int) -> int:
        """How the person indents this row: as the row before it on the same level, else as its parent."""
        for before in range(j - 1, -1, -1):
            if self._new_rows[before].column <= self._new_rows[j].column:
                return self._shift[before]
        return 0

    def _change(self, i: int, j: int) -> None:
        """Merges one row token by token, and keeps what the person has between the tokens."""
        self._out.append(self._gap(i))
        mine, theirs = self._rows[i].tokens, self._new_rows[j].tokens
        self._shift[j] = self._rows[i].column - self._new_rows[j].column
        kept: dict[int, int] = {}
        for same, a1, a2, b1, _ in _matches(_places(mine, {}), _places(theirs, self._renamed)):
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
        self._out.append("".join(out))

    def _lexeme(self, token: _Token) -> str:
        return self._original[token.start : token.end]

    def _new_lexeme(self, token: _Token) -> str:
        return self._changed[token.start : token.end]

    def _between(self, mine: Sequence[_Token], theirs: Sequence[_Token], position: int, kept: dict[int, int]) -> str:
        """What stands between a token and the one before it: the person's spacing where it is still theirs."""
        before, here = kept.get(position - 1), kept.get(position)
        new = self._changed[theirs[position - 1].end : theirs[position].start].replace(NOTHING, "")
        if before is None and here:
            old = self._original[mine[here - 1].end : mine[here].start]
            return self._newline + old.rpartition("\n")[2] if "\n" in old else new
        if before is None or before + 1 >= len(mine):
            return new
        old = self._original[mine[before].end : mine[before + 1].start]
        if here == before + 1 or "\n" in old:
            return old
        if here is None:
            return new
        return self._after_a_gap(mine, before, here) or new

    def _after_a_gap(self, mine: Sequence[_Token], before: int, here: int) -> str | None:
        """The line break around tokens that are gone, if there was one.

        Behind a comma it comes with its comment, which is about what stands before the comma. At the end
        it comes without: that comment was about what is gone.
        """
        if mine[before + 1].kind == "FlowEntryToken":
            old = self._original[mine[before + 1].end : mine[before + 2].start]
            if "\n" in old:
                return old
        old = self._original[mine[here - 1].end : mine[here].start]
        _, line_end, rest = old.partition(self._newline)
        return line_end + rest if line_end else None


def _matches(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[tuple[bool, int, int, int, int]]:
    """Opcodes of a diff, (same, i1, i2, j1, j2); what is alike at both ends is not given to difflib."""
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


def _paths(rows: Sequence[_Row], renamed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """For each row the keys that lead to it, which name it whatever happens around it."""
    paths: list[tuple[str, ...]] = []
    above: list[tuple[int, str]] = []
    for row in rows:
        while above and above[-1][0] >= row.column:
            above.pop()
        first = row.tokens[0].value
        above.append((row.column, renamed.get(first, first)))
        paths.append(tuple(key for _, key in above))
    return paths


def _places(tokens: Sequence[_Token], renamed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """For each token of a row what it is there for: the keys that lead to it, and its part in that."""
    places: list[tuple[str, ...]] = []
    path = [""]  # the key, or the number, at each level of brackets
    for at, token in enumerate(tokens):
        part = token.kind
        if part in ("FlowMappingEndToken", "FlowSequenceEndToken") and len(path) > 1:
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
        elif part == "FlowEntryToken" and path[-1].isdigit():
            path[-1] = str(int(path[-1]) + 1)
    return places


def _tokens(text: str) -> list[_Token]:
    """The tokens that can be seen, without those that say a value was left out."""
    found = []
    for token in yaml.scan(text, Loader=yaml.CSafeLoader):
        start, end = token.start_mark.index, token.end_mark.index
        if end > start and not isinstance(token, _INVISIBLE):
            value = getattr(token, "value", None)
            if value != NOTHING:
                kind = type(token).__name__ + (getattr(token, "style", None) or "")
                found.append(_Token(kind, str(value), start, end))
    return found


def _rows(text: str, tokens: list[_Token]) -> Iterator[_Row]:
    """Tokens grouped by the line they begin on."""
    starts = [0, *(at + 1 for at, character in enumerate(text) if character == "\n")]
    line, group = 0, list[_Token]()
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


def _rows_like(text: str, tokens: list[_Token], rows: list[_Row]) -> Iterator[_Row]:
    """The same tokens in the same groups as in other rows."""
    at = 0
    found = []
    for row in rows:
        found.append(_row(text, tokens[at : at + len(row.tokens)]))
        at += len(row.tokens)
    if any(before.end > after.start for before, after in pairwise(found)):
        raise not_editable()
    return iter(found)


def _row(text: str, tokens: list[_Token]) -> _Row:
    start = text.rfind("\n", 0, tokens[0].start) + 1
    last = tokens[-1].end
    end = last if last and text[last - 1] == "\n" else text.find("\n", last) + 1
    return _Row(tuple(tokens), start, end or len(text), tokens[0].start - start)

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

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from gpurun.inventory.roundtrip import NOTHING, not_editable
from gpurun.inventory.rows import (
    CLOSING,
    COMMA,
    Row,
    Token,
    grouped,
    grouped_like,
    keeping_last_commas,
    row_paths,
    scanned,
    token_places,
    with_last_commas,
)

_ENTRY = 3
"""The place of a host's key in a row's path: racks, RACK, hosts, KEY."""


def merge(original: str, base: str, changed: str, renamed: Mapping[str, str], moved: Collection[str] = ()) -> str:
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

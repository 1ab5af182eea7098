"""A shell's text as simple commands, as far as words can tell. Pure; nothing in it is run or expanded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

SHELLS = ("sh", "bash", "dash", "zsh")
RESERVED = frozenset({"if", "then", "elif", "else", "do", "while", "until", "!", "{", "exec", "time", "command"})
SAY = frozenset(
    {"echo", "printf", "export", "alias", "which", "type", "grep", "pip", "pgrep", "pkill", "killall", "man"}
)
"""Programs that start nothing, whatever words are behind them."""
ENDS = frozenset({"echo", "printf", "disown", "exit", "true", ":", "date", "fi", "done", "}", "set"})
"""Commands that end at once: a text that only has these behind a command with ``&`` does not wait for it."""
OPERATORS = frozenset(["|", "|&", "||", "&&", ">", ">>", "<", "2>", "2>>", "&>", "&>>", "2>&1", ">&2"])
COMPARES = ("test", "[", "expr")
"""Programs with words such as ``<`` of their own."""
DEPTH = 8
"""Substitutions within substitutions that are read."""
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(\\?[\w.-]+|'[^'\n]*'|\"[^\"\n]*\")")
_SEPARATES = re.compile(r"-[A-Za-z]|--\S*(sep|delim)\S*")
_BLANK, _OPERATOR = " \t\r", "();<>|&\n"


def about_operators(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return lines that point out a pipe or redirection that stands in a command as a word: no shell reads it."""
    if words[0].rpartition("/")[2] in COMPARES or not any(_is_operator(words, at) for at in range(1, len(words))):
        return ()
    first = next(words[at] for at in range(1, len(words)) if _is_operator(words, at))
    text = " ".join(word if word in OPERATORS else shlex.quote(word) for word in words)
    return (
        f"the program gets {first!r} as an argument, because gpurun starts no shell. To use a shell, write:",
        f"  → bash -o pipefail -c {shlex.quote(text)}",
    )


def _is_operator(words: tuple[str, ...], at: int) -> bool:
    is_whole = at + 1 < len(words) or words[at] in ("2>&1", ">&2")
    return words[at] in OPERATORS and is_whole and not _SEPARATES.fullmatch(words[at - 1])


def simple_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield each simple command of a text, also those in ``$(…)`` and in texts that go to a shell.

    Words have no quotes any more. An expansion such as ``$X`` stays as it is typed; so does a list, as ``A=(x y)``.
    """
    texts = [(text, 0)]
    while texts:
        text, depth = texts.pop()
        reader = _TextReader(text)
        yield from reader.commands()
        if depth < DEPTH:
            texts += [(inner, depth + 1) for inner in reversed(reader.inner)]


def in_background(text: str) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the commands that a text starts with ``&``, and whether it ends without a ``wait`` for them."""
    reader, left, chain = _TextReader(text), list[tuple[str, ...]](), list[tuple[str, ...]]()
    awaited = list[tuple[str, ...]]()
    for words in reader.commands():
        chain.append(words)
        if reader.ended_by in ("|", "&&"):
            continue
        if reader.ended_by == "&":
            left += chain
        elif not all(each[0] in ENDS or _ARRAY.match(each[0]) for each in chain):
            awaited, left = [*awaited, *left], []
        chain = []
    yield from ((words, False) for words in awaited)
    yield from ((words, True) for words in left)


@dataclass
class _TextReader:
    """Where the reader is in a text: the word and the command that it has begun, and the texts within.

    `ended_by`: the operator behind the command that was read last.
    """

    text: str
    is_list: bool = False
    at: int = 0
    word: str | None = None
    words: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    is_target: bool = False
    ended_by: str = ""
    here: list[tuple[str, bool]] = field(default_factory=list)

    def commands(self) -> Iterator[tuple[str, ...]]:
        """Yield the commands of this text, without those of `inner`."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK:
                self._end_word()
            elif char == "#" and self.word is None:
                self.at = self._find("\n", self.at) - 1
            elif char == "(" and not self.is_list and self.word is not None and _ARRAY.fullmatch(self.word):
                end = self._closing(self.at, "(", ")")
                listed = _TextReader(self.text[self.at + 1 : end], is_list=True)
                self._add(" ".join(word for words in listed.commands() for word in words))
                self.inner += listed.inner
                self.at = end
            elif char in _OPERATOR:
                self.ended_by = "&&" if self.text.startswith("&&", self.at) else char
                if self._operator(char):
                    yield from self._end_command()
                if char == "\n":
                    self._skip_bodies()
            else:
                self._add(self._piece(char))
            self.at += 1
        self.ended_by = ""
        yield from self._end_command()

    def _piece(self, char: str) -> str:
        """Return what the character at `at` and those that belong to it add to a word."""
        begin, following = self.at, self.text[self.at + 1 : self.at + 2]
        if char == "\\":
            self.at += 1
            return "" if following == "\n" else following
        if char == "'":
            self.at = self._find("'", begin + 1)
            return self.text[begin + 1 : self.at]
        if char == '"':
            return self._quoted()
        if char == "`" or char + following in ("$(", "${"):
            return self._expansion(char + following)
        return char

    def _quoted(self) -> str:
        pieces = list[str]()
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            char, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following not in ("$", "`", '"', "\\", "\n"):
                pieces.append(char)
            else:
                pieces.append("'" if char == "'" else self._piece(char))
            self.at += 1
        return "".join(pieces)

    def _expansion(self, opens: str) -> str:
        begin = self.at
        if opens[0] == "`":
            self.at = self._find("`", begin + 1)
            self.inner.append(self.text[begin + 1 : self.at])
        else:
            self.at = self._closing(begin + 1, opens[1], ")" if opens[1] == "(" else "}")
            if opens == "$(":
                self.inner.append(self.text[begin + 2 : self.at])
        return self.text[begin : self.at + 1]

    def _closing(self, at: int, opens: str, closes: str) -> int:
        """Return where the bracket at `at` is closed; the text's end if it is not."""
        depth = 0
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "'":
                at = self._find("'", at + 1)
            elif char in (opens, closes):
                depth += 1 if char == opens else -1
                if depth == 0:
                    return at
            at += 1
        return len(self.text)

    def _find(self, what: str, begin: int) -> int:
        found = self.text.find(what, begin)
        return len(self.text) if found < 0 else found

    def _operator(self, char: str) -> bool:
        """Take an operator; return whether it ends a command. The target of a redirection is no word of it."""
        following = self.text[self.at + 1 : self.at + 2]
        if (match := _HEREDOC.match(self.text, self.at)) and not self.text.startswith("<<<", self.at):
            self._end_word()
            self.here.append((match[2].strip("\\'\""), (self.words[:1] or [""])[0].rpartition("/")[2] in SHELLS))
            self.at = match.end() - 1
            return False
        if following == "(" and char in "<>":
            return True
        if char in "<>" or (char == "&" and following == ">"):
            self.word = None if self.word is not None and self.word.isdigit() else self.word
            self._end_word()
            while self.text[self.at + 1 : self.at + 2] in tuple("<>&|"):
                self.at += 1
            self.is_target = True
            return False
        return True

    def _skip_bodies(self) -> None:
        """Skip the texts behind ``<<WORD``, which follow a line. Those that go to a shell are read."""
        for word, is_read in self.here:
            begin = self.at + 1
            end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(self.text, begin)
            if is_read:
                self.inner.append(self.text[begin : end.start() if end else len(self.text)])
            self.at = end.end() - 1 if end else len(self.text)
        self.here = []

    def _add(self, piece: str) -> None:
        self.word = (self.word or "") + piece if piece or self.text[self.at : self.at + 1] != "\n" else self.word

    def _end_word(self) -> None:
        if self.word is not None and not self.is_target and (self.words or self.word not in RESERVED):
            self.words.append(self.word)
        self.is_target = self.is_target and self.word is None
        self.word = None

    def _end_command(self) -> Iterator[tuple[str, ...]]:
        self._end_word()
        self.is_target = False
        if self.words:
            yield tuple(self.words)
        self.words = []

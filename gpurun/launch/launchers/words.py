"""Words of a command line: flags, shells, and programs that people put in front of a launcher. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gpurun.errors import BadInput

# Flags of a launcher's command line, and what gpurun does with each of them. Pure.


Does = Literal["taken", "kept", "read", "refused"]
DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")
"""What stands for a hyphen on web pages."""
CHOSEN = "gpurun chooses hosts, GPUs, addresses and ports"


class Flag(NamedTuple):
    """A flag that gpurun knows: how many words follow it, and why gpurun does what it does with it.

    `may_have`: its value may be missing (it then stands behind an ``=``), or two values may be one ``NAME=VALUE``.
    """

    values: int
    does: Does
    why: str = ""
    may_have: bool = False


class FoundFlag(NamedTuple):
    """A flag as somebody typed it. `name` is the spelling of the table."""

    name: str
    flag: Flag
    words: tuple[str, ...]
    values: tuple[str, ...]


class Counts(NamedTuple):
    """The processes that a line wants, as far as it says: all, or for each host and the hosts (least, most)."""

    ranks: int | None = None
    least: int | None = None
    per_host: int | None = None
    hosts: tuple[int, int] | None = None


NO_COUNTS = Counts()


class Meaning(NamedTuple):
    """What a launcher's flags mean for the job.

    Attributes:
        command: the command of each rank.
        kept: the flags that reach the launcher.
        taken: reason → flags that gpurun leaves out.
        env: variables of each rank.
        counts: the processes that the line wants.
        controller: how horovodrun starts ranks; None = as the job says.
        retries: how often the launcher would have started the failed ranks again.
    """

    command: tuple[str, ...]
    kept: tuple[str, ...] = ()
    taken: Mapping[str, tuple[str, ...]] = {}
    env: Mapping[str, str] = {}
    counts: Counts = NO_COUNTS
    controller: Literal["gloo", "mpi"] | None = None
    retries: int = 0


def flags(does: Does, text: str, why: str = "") -> dict[str, Flag]:
    """Return flags that gpurun treats alike.

    Behind a name, ``=`` stands for a value, ``==`` for two, ``==?`` for two that may be one ``NAME=VALUE``, ``?`` for
    one that may be missing.
    """
    return {word.rstrip("=?"): Flag(word.count("="), does, why, word.endswith("?")) for word in text.split()}


def as_gnu(flag: str) -> str:
    """Return the table's spelling of a flag such as ``--nproc_per_node``; argparse and click take both."""
    return flag.replace("_", "-")


def as_mpi(flag: str) -> str:
    """Return the table's spelling of a flag of Open MPI, which takes ``-mca`` for ``--mca``."""
    return f"--{flag.lstrip('-')}" if len(flag) > 2 else flag


@dataclass(frozen=True)
class Typed:
    """A launcher's own command line.

    Attributes:
        name: its name for people.
        launcher: gpurun's launcher that starts the same ranks; "" if none does.
        programs: its commands, such as ``colossalai run``.
        modules: the modules that ``python -m`` runs instead of it.
        flags: what gpurun does with each of its flags.
        spelled: the table's spelling of a flag.
        read: what its flags mean: (flags, words behind them, interpreter) → reading.
        each_host: for a launcher that can run itself on each host: (its name as typed, words behind it) → what it runs
            there.
        instead: for a launcher that gpurun cannot start: (words behind it, GPUs) → the line that does the same.
        is_queue: it asks another queue for machines, so it is refused for one GPU, too.
        is_it: whether words behind the name belong to this program; another program may have the same name.
    """

    name: str
    launcher: str
    programs: tuple[str, ...]
    modules: tuple[str, ...] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    spelled: Callable[[str], str] = as_gnu
    read: Callable[[list[FoundFlag], tuple[str, ...], tuple[str, ...]], Meaning] | None = None
    each_host: Callable[[tuple[str, ...], tuple[str, ...]], Meaning] | None = None
    instead: Callable[[tuple[str, ...], int], str] | None = None
    is_it: Callable[[tuple[str, ...]], bool] = lambda _words: True
    is_queue: bool = False


def read_flags(typed: Typed, words: tuple[str, ...]) -> tuple[list[FoundFlag], tuple[str, ...]]:
    """Return the flags at the beginning of `words`, and the words behind them.

    Raises:
        BadInput: gpurun does not know a flag, or a flag lacks its value; names the flag.
    """
    found, rest = list[FoundFlag](), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if (letters := _letters(typed, word)) is not None:
            found.extend(letters)
            continue
        name, flag, value = _known(typed, word)
        if value is not None:
            found.append(FoundFlag(name, flag, (word,), (value,)))
            continue
        count = 1 if flag.values == 2 and flag.may_have and "=" in "".join(rest[:1]) else flag.values
        if len(rest) < count:
            raise BadInput(f"{typed.name}: {word} needs a value", hint=f"write the value after {word}")
        values = tuple(rest[:count])
        del rest[:count]
        found.append(FoundFlag(name, flag, (word, *values), values))
    if rest and rest[0][:1] in DASHES:
        raise BadInput(
            f"{typed.name}: {rest[0]} begins with a typographic dash, which programs do not accept as - or --",
            hint="type each dash of the command again, as - or --",
        )
    return found, tuple(rest)


def _letters(typed: Typed, word: str) -> list[FoundFlag] | None:
    """Return the flags in one word, such as srun's ``-lu``; None if it is no such word."""
    names = [f"-{letter}" for letter in word[1:]]
    known = [typed.flags.get(name) for name in names]
    if typed.spelled is not as_gnu or len(names) < 2 or word in typed.flags:
        return None
    flags = [flag for flag in known if flag is not None and flag.values == 0 and flag.does != "refused"]
    if len(flags) < len(names):
        return None
    return [
        FoundFlag(name, flag, (word,) if at == 0 else (), ())
        for at, (name, flag) in enumerate(zip(names, flags, strict=True))
    ]


def _known(typed: Typed, word: str) -> tuple[str, Flag, str | None]:
    """Return the flag in `word`, and its value if the word has it, as in ``--nodes=2`` and ``-N2``."""
    head, equals, value = word.partition("=")
    name = typed.spelled(head)
    flag = typed.flags.get(name)
    if flag is None and typed.spelled is as_gnu:
        name, equals, value = _short(typed, word) if word[1] != "-" else (_whole(typed, name), equals, value)
        flag = typed.flags.get(name)
    if flag is None or (equals and flag.values != 1 and not flag.may_have):
        raise BadInput(
            f"{typed.name}: gpurun does not know the flag {word}",
            hint=f"remove {word}, or choose --launcher and write the command of each rank without {typed.name}",
        )
    if flag.does == "refused":
        raise BadInput(f"{typed.name}: gpurun does not support the flag {word}", hint=flag.why)
    return name, flag, value if equals else None


def _short(typed: Typed, word: str) -> tuple[str, str, str]:
    """Return a flag of one letter and the value that follows it in the same word; no name if there is none."""
    flag = typed.flags.get(word[:2])
    has_value = len(word) > 2 and flag is not None and (flag.values == 1 or flag.may_have)
    return word[:2] if has_value else "", "=", word[2:].removeprefix("=")


def _whole(typed: Typed, name: str) -> str:
    """Return the one flag that begins with `name`, as argparse and getopt take ``--nnode``; else `name`."""
    flags = [each for each in typed.flags if each.startswith(name)] if len(name) > 3 else []
    return flags[0] if len(flags) == 1 else name


def taken_of(found: Iterable[FoundFlag]) -> dict[str, tuple[str, ...]]:
    """Return the flags that gpurun leaves out, by reason."""
    taken = dict[str, tuple[str, ...]]()
    for each in found:
        if each.flag.does == "taken":
            taken[each.flag.why] = (*taken.get(each.flag.why, ()), *each.words)
    return taken


def kept_of(found: Iterable[FoundFlag]) -> tuple[str, ...]:
    """Return the words of the flags that reach the launcher."""
    return tuple(word for each in found if each.flag.does == "kept" for word in each.words)


def started_by_shell(program: Sequence[str], given: Mapping[str, str], words: Sequence[str]) -> tuple[str, ...]:
    """Return the argv that starts a program with flags whose values a shell reads from variables, before `words`."""
    flags = " ".join(f"{name} {value}" if value else name for name, value in given.items())
    return ("sh", "-c", f'exec {shlex.join(program)} {flags} "$@"', program[0], *words)


def replaced_of(found: Sequence[FoundFlag]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the flags that gpurun replaces, by reason, and the words of all others."""
    taken = [word for each in found if each.flag.why == CHOSEN for word in each.words]
    kept = [word for each in found if each.flag.why != CHOSEN and each.flag.does != "read" for word in each.words]
    return {CHOSEN: tuple(taken)} if taken else {}, kept


def value_of(found: Iterable[FoundFlag], *names: str) -> str | None:
    """Return the last value of a flag that has several names; None if it is not there."""
    values = [each.values[0] for each in found if each.name in names]
    return values[-1] if values else None


def number_of(typed: str, found: Iterable[FoundFlag], *names: str, words: tuple[str, ...] = ()) -> int | None:
    """Return the last number of a flag; None if it is not there, or one of `words`.

    Raises:
        BadInput: it is no number.
    """
    value = value_of(found, *names)
    if value is None or value in words:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise BadInput(
            f"{typed}: {names[0]} must be a number, not {value!r}", hint=f"write a number, such as {names[0]} 2"
        )
    return int(value)


# A shell's text as simple commands, as far as words can tell. Pure; nothing in it is run or expanded.


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


ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SPLITS = re.compile(r"-v?S|--split-string(=|$)")
"""The flag of ``env`` whose value is a text of several words, as in the first line of a script."""
EXPANDS = re.compile(r"[$`*?\[\]{}~#!\\]")

WRAPPERS: Mapping[str, tuple[str, int]] = {
    "nohup": ("", 0),
    "setsid": ("-c -f -w --fork --wait", 0),
    "time": ("-p -v -f= -o= -a --portability --verbose --format= --output= --append", 0),
    "xvfb-run": ("-a -s= -n= -l --auto-servernum --server-args= --server-num=", 0),
    "nice": ("-n= --adjustment=", 0),
    "ionice": ("-c= -n= -t --class= --classdata= --ignore", 0),
    "stdbuf": ("-i= -o= -e= --input= --output= --error=", 0),
    "unbuffer": ("-p", 0),
    "timeout": ("-k= -s= -v --kill-after= --signal= --foreground --preserve-status --verbose", 1),
    "taskset": ("-a -c --all-tasks --cpu-list", 1),
    "numactl": (
        "-N= -m= -C= -i= -l --cpunodebind= --membind= --physcpubind= --interleave= --localalloc --preferred= "
        "-a --all -w= --weighted-interleave= -b --balancing",
        0,
    ),
    "uv run": (
        "-p= --python= --with= --with-editable= --with-requirements= --extra= --group= --only-group= --no-group= "
        "--env-file= --directory= --project= --package= --index= --index-url= --extra-index-url= -i= --cache-dir= "
        "-q --quiet -v --verbose -n --no-cache --no-sync --frozen --locked --isolated --active --exact --offline "
        "--all-extras --all-groups --all-packages --no-dev --dev --only-dev --no-project --no-env-file --no-config "
        "--refresh -U --upgrade --native-tls --no-progress --managed-python --no-managed-python",
        0,
    ),
    "poetry run": ("-C= --directory= -q --quiet -n --no-interaction", 0),
    "pdm run": ("-p= --project= -s --site-packages", 0),
    "pipenv run": ("", 0),
    "rye run": ("", 0),
    "hatch run": ("", 0),
    "pixi run": ("-e= --environment= --manifest-path= --frozen --locked", 0),
    "conda run": ("-n= --name= -p= --prefix= --cwd= --no-capture-output --live-stream -v --verbose", 0),
    "mamba run": ("-n= --name= -p= --prefix= --cwd= --no-capture-output --live-stream -v --verbose", 0),
    "micromamba run": ("-n= --name= -p= --prefix= --cwd= -a= --attach=", 0),
}
"""Each starts another program and changes nothing of its words: flags, and how many words stand before the program."""


class Inner(NamedTuple):
    """What a wrapper runs.

    Attributes:
        words: the command within.
        around: the wrapper's words, which stay in front of the command of each rank.
        env: the variables that the wrapper sets.
    """

    words: tuple[str, ...]
    around: tuple[str, ...] = ()
    env: Mapping[str, str] = {}


def name_of(words: tuple[str, ...]) -> str:
    """Return the program's name, without its folder."""
    return words[0].rpartition("/")[2] if words else ""


def look_through(words: tuple[str, ...]) -> Inner | None:
    """Return what the wrapper at the beginning runs; None if there is no wrapper, or gpurun cannot read it."""
    if not words:
        return None
    if ASSIGNMENT.fullmatch(words[0]):
        return _assignments(words)
    program = name_of(words)
    if program in READERS:
        return READERS[program](words)
    for name, (options, operands) in WRAPPERS.items():
        head = (program, *words[1:])[: len(name.split())]
        if head == tuple(name.split()):
            return _behind(words, len(head), options, operands)
    return None


def shell_text(words: tuple[str, ...]) -> str | None:
    """Return the text that a shell runs, as in ``bash -lc TEXT``, or ``env -S``; None if `words` is no such command."""
    if name_of(words) == "env":
        at = next((at for at, word in enumerate(words) if SPLITS.match(word)), None)
        return None if at is None else " ".join((SPLITS.sub("", words[at]), *words[at + 1 :]))
    at = _text_at(words) if name_of(words) in SHELLS else None
    return None if at is None else words[at]


def _assignments(words: tuple[str, ...]) -> Inner:
    env, rest = dict[str, str](), list(words)
    while rest and (found := ASSIGNMENT.fullmatch(rest[0])):
        env[found[1]] = found[2]
        del rest[0]
    return Inner(tuple(rest), (), env)


def _split(words: list[str]) -> list[str] | None:
    """Return the words that ``env`` makes of its flag ``-S``; None if its text has more than words and quotes."""
    text, rest = SPLITS.sub("", words[0]), words[1:]
    if not text and rest:
        text = rest.pop(0)
    try:
        return None if re.search(r"[\\$#]", text) else [*shlex.split(text), *rest]
    except ValueError:
        return None


def _env(words: tuple[str, ...]) -> Inner | None:
    """Read ``env``: assignments, ``-u NAME``, ``-C DIR`` and ``-S TEXT``. ``-i`` would hide what gpurun tells ranks."""
    around, rest = list[str](), list(words[1:])
    while rest and rest[0].startswith("-"):
        if SPLITS.match(rest[0]):
            if (split := _split(rest)) is None:
                return None
            rest = split
            continue
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-i", "-", "--ignore-environment"):
            return None
        takes = word in ("-u", "--unset", "-C", "--chdir")
        if not (takes and rest) and not re.match(r"-[uC].|--(unset|chdir)=", word):
            return None
        around += [word, rest.pop(0)] if takes else [word]
    inner = _assignments(tuple(rest))
    return inner._replace(around=(words[0], *around) if around else ()) if inner.words else None


def _text_at(words: tuple[str, ...]) -> int | None:
    at, is_text = 1, False
    while at < len(words) and words[at].startswith(("-", "+")):
        letters = words[at].lstrip("-+")
        if words[at].startswith("--"):
            return None
        is_text = is_text or "c" in letters
        at += 2 if letters.endswith("o") else 1
    return at if is_text and at < len(words) else None


def _shell(words: tuple[str, ...]) -> Inner | None:
    at = _text_at(words)
    if at is None or at + 1 != len(words) or EXPANDS.search(words[at]):
        return None
    commands = list(simple_commands(words[at]))
    try:
        whole = tuple(shlex.split(words[at]))
    except ValueError:
        return None
    if len(commands) != 1 or commands[0] not in (whole, whole[1:]) or whole[0] in RESERVED - {"exec"}:
        return None
    plain = words[1:at] == ("-c",)
    return Inner(whole, () if plain else (*words[:at], 'exec "$@"', words[0]))


def _behind(words: tuple[str, ...], at: int, options: str, operands: int) -> Inner | None:
    with_value = {word.rstrip("=") for word in options.split() if word.endswith("=")}
    known = with_value | set(options.split())
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "--":
            at += 1
            break
        if word in ("-m", "--module") and name_of(words) == "uv":
            return Inner(("python", "-m", *words[at + 1 :]), words[:at])
        name, equals, _ = word.partition("=")
        is_short = len(word) > 2 and word[1] != "-" and word[:2] in with_value
        if name not in known and not is_short:
            return None
        at += 2 if name in with_value and not equals and not (is_short and name not in with_value) else 1
    at += operands
    return Inner(words[at:], words[:at]) if at < len(words) else None


def _exec(words: tuple[str, ...]) -> Inner | None:
    """Read a shell's ``exec`` and ``command``: the command takes the shell's place."""
    return Inner(words[1:]) if words[0] in ("exec", "command") and words[1:] and not words[1].startswith("-") else None


READERS: Mapping[str, Callable[[tuple[str, ...]], Inner | None]] = {
    "env": _env, "exec": _exec, "command": _exec, **dict.fromkeys(SHELLS, _shell),
}  # fmt: skip
"""The wrappers that set variables, or have a text instead of words."""


def refuse_names(env: Mapping[str, str]) -> None:
    """Refuse variables that would give a rank another number or job than gpurun does."""
    if wrong := sorted(name for name in env if name.startswith("GPURUN_")):
        raise BadInput(f"gpurun itself sets {', '.join(wrong)}", hint=f"remove {', '.join(wrong)} from the command")

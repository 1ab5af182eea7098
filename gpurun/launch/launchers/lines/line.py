"""Read a command line: what stands in front, the launcher, and the words behind it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from gpurun.launch.launchers.lines import wrappers
from gpurun.launch.launchers.lines.flags import (
    NO_COUNTS,
    Counts,
    FoundFlag,
    Typed,
    number_of,
    read_flags,
    taken_of,
    value_of,
)
from gpurun.launch.launchers.lines.shell import SAY, SHELLS, simple_commands
from gpurun.launch.launchers.lines.table import LAUNCHERS, SRUN

PYTHON = ("python3", "-u")
DEPTH, MOST_COMMANDS = 20, 100
"""More wrappers than this are none of a person's."""
FIRST = frozenset(name.split()[0] for typed in LAUNCHERS for name in typed.programs) - {"ds"}
"""What a word among others is taken for a launcher by; `ds` may be anything."""


class Start(NamedTuple):
    """A launcher at the beginning of a command.

    Attributes:
        typed: the launcher.
        words: the words behind its name.
        interpreter: what it runs Python scripts with.
        taken: reason → words that gpurun leaves out.
    """

    typed: Typed
    words: tuple[str, ...]
    interpreter: tuple[str, ...] = PYTHON
    taken: Mapping[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        words: the words behind the launcher; without a launcher, the command itself.
        whole: `words` with the launcher's name.
        typed: the launcher; None if there is none.
        interpreter: what the launcher runs Python scripts with.
        around: wrappers that stay in front of the command of each rank.
        env: the variables that the line sets for each rank.
        taken: reason → words that gpurun leaves out.
        counts: the processes that ``srun`` wants.
        is_read: whether something in front must not stay: an assignment, or ``srun``.
        by_srun: whether ``srun`` stands in front.
        by_mpi: whether its flag ``--mpi`` says that the program uses MPI.
        hidden: the launcher in a part that gpurun cannot read, such as a shell's text; None if there is none.
    """

    words: tuple[str, ...]
    whole: tuple[str, ...] = ()
    typed: Typed | None = None
    interpreter: tuple[str, ...] = PYTHON
    around: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Counts = NO_COUNTS
    is_read: bool = False
    by_srun: bool = False
    by_mpi: bool = False
    hidden: Typed | None = None


def read_line(command: tuple[str, ...]) -> CommandLine:
    """Read a command.

    Raises:
        BadInput: ``srun`` has a flag that gpurun does not know, or cannot obey.
    """
    line = CommandLine(command)
    for _ in range(DEPTH):
        if (start := _start(line.words)) is not None:
            return replace(line, words=start.words, whole=line.words, typed=start.typed, interpreter=start.interpreter,
                           taken={**line.taken, **start.taken})  # fmt: skip
        if wrappers.name_of(line.words) == "srun":
            line = _behind_srun(line)
        elif (inner := wrappers.look_through(line.words)) is not None:
            assigned = wrappers.ASSIGNMENT.fullmatch(line.words[0]) is not None
            line = replace(
                line, words=inner.words, around=(*line.around, *inner.around), env={**line.env, **inner.env},
                is_read=line.is_read or (assigned and line.words == command),
            )  # fmt: skip
        else:
            break
    return replace(line, whole=line.words, hidden=_hidden(line.words))


def _start(words: tuple[str, ...]) -> Start | None:
    """Return the launcher that a command begins with, by its name or as a Python module; None if it does not."""
    program = wrappers.name_of(words)
    if program.startswith("python"):
        return _by_python(words)
    for typed in LAUNCHERS:
        for name in typed.programs:
            size = len(name.split())
            if (program, *words[1:size]) == tuple(name.split()) and typed.is_it(words[size:]):
                return Start(typed, words[size:])
    return None


def _by_python(words: tuple[str, ...]) -> Start | None:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m" and not words[at].startswith("-c"):
        at += 2 if words[at] in ("-X", "-W") else 1
    own, rest = tuple(word for word in words[1:at] if word != "-u"), words[at:]
    taken = {"flags of the launcher's own Python": own} if own else {}
    interpreter = (words[0], "-u")
    if rest[:1] == ("-m",):
        for typed in LAUNCHERS:
            for name in typed.modules:
                size = 1 + len(name.split())
                if rest[1:size] == tuple(name.split()):
                    return Start(typed, rest[size:], interpreter, taken)
        return None
    start = _start(rest) if rest and "/" in rest[0] and not rest[0].endswith(".py") else None
    return start._replace(interpreter=interpreter, taken=taken) if start is not None else None


def _behind_srun(line: CommandLine) -> CommandLine:
    found, words = read_flags(SRUN, line.words[1:])
    env, export = dict[str, str](), value_of(found, "--export")
    for word in (export or "").split(","):
        name, equals, value = word.partition("=")
        if equals:
            env[name] = value
    taken = taken_of([*found, *(_named(each) for each in found if each.name == "--export")])
    said = taken or {"gpurun starts the ranks": ("srun",)}
    ranks = number_of("srun", found, "--ntasks", "-n")
    hosts = number_of("srun", found, "--nodes", "-N")
    each = number_of("srun", found, "--ntasks-per-node", "--tasks-per-node")
    total = ranks if ranks is not None else hosts * each if hosts is not None and each is not None else None
    return replace(
        line, words=words, env={**line.env, **env}, taken={**line.taken, **said}, is_read=True, by_srun=True,
        counts=Counts(total), by_mpi=(value_of(found, "--mpi") or "none") not in ("none", "list"),
    )  # fmt: skip


def _named(each: FoundFlag) -> FoundFlag:
    """Return srun's ``--export`` as a flag that gpurun replaces: its values are set, the rest is the image's."""
    return each._replace(
        flag=each.flag._replace(
            does="taken", why="gpurun sets the named values for each rank; other variables come from the image"
        )
    )


def _hidden(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that a command seems to start where gpurun cannot see its flags."""
    if wrappers.name_of(words) in SAY:
        return None
    text = wrappers.shell_text(words)
    if text is not None:
        inner = (read_start(command) for command in simple_commands(text))
        return next((typed for typed in inner if typed is not None), None)
    names = [word.rpartition("/")[2] for word in words]
    first = 1 if not wrappers.name_of(words).startswith("python") else len(words)
    for at in range(first, len(words) - 1):
        is_value = words[at - 1].startswith("--") and words[at - 1] != "--"
        typed = None
        if names[at] in SHELLS and words[at + 1].startswith("-"):
            typed = _hidden(words[at:]) if wrappers.shell_text(words[at:]) is not None else None
        elif names[at].startswith("python") or (names[at] in FIRST and not is_value):
            start = _start(words[at:])
            typed = start.typed if start is not None else None
        if typed is not None:
            return typed
    return _run_by_python(words) or (_in_a_text(words) if first == 1 else None)


def _in_a_text(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that another program's text starts, as in ``script -c 'torchrun t.py'``."""
    for word, before in zip(words[1:], words, strict=False):
        if any(name in word for name in FIRST) and len(word.split()) > 1 and not before.startswith("--"):
            for command in islice(simple_commands(word), MOST_COMMANDS):
                if (start := _start(command)) is not None:
                    return start.typed
    return None


def _run_by_python(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that another module runs, as in ``python -m debugpy -m torch.distributed.run``."""
    for at in range(1, len(words)):
        if (match := re.fullmatch(r"-[A-Za-z]*?m([a-z_.]*)", words[at])) is None:
            continue
        behind = " ".join(word for word in (match[1], *words[at + 1 : at + 3]) if word)
        for typed in LAUNCHERS:
            if any(f"{behind} ".startswith(f"{name} ") for name in typed.modules):
                return typed
    return None


def read_start(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher of one command of a shell's text."""
    start = begun(words)
    return start.typed if start is not None else None


def begun(words: tuple[str, ...]) -> Start | None:
    """Return the launcher that one command of a shell's text starts; without words, if its flags cannot be read."""
    for _ in range(DEPTH):
        if not words:
            return None
        if (start := _start(words)) is not None:
            return start
        if wrappers.name_of(words) == "srun":
            return Start(SRUN, words[1:])
        inner = wrappers.look_through(words)
        if inner is None:
            hidden = _hidden(words)
            return Start(hidden, ()) if hidden is not None else None
        words = inner.words
    return None

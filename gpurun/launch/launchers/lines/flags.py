"""Flags of a launcher's command line, and what gpurun does with each of them. Pure.

A flag is *taken* (gpurun decides, and says so), *kept* (it reaches the launcher), *read* (it changes the job or the
command of each rank) or *refused*, with what to write instead. No flag is dropped in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gpurun.errors import BadInput

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
    """

    command: tuple[str, ...]
    kept: tuple[str, ...] = ()
    taken: Mapping[str, tuple[str, ...]] = {}
    env: Mapping[str, str] = {}
    counts: Counts = NO_COUNTS
    controller: Literal["gloo", "mpi"] | None = None


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
